// Warps 0 and 1 of an FP8 row tile: its rows where they are gathered, and always its scales, which lie by row of the operand.
#pragma once
#include <hexa_fx/kernels/config_fp8_sm90.cuh>
#include <hexa_fx/load/gather_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct BlockLoader {
  static constexpr int kPiece = E4m3::kPiece, kBlockBytes = 8 * kLineBytes;
  static constexpr int kRows = C::BM / 8, kScales = C::BM / kScaleThreads;
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
    const float* scale[kScales];
    CUTE_UNROLL
    for (int i = 0; i < kScales; ++i) scale[i] = p.a_scale + size_t(source(t, thread() + kScaleThreads * i)) * uint32_t(blocks);
    // Threads 0 and 1 also copy the scale of one part's columns each. A part past the last column has any.
    const int columns = C::PairedWeight ? 2 * p.N / kScaleBlock : ceil_div(p.N, kScaleBlock);
    const int part = t.n0 / kScaleBlock + (thread() & 1) * (C::PairedWeight ? p.N / kScaleBlock : 1);
    const float* of_columns = p.w_scale + (size_t(t.expert) * uint32_t(columns) + min(part, columns - 1)) * uint32_t(blocks);
    const uint32_t offset = swizzled(r, c);
    const int halves = t.rows > 64 ? kRows / 8 : 1;
    for (int k = 0; k < t.k_tiles; ++k) {
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
      const uint32_t to = cast_smem_ptr_to_uint(&sm.row_scale[pipe.index][thread()]);
      CUTE_UNROLL
      for (int i = 0; i < kScales; ++i) cp_async_4(to + i * (kScaleThreads * 4), scale[i] + k);
      if (thread() < kParts) cp_async_4(cast_smem_ptr_to_uint(&sm.column_scale[pipe.index][thread()]), of_columns + k);
      if constexpr (C::GatherRows) cutlass::arch::cpasync_barrier_arrive_noinc(&sm.landed[pipe.index]);
      else cutlass::arch::cpasync_barrier_arrive_noinc(&sm.full[pipe.index]);
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

}  // namespace hexa::sm90
