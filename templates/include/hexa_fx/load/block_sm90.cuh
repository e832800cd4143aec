// What brings operands of FP8 products to shared memory. Warps 0 and 1 of a row tile: its rows where they are gathered, and always its
// scales, which lie by row of the operand. The warp that copies weight tiles and runs their queue: groups of 128 rows of both operands,
// turned round, and their scales.
#pragma once
#include <cute/arch/cluster_sm90.hpp>

#include <hexa_fx/kernels/config_fp8_sm90.cuh>
#include <hexa_fx/load/gather_sm90.cuh>
#include <hexa_fx/scheduler/ring_sm90.cuh>

namespace hexa::sm90 {

// Scales of a row, of steps that follow one another. `Ahead` are read at a time, for rows lie apart, and each read of one takes as long.
template <int Ahead>
struct RowScales {
  const float* at;
  float next[Ahead];

  // together: how many one instruction may read, 1, 2 or 4; left: steps to come.
  CUTE_DEVICE void read(int together, int left) {
    if (Ahead == 4 && together == 4 && left >= 4) {
      const float4 x = __ldg(reinterpret_cast<const float4*>(at));
      next[0] = x.x, next[1] = x.y, next[Ahead - 2] = x.z, next[Ahead - 1] = x.w;
    } else {
      CUTE_UNROLL
      for (int i = 0; i < Ahead; i += 2) {
        if (together >= 2 && left >= i + 2) {
          const float2 x = __ldg(reinterpret_cast<const float2*>(at + i));
          next[i] = x.x, next[i + 1] = x.y;
        } else {
          if (left > i) next[i] = __ldg(at + i);
          if (left > i + 1) next[i + 1] = __ldg(at + i + 1);
        }
      }
    }
    at += Ahead;
  }
  CUTE_DEVICE float take() {
    const float first = next[0];
    CUTE_UNROLL
    for (int i = 0; i + 1 < Ahead; ++i) next[i] = next[i + 1];
    return first;
  }
};

template <class C>
struct BlockLoader {
  static constexpr int kPiece = E4m3::kPiece, kBlockBytes = 8 * kLineBytes;
  static constexpr int kRows = C::BM / 8, kScales = C::BM / kScaleThreads;
  static constexpr int kAhead = C::GatherRows ? 2 : 4;  // gathering threads keep addresses in their registers
  BlockSmem<C>& sm;
  const BlockParams& p;
  Pipe pipe;

  CUTE_DEVICE int thread() const { return threadIdx.x & 63; }
  CUTE_DEVICE uint32_t token(int slot) const { return __umulhi(2u * uint32_t(slot), p.div_mul) >> p.div_shift; }
  // Of a row of the tile, the row of A. Rows past the end repeat the last one: their results are never stored.
  CUTE_DEVICE uint32_t source(const Tile& t, int row) const {
    const int at = t.row0 + min(row, t.rows - 1);
    if constexpr (C::GatherRows) return token(__ldg(p.v + at));
    else return at;
  }

  CUTE_DEVICE void tile(const Tile& t) {
    const int blocks = p.K / kScaleBlock, r = thread() >> 3, c = thread() & 7;
    const char* row[kRows];
    if constexpr (C::GatherRows) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i)
        row[i] = static_cast<const char*>(p.a) + size_t(source(t, r + 8 * i)) * uint32_t(p.a_ld) + c * kPiece;
    }
    RowScales<kAhead> scale[kScales], of_columns;
    CUTE_UNROLL
    for (int i = 0; i < kScales; ++i) scale[i].at = p.a_scale + size_t(source(t, thread() + kScaleThreads * i)) * uint32_t(blocks);
    // Threads 0 and 1 also have the scale of one part's columns each. A part past the last column has any.
    const int columns = C::PairedWeight ? 2 * p.N / kScaleBlock : ceil_div(p.N, kScaleBlock);
    const int part = t.n0 / kScaleBlock + (thread() & 1) * (C::PairedWeight ? p.N / kScaleBlock : 1);
    of_columns.at = p.w_scale + (size_t(t.expert) * uint32_t(columns) + min(part, columns - 1)) * uint32_t(blocks);
    const auto address = [](const float* x) { return uint32_t(reinterpret_cast<uint64_t>(x)) / uint32_t(sizeof(float)); };
    const uint32_t low = address(p.a_scale) | address(p.w_scale) | blocks;
    const int together = low % 4 == 0 ? 4 : low % 2 == 0 ? 2 : 1;
    const uint32_t offset = swizzled(r, c);
    const int halves = t.rows > 64 ? kRows / 8 : 1;
#pragma unroll 1
    for (int k = 0; k < t.k_tiles; ++k) {
      if (k % kAhead == 0) {
        CUTE_UNROLL
        for (int i = 0; i < kScales; ++i) scale[i].read(together, t.k_tiles - k);
        if (thread() < kParts) of_columns.read(together, t.k_tiles - k);
      }
      Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1);
      if constexpr (C::GatherRows) {
        const uint32_t dst = opaque(cast_smem_ptr_to_uint(sm.a[0]) + pipe.index * Smem<C>::ABytes + offset);
        CUTE_UNROLL
        for (int h = 0; h < kRows / 8; ++h) {
          if (h < halves) {
            CUTE_UNROLL
            for (int i = 8 * h; i < 8 * h + 8; ++i) cp_async_16(dst + i * kBlockBytes, row[i], kPieceBytes);
          }
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < kScales; ++i) sm.row_scale[pipe.index][thread() + kScaleThreads * i] = scale[i].take();
      if (thread() < kParts) sm.column_scale[pipe.index][thread()] = of_columns.take();
      Barrier::arrive(&sm.full[pipe.index]);
      if constexpr (C::GatherRows) cutlass::arch::cpasync_barrier_arrive_noinc(&sm.landed[pipe.index]);
      pipe.template next<C::Stages>();
      if constexpr (C::GatherRows) {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) row[i] = opaque(row[i] + kLineBytes);
      }
    }
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (t.kind == kRowTile) tile(t);
      __syncwarp();
    }
  }
};

template <class C>
struct GroupCopier {
  BlockSmem<C>& sm;
  const BlockParams& p;
  const TmaDescriptor* maps;
  Pipe pipe;

  // The first group of an expert. All lanes together.
  CUTE_DEVICE int first_group(int expert) const {
    int sum = 0;
    for (int e = lane_id(); e < expert; e += 32) sum += ceil_div(sm.offs[e + 1] - sm.offs[e], kScaleBlock);
    return __reduce_add_sync(~0u, sum);
  }

  CUTE_DEVICE void tile(const Tile& t, int first) {
    const int q_width = ceil_div(p.C, kScaleBlock) * kScaleBlock;  // features that have scales
    const uint32_t q_bytes = uint32_t(min(int(C::BN), q_width - t.n0)) * sizeof(float), p_bytes = C::BM * sizeof(float);
    for (int k = 0; k < t.k_tiles; ++k) {
      const int group = first + k, stage = pipe.index;
      Barrier::wait(&sm.empty[stage], pipe.phase ^ 1);
      cutlass::arch::fence_view_async_shared();  // lanes have read the scales that the copy engine overwrites
      uint64_t* bar = &sm.full[stage];
      TxBarrier::arrive_and_expect_tx(bar, Smem<C>::ABytes + Smem<C>::BBytes + p_bytes + q_bytes);
      SM90_TMA_LOAD_3D::copy(maps + kPMap, bar, kEvictNormal, sm.a[stage], 0, t.m0, group);
      CUTE_UNROLL
      for (int h = 0; h < kParts; ++h)
        SM90_TMA_LOAD_3D::copy(maps + kQMap, bar, kEvictNormal, sm.b[stage] + h * (kPart * kLineBytes), 0, t.n0 + h * kPart, group);
      SM90_BULK_COPY_G2S::copy(p.p_scale + size_t(group) * uint32_t(p.p_scale_ld) + t.m0, bar, sm.row_scale[stage], p_bytes);
      SM90_BULK_COPY_G2S::copy(p.q_scale + size_t(group) * uint32_t(p.q_scale_ld) + t.n0, bar, sm.column_scale[stage], q_bytes);
      pipe.template next<C::Stages>();
    }
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    TileWriter<C> writer;
    const Counts<C> counts(p);
    const bool lead = cute::elect_one_sync();
    if (lead) writer.publish(sm, p, counts, true, fetch_ticket(p), 0);
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      const int first = first_group(t.expert);
      if (lead) {
        const int ticket = fetch_ticket(p);
        tile(t, first);
        writer.publish(sm, p, counts, true, ticket, 0);
      }
      __syncwarp();
    }
    if (lead) retire(p, gridDim.x);
  }
};

}  // namespace hexa::sm90
