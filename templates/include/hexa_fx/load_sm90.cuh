// Loading side. One thread copies tiles of weights and of contiguous rows with the copy engine and fetches tiles from the queue;
// gathered rows come by 16-byte cp.async from two warps of their own.
//
// cp.async writes through the generic proxy and wgmma reads through the async one. A relay warp waits until a gathered stage
// has landed, fences and hands it on, so that neither the gathering threads (which would have to wait for their own loads) nor
// the consumers (whose next wgmma waits behind the fence) do it.
#pragma once
#include <hexa_fx/schedule_sm90.cuh>

namespace hexa::sm90 {

CUTE_DEVICE void cp_async_16(uint8_t* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(cast_smem_ptr_to_uint(dst)), "l"(src),
               "r"(valid ? 16 : 0) : "memory");
}

template <class C>
CUTE_DEVICE bool gathered(const Tile& t) {
  return (t.kind == kRowTile && C::GatherRows) || (t.kind == kWeightTile && C::GatherWeight);
}

// One warp; its lane 0 works.
template <class C>
struct Copier {
  static constexpr uint32_t kABytes = Smem<C>::ABytes, kBBytes = Smem<C>::BBytes;
  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;  // rows, weight, weight of up, P, Q
  Pipe pipe;

  // Waits for room, announces the bytes to come. A stage without gathered part needs no relay: arrive in its place.
  template <bool Gathered>
  CUTE_DEVICE uint64_t* open() {
    Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1);
    uint64_t* bar = &sm.full[pipe.index];
    if constexpr (C::AnyGather && !Gathered)
      for (int i = 0; i < C::HandOvers; ++i) Barrier::arrive(bar);
    TxBarrier::arrive_and_expect_tx(bar, kBBytes + (Gathered ? 0 : kABytes));
    return bar;
  }

  CUTE_DEVICE void load_weight(uint64_t* bar, const Tile& t, int k) {
    CUTE_UNROLL
    for (int half = 0; half < C::WeightBoxes; ++half) {  // gate columns, then up columns
      const bool up_tensor = C::SplitWeight && half == 1;
      const TmaDescriptor* map = maps + (up_tensor ? 2 : 1);
      const int n = t.n0 * C::WeightColumnScale + (up_tensor ? 0 : half * p.N);
      uint8_t* dst = sm.b[pipe.index] + half * C::WeightBox * 128;
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
    for (int k = 0; k < t.k_tiles; ++k) {
      uint64_t* bar = open<C::GatherRows>();
      if constexpr (!C::GatherRows) SM90_TMA_LOAD_2D::copy(maps, bar, kEvictNormal, sm.a[pipe.index], k * C::BK, t.row0);
      load_weight(bar, t, k);
      pipe.template next<C::Stages>();
    }
  }

  // Step 0 holds the odd rows, so that only it needs zeros (see clear_tail).
  CUTE_DEVICE void weight_tile(const Tile& t) {
    const int odd = t.rows - (t.k_tiles - 1) * C::BK;
    for (int k = 0; k < t.k_tiles; ++k) {
      uint64_t* bar = open<C::GatherWeight>();
      const int row = t.row0 + (k == 0 ? 0 : odd + (k - 1) * C::BK);
      if constexpr (!C::GatherWeight) {
        CUTE_UNROLL
        for (int j = 0; j < C::BM / 64; ++j)
          SM90_TMA_LOAD_2D::copy(maps + 3, bar, kEvictNormal, sm.a[pipe.index] + j * (C::BK * 128), t.m0 + 64 * j, row);
      }
      CUTE_UNROLL
      for (int j = 0; j < C::BN / 64; ++j)
        SM90_TMA_LOAD_2D::copy(maps + 4, bar, kEvictNormal, sm.b[pipe.index] + j * (C::BK * 128), t.n0 + 64 * j, row);
      pipe.template next<C::Stages>();
    }
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    TileWriter<C> writer;
    const Counts<C> counts(p);
    const bool lead = lane_id() == 0;
    if (lead) writer.publish(sm, decode(sm, p, counts, blockIdx.x));
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (lead) {
        const int ticket = fetch_ticket(p);
        if (C::RowOp && t.kind == kRowTile) row_tile(t);
        if (C::WeightOp && t.kind == kWeightTile) weight_tile(t);
        writer.publish(sm, decode(sm, p, counts, ticket));
      }
      __syncwarp();
    }
    if (lead) retire(p);
  }
};

// Two warps.
template <class C>
struct Gatherer {
  Smem<C>& sm;
  const GroupedParams& p;
  Pipe pipe;

  CUTE_DEVICE int thread() const { return threadIdx.x & 63; }
  CUTE_DEVICE uint32_t token(int slot) const { return __umulhi(2u * uint32_t(slot), p.div_mul) >> p.div_shift; }
  CUTE_DEVICE void wait_for_room() { Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1); }
  CUTE_DEVICE void issued() {
    cutlass::arch::cpasync_barrier_arrive_noinc(C::Relay ? &sm.landed[pipe.index] : &sm.full[pipe.index]);
    pipe.template next<C::Stages>();
  }

  // 8 threads a row of 64 columns; a thread keeps the addresses of its BM / 8 rows for the whole tile.
  CUTE_DEVICE void rows(const Tile& t) {
    constexpr int kRows = C::BM / 8;
    const int r = thread() >> 3, c = thread() & 7;
    const uint4* base = static_cast<const uint4*>(p.a);
    const uint32_t chunks = uint32_t(p.a_ld) / 8;
    uint32_t from[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row = r + 8 * i;
      from[i] = row < t.rows ? token(__ldg(p.v + t.row0 + row)) * chunks + c : ~0u;
    }
    const int offset = r * 128 + ((c ^ r) << 4);
    for (int k = 0; k < t.k_tiles; ++k) {
      wait_for_room();
      uint8_t* dst = sm.a[pipe.index] + offset;
      const bool inside = k * C::BK + c * 8 < p.K;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i)  // a row past the end keeps what the stage held: its result is never stored
        if (from[i] != ~0u) cp_async_16(dst + i * 1024, base + size_t(from[i]) + (inside ? k * 8 : 0), inside);
      issued();
    }
  }

  // A warp loads 32 of a step's 64 rows, BM features of each. A lane keeps one row's address, two steps ahead.
  CUTE_DEVICE void features(const Tile& t) {
    static_assert(C::BM == 128 || C::BM == 64, "a warp covers whole rows of P");
    constexpr int kLanesARow = C::BM / 8, kRowsAPass = 32 / kLanesARow;
    const int lane = lane_id(), w = warp_in_group() & 1, sub = lane / kLanesARow, c = lane % kLanesARow;
    const bool feature = t.m0 + c * 8 < p.R;
    const uint4* base = static_cast<const uint4*>(p.p) + t.m0 / 8 + c;
    const uint32_t chunks = uint32_t(p.p_ld) / 8;
    const int odd = t.rows - (t.k_tiles - 1) * C::BK;
    auto address = [&](int k) -> uint32_t {
      const int r = w * 32 + lane, row = k == 0 ? r : odd + (k - 1) * C::BK + r;
      const bool valid = k < t.k_tiles && (k > 0 || r < odd);
      return valid ? token(__ldg(p.v + t.row0 + row)) * chunks : ~0u;
    };
    uint32_t now = address(0), soon = address(1);
    for (int k = 0; k < t.k_tiles; ++k) {
      const uint32_t later = address(k + 2);
      wait_for_room();
      __syncwarp();
      uint8_t* dst = sm.a[pipe.index] + (c >> 3) * (C::BK * 128);
      CUTE_UNROLL
      for (int i = 0; i < 32 / kRowsAPass; ++i) {
        const int r = i * kRowsAPass + sub, in_tile = w * 32 + r;
        const uint32_t from = __shfl_sync(~0u, now, r);
        const bool valid = feature && from != ~0u;
        cp_async_16(dst + in_tile * 128 + (((c & 7) ^ (in_tile & 7)) << 4), valid ? base + from : base, valid);
      }
      now = soon;
      soon = later;
      issued();
    }
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (!gathered<C>(t)) { pipe.template skip<C::Stages>(t.k_tiles); continue; }
      if (C::RowOp && t.kind == kRowTile) rows(t);
      if (C::WeightOp && t.kind == kWeightTile) features(t);
      __syncwarp();
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
};

// One warp; its lane 0 works.
template <class C>
struct RelayWarp {
  Smem<C>& sm;
  Pipe pipe;
  CUTE_DEVICE void run() {
    TileReader<C> reader;
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (!gathered<C>(t)) { pipe.template skip<C::Stages>(t.k_tiles); continue; }
      if (C::Relay && lane_id() == 0) {
        for (int k = 0; k < t.k_tiles; ++k) {
          Barrier::wait(&sm.landed[pipe.index], pipe.phase);
          cutlass::arch::fence_view_async_shared();
          Barrier::arrive(&sm.full[pipe.index]);
          pipe.template next<C::Stages>();
        }
      }
      __syncwarp();
    }
  }
};

}  // namespace hexa::sm90
