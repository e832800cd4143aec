// Producer warpgroup: tiles of weights and of contiguous rows by the copy engine (one thread), gathered rows by 16-byte
// cp.async from all 128 threads.
//
// cp.async writes through the generic proxy and wgmma reads through the async one, so the writing threads fence. They do it
// `Lag` stages behind the loads they issue, and at once when they would have to wait anyway: the consumers then never fence.
#pragma once
#include <hexa_fx/schedule_sm90.cuh>

namespace hexa::sm90 {

CUTE_DEVICE void cp_async_16(uint8_t* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(cast_smem_ptr_to_uint(dst)), "l"(src),
               "r"(valid ? 16 : 0) : "memory");
}

template <class C>
struct Producer {
  using T = typename C::T;
  static constexpr uint32_t kABytes = Smem<C>::ABytes, kBBytes = Smem<C>::BBytes;
  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;  // rows, weight, weight of up, P, Q
  Pipe pipe;
  Pipe signal;      // the oldest stage not yet handed over
  int pending = 0;

  CUTE_DEVICE int thread() const { return threadIdx.x & 127; }

  CUTE_DEVICE void hand_over() {
    cutlass::arch::fence_view_async_shared();
    Barrier::arrive(&sm.full[signal.index]);
    signal.template next<C::Stages>();
    --pending;
  }
  CUTE_DEVICE void flush() {
    if constexpr (C::AnyGather) {
      if (pending == 0) return;
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      while (pending) hand_over();
    }
  }
  CUTE_DEVICE void wait_for_room() {
    uint64_t* empty = &sm.empty[pipe.index];
    if (C::AnyGather && !Barrier::test_wait(empty, pipe.phase ^ 1, 1)) flush();
    Barrier::wait(empty, pipe.phase ^ 1);
  }
  // This thread's part of the stage is issued.
  CUTE_DEVICE void issued() {
    if constexpr (C::AnyGather) {
      asm volatile("cp.async.commit_group;" ::: "memory");
      if (++pending > C::Lag) {
        asm volatile("cp.async.wait_group %0;" ::"n"(C::Lag) : "memory");
        hand_over();
      }
    }
    pipe.template next<C::Stages>();
  }

  CUTE_DEVICE void load_weight(const Tile& t, int k) {
    uint8_t* b = sm.b[pipe.index];
    uint64_t* bar = &sm.full[pipe.index];
    CUTE_UNROLL
    for (int half = 0; half < C::WeightBoxes; ++half) {  // gate columns, then up columns
      const bool up_tensor = C::SplitWeight && half == 1;
      const TmaDescriptor* map = maps + (up_tensor ? 2 : 1);
      const int n = t.n0 * C::WeightColumnScale + (up_tensor ? 0 : half * p.N);
      uint8_t* dst = b + half * C::WeightBox * 128;
      if constexpr (!C::WeightKN) {
        SM90_TMA_LOAD_3D::copy(map, bar, kEvictNormal, dst, k * C::BK, n, t.expert);
      } else {
        CUTE_UNROLL
        for (int j = 0; j < C::WeightBox / 64; ++j)
          SM90_TMA_LOAD_3D::copy(map, bar, kEvictNormal, dst + j * (C::BK * 128), n + 64 * j, k * C::BK, t.expert);
      }
    }
  }

  CUTE_DEVICE void row_tile(const Tile& t) {
    if constexpr (C::GatherRows) gather_rows(t);
    else {
      for (int k = 0; k < t.k_tiles; ++k) {
        wait_for_room();
        if (thread() == 0) {
          uint64_t* bar = &sm.full[pipe.index];
          TxBarrier::arrive_and_expect_tx(bar, kABytes + kBBytes);
          SM90_TMA_LOAD_2D::copy(maps, bar, kEvictNormal, sm.a[pipe.index], k * C::BK, t.row0);
          load_weight(t, k);
        }
        issued();
      }
    }
  }

  // 8 threads a row of 64 columns; a thread keeps the addresses of its BM / 16 rows for the whole tile.
  CUTE_DEVICE void gather_rows(const Tile& t) {
    constexpr int kRows = C::BM / 16;
    const int r = thread() >> 3, c = thread() & 7;
    const uint4* base = static_cast<const uint4*>(p.a);
    const uint32_t chunks = uint32_t(p.a_ld) / 8;
    uint32_t from[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row = r + 16 * i;
      from[i] = row < t.rows ? token(__ldg(p.v + t.row0 + row)) * chunks + c : ~0u;
    }
    const int offset = r * 128 + ((c ^ (r & 7)) << 4);
    for (int k = 0; k < t.k_tiles; ++k) {
      wait_for_room();
      if (thread() == 0) {
        TxBarrier::arrive_and_expect_tx(&sm.full[pipe.index], kBBytes);
        load_weight(t, k);
      }
      uint8_t* dst = sm.a[pipe.index] + offset;
      const bool inside = k * C::BK + c * 8 < p.K;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i)  // a row past the end keeps what the stage held: its result is never stored
        if (from[i] != ~0u) cp_async_16(dst + i * 2048, base + size_t(from[i]) + (inside ? k * 8 : 0), inside);
      issued();
    }
  }

  CUTE_DEVICE uint32_t token(int slot) const { return __umulhi(2u * uint32_t(slot), p.div_mul) >> p.div_shift; }

  // Step 0 of a weight tile holds the odd rows, so that only it needs zeros (see Consumer::clear_tail).
  CUTE_DEVICE void weight_tile(const Tile& t) {
    constexpr int kLanesARow = C::BM / 8, kRowsAPass = 32 / kLanesARow > 0 ? 32 / kLanesARow : 1;
    static_assert(!C::GatherWeight || C::BM == 128 || C::BM == 64, "a warp covers whole rows of P");
    const int lane = lane_id(), w = warp_in_group();
    const int sub = lane / kLanesARow, c = lane % kLanesARow;
    const bool feature = t.m0 + c * 8 < p.R;
    const uint4* base = static_cast<const uint4*>(p.p) + t.m0 / 8 + c;
    const uint32_t chunks = uint32_t(p.p_ld) / 8;
    const int odd = t.rows - (t.k_tiles - 1) * C::BK;
    // lanes 0..15: this warp's rows of a step, 16 w + lane; two steps ahead
    auto index = [&](int k) -> uint32_t {
      const int r = w * 16 + (lane & 15), row = k == 0 ? r : odd + (k - 1) * C::BK + r;
      const bool valid = k < t.k_tiles && (k > 0 || r < odd);
      return valid ? token(__ldg(p.v + t.row0 + row)) * chunks : ~0u;
    };
    uint32_t now = ~0u, soon = ~0u, later = ~0u;
    if constexpr (C::GatherWeight) { now = index(0); soon = index(1); }
    for (int k = 0; k < t.k_tiles; ++k) {
      if constexpr (C::GatherWeight) later = index(k + 2);
      wait_for_room();
      const int row = t.row0 + (k == 0 ? 0 : odd + (k - 1) * C::BK);
      if (thread() == 0) {
        uint64_t* bar = &sm.full[pipe.index];
        TxBarrier::arrive_and_expect_tx(bar, kBBytes + (C::GatherWeight ? 0 : kABytes));
        if constexpr (!C::GatherWeight) {
          CUTE_UNROLL
          for (int j = 0; j < C::BM / 64; ++j)
            SM90_TMA_LOAD_2D::copy(maps + 3, bar, kEvictNormal, sm.a[pipe.index] + j * (C::BK * 128), t.m0 + 64 * j, row);
        }
        CUTE_UNROLL
        for (int j = 0; j < C::BN / 64; ++j)
          SM90_TMA_LOAD_2D::copy(maps + 4, bar, kEvictNormal, sm.b[pipe.index] + j * (C::BK * 128), t.n0 + 64 * j, row);
      }
      if constexpr (C::GatherWeight) {
        uint8_t* dst = sm.a[pipe.index] + (c >> 3) * (C::BK * 128);
        __syncwarp();
        CUTE_UNROLL
        for (int i = 0; i < 16 / kRowsAPass; ++i) {
          const int r = i * kRowsAPass + sub, in_tile = w * 16 + r;
          const uint32_t from = __shfl_sync(~0u, now, r);
          const bool valid = feature && from != ~0u;
          cp_async_16(dst + in_tile * 128 + (((c & 7) ^ (in_tile & 7)) << 4), valid ? base + from : base, valid);
        }
        now = soon;
        soon = later;
      }
      issued();
    }
  }

  // Runs until the queue is empty. Without a gather only warp 0 calls it.
  CUTE_DEVICE void run() {
    TileReader<C> reader;
    TileWriter<C> writer;
    const Counts<C> counts(p);
    const bool scheduler = thread() == 0;
    if (scheduler) writer.publish(sm, decode(sm, p, counts, blockIdx.x));
    while (true) {
      if (!reader.ready(sm)) flush();
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      int ticket = 0;
      if (scheduler) ticket = fetch_ticket(p);
      if (C::RowOp && t.kind == kRowTile) row_tile(t);
      if (C::WeightOp && t.kind == kWeightTile) weight_tile(t);
      if (scheduler) {
        if (!writer.room(sm)) flush();
        writer.publish(sm, decode(sm, p, counts, ticket));
      }
      __syncwarp();
    }
    flush();
    if (scheduler) retire(p);
  }
};

}  // namespace hexa::sm90
