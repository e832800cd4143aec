// Gathered rows come by 16-byte cp.async from warps of their own.
//
// cp.async writes through the generic proxy and wgmma reads through the async one. A relay warp waits until a gathered stage
// has landed, fences and hands it on, so that neither the gathering threads (which would have to wait for their own loads) nor
// the consumers (whose next wgmma waits behind the fence) do it.
#pragma once
#include <hexa_fx/ptx/sm90.cuh>
#include <hexa_fx/scheduler/ring_sm90.cuh>

namespace hexa::sm90 {

template <class C>
CUTE_DEVICE bool gathered(const Tile& t) {
  return (t.kind == kRowTile && C::GatherRows) || (t.kind == kWeightTile && C::GatherWeight);
}

// Two warps, or three.
template <class C>
struct Gatherer {
  using Operand = typename C::Operand;
  static constexpr int kPiece = Operand::kPiece, kLine = Operand::kLine, kBlockRows = 8, kBlockBytes = kBlockRows * kLineBytes;
  Smem<C>& sm;
  const GroupedParams& p;
  Pipe pipe;

  CUTE_DEVICE int thread() const { return threadIdx.x & 63; }
  CUTE_DEVICE uint32_t token(int slot) const { return __umulhi(2u * uint32_t(slot), p.div_mul) >> p.div_shift; }
  CUTE_DEVICE void wait_for_room() { Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1); }
  CUTE_DEVICE void issued() {
    if constexpr (C::Swapped) cutlass::arch::cpasync_barrier_arrive_noinc(&sm.full[pipe.index]);
    else cutlass::arch::cpasync_barrier_arrive_noinc(&sm.landed[pipe.index]);
    pipe.template next<C::Stages>();
  }

  // The copy engine brings the steps of the second product. Gathering warps take part in them all the same: a warp that skips a stage may
  // find that its parity has changed twice.
  CUTE_DEVICE void pass_low_rank() {
    for (int k = 0; k < low_rank_steps<C>(p); ++k) {
      wait_for_room();
      issued();
    }
  }

  CUTE_DEVICE uint32_t stage_address() const { return cast_smem_ptr_to_uint(sm.a[0]) + pipe.index * Smem<C>::ABytes; }

  // 8 threads a line of a row; a thread keeps addresses of its BM / 8 rows for the whole tile. Rows past the end repeat the
  // last one: their results are never stored.
  CUTE_DEVICE void rows(const Tile& t) {
    constexpr int kRows = C::BM / 8;
    const int r = thread() >> 3, c = thread() & 7;
    const char* row[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int slot = __ldg(p.v + t.row0 + min(r + 8 * i, t.rows - 1));
      row[i] = static_cast<const char*>(p.a) + Operand::bytes(size_t(token(slot)) * uint32_t(p.a_ld) + c * kPiece);
    }
    const uint32_t offset = swizzled(r, c);
    const int blocks = t.rows > 64 ? kRows / 8 : 1;
    pass_low_rank();
    for (int k = 0; k < t.k_tiles - low_rank_steps<C>(p); ++k) {
      wait_for_room();
      const uint32_t dst = opaque(stage_address() + offset);
      const int bytes = k * C::BK + c * kPiece < p.K ? kPieceBytes : 0;
      CUTE_UNROLL
      for (int h = 0; h < kRows / 8; ++h) {
        if (h < blocks) {
          CUTE_UNROLL
          for (int i = 8 * h; i < 8 * h + 8; ++i) cp_async_16(dst + i * kBlockBytes, row[i], bytes);
        }
      }
      issued();
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) row[i] = opaque(row[i] + Operand::bytes(C::BK));
    }
    if constexpr (C::Borrow) pipe.template next<C::Stages>();
  }

  // The same for a swapped tile, of more rows: three warps, twelve rows at a time, and the consumers fence for themselves. Rows past
  // the end stay as they are: they are columns of wgmma, which have no effect on each other.
  CUTE_DEVICE void many_rows(const Tile& t) {
    constexpr int kTogether = kGatherWarps<C> * 4, kPasses = ceil_div(C::BM, kTogether);
    static_assert(kTogether % 8 == 4, "every second pass begins in the middle of a swizzled block of eight rows");
    const int r = threadIdx.x >> 3, c = threadIdx.x & 7;
    const char* row[kPasses];
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      const int slot = __ldg(p.v + t.row0 + min(r + kTogether * i, t.rows - 1));
      row[i] = static_cast<const char*>(p.a) + Operand::bytes(size_t(token(slot)) * uint32_t(p.a_ld) + c * kPiece);
    }
    const uint32_t offset = swizzled(r, c);
    const int passes = ceil_div(t.rows - r, kTogether);
    pass_low_rank();
    for (int k = 0; k < t.k_tiles - low_rank_steps<C>(p); ++k) {
      const int left = __shfl_sync(~0u, passes, lane_id());  // itself: the compiler would keep all that follows from it, and spill
      wait_for_room();
      const uint32_t dst[2] = {opaque(stage_address() + offset), opaque(stage_address() + (offset ^ 64))};
      const int bytes = k * C::BK + c * kPiece < p.K ? kPieceBytes : 0;
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) cp_async_16_if(i < left, dst[i & 1] + i * (kTogether * kLineBytes), row[i], bytes);
      issued();
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) row[i] = opaque(row[i] + Operand::bytes(C::BK));
    }
  }

  // A warp loads 32 of a step's 64 rows, 8 lanes 64 features of one. A lane knows one row's offset a step ahead. It asks for that row's
  // slot `kAhead` steps before it looks at it, in a register of its own: where a loop hands slots on, it waits for the newest to do so.
  CUTE_DEVICE void features(const Tile& t) {
    if (t.k_tiles == 0) return;
    constexpr int kHalves = C::BM / kLine, kPasses = 8, kAhead = 2;
    const int lane = lane_id(), w = warp_in_group() & 1, sub = lane >> 3, c = lane & 7;
    const char* base = opaque(static_cast<const char*>(p.p) + Operand::bytes(size_t(t.m0 + c * kPiece)));
    int bytes[kHalves];
    CUTE_UNROLL
    for (int h = 0; h < kHalves; ++h) bytes[h] = t.m0 + h * kLine + c * kPiece < p.R ? kPieceBytes : 0;
    const uint32_t chunks = uint32_t(p.p_ld) / kPiece;
    const int odd = t.rows - (t.k_tiles - 1) * C::BK;
    const uint32_t offset = (w * 32 + sub) * kLineBytes + (swizzled_piece(sub, c) << 4);  // 4 rows on: + 512, and bit 6 flips
    const int* slots = p.v + t.row0;
    auto ask = [&](int k, int& slot) {  // rows past the odd ones of step 0, and past the end, repeat the last
      const int r = w * 32 + lane, row = k == 0 ? min(r, odd - 1) : min(odd + (k - 1) * C::BK + r, t.rows - 1);
      slot = load_ahead(slots + row);
    };
    int first, soon[kAhead];
    ask(0, first);
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) ask(1 + i, soon[i]);
    uint32_t now = token(first) * chunks;  // in 16 bytes
    auto step = [&](int k, int& next, auto whole) {
      const char* row[kPasses];
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) row[i] = opaque(base + size_t(__shfl_sync(~0u, now, i * 4 + sub)) * kPieceBytes);
      now = opaque(token(next) * chunks);
      ask(k + 1 + kAhead, next);
      const uint32_t dst[2] = {opaque(stage_address() + offset), opaque(stage_address() + (offset ^ 64) + 512)};
      wait_for_room();
      const int last = opaque(uint32_t(odd - w * 32 - sub));  // rows of no interest become zeros
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        CUTE_UNROLL
        for (int h = 0; h < kHalves; ++h)
          cp_async_16(dst[i & 1] + (i >> 1) * kBlockBytes + h * (C::BK * kLineBytes), row[i] + h * kLineBytes,
                      decltype(whole)::value || i * 4 < last ? bytes[h] : 0);
      }
      issued();
    };
    step(0, soon[0], false_type{});
    for (int k = 1; k < t.k_tiles; k += kAhead) {
      CUTE_UNROLL
      for (int i = 0; i < kAhead; ++i)
        if (k + i < t.k_tiles) step(k + i, soon[(1 + i) % kAhead], true_type{});
    }
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (!gathered<C>(t)) {
        pipe.template skip<C::Stages>(t.k_tiles);
        continue;
      }
      if constexpr (C::Swapped) many_rows(t);
      else if (C::RowOp && t.kind == kRowTile) rows(t);
      if constexpr (C::WeightOp) {
        if (t.kind == kWeightTile) features(t);
      }
      __syncwarp();
    }
    cp_async_wait_all();
  }
};

// One warp; its lane 0 works.
template <class C>
struct RelayWarp {
  Smem<C>& sm;
  const GroupedParams& p;
  Pipe pipe;
  uint32_t parity = 0;  // of `landed`, a bit a stage: tiles without gathered operand pass it by, so the pipe's phase is not its
  CUTE_DEVICE void run() {
    TileReader<C> reader;
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (!gathered<C>(t)) {
        pipe.template skip<C::Stages>(t.k_tiles);
        continue;
      }
      if (lane_id() == 0) {
        for (int k = 0; k < t.k_tiles; ++k) {
          Barrier::wait(&sm.landed[pipe.index], (parity >> pipe.index) & 1);
          parity ^= 1u << pipe.index;
          cutlass::arch::fence_view_async_shared();
          Barrier::arrive(&sm.full[pipe.index]);
          pipe.template next<C::Stages>();
        }
        if constexpr (C::Borrow) pipe.template next<C::Stages>();
      }
      __syncwarp();
    }
  }
};

}  // namespace hexa::sm90
