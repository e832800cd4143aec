// Loading side. One thread copies tiles of weights and of contiguous rows with the copy engine and fetches tiles from the queue;
// gathered rows come by 16-byte cp.async from two warps of their own.
//
// cp.async writes through the generic proxy and wgmma reads through the async one. A relay warp waits until a gathered stage
// has landed, fences and hands it on, so that neither the gathering threads (which would have to wait for their own loads) nor
// the consumers (whose next wgmma waits behind the fence) do it.
#pragma once
#include <hexa_fx/scheduler/tiles_sm90.cuh>

namespace hexa::sm90 {

CUTE_DEVICE void cp_async_16(uint32_t dst, const char* src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// The same for swapped tiles: only if `wanted`, and with the next step's part of the row into L2. All blocks that work on an expert read
// its rows at about the same time, so one that must wait for the memory holds up all.
CUTE_DEVICE void cp_async_16_if(bool wanted, uint32_t dst, const char* src, int bytes) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.b32 wanted, %3, 0;\n\t"
      "@wanted cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;\n\t}" ::"r"(dst), "l"(src), "r"(bytes), "r"(int(wanted))
      : "memory");
}

// Hides where an address came from, so that constant offsets to it stay immediates of the instruction. A load reads its address
// some 80 cycles after it was issued. A gathering warp issues 16 a step: if their addresses take turns in the same registers it
// is slower than the tensor cores. So each has its own, computed ahead, before the warp waits for room: the assembler does not move
// the computation across that.
CUTE_DEVICE uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
CUTE_DEVICE const char* opaque(const char* x) {
  asm volatile("" : "+l"(x));
  return x;
}

template <class C>
CUTE_DEVICE bool gathered(const Tile& t) {
  return (t.kind == kRowTile && C::GatherRows) || (t.kind == kWeightTile && C::GatherWeight);
}

// One warp; one lane works: an elected one, for the compiler knows that it is one and writes no loop over lanes for each copy.
template <class C>
struct Copier {
  static constexpr uint32_t kABytes = Smem<C>::ABytes, kBBytes = Smem<C>::BBytes;
  static constexpr bool kShareRows = C::Swapped && C::Cluster > 1;  // each CTA copies every second box to both
  // Where weight tiles gather, the next tile is worked out before this one's last steps. Elsewhere that was slower.
  static constexpr bool kEarly = C::WeightOp && C::GatherWeight && C::Cluster == 1;
  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  int rank;                   // in the cluster
  Pipe pipe;

  // Waits for room, announces the bytes to come. A stage without gathered part needs no relay: arrive in its place.
  template <bool Gathered>
  CUTE_DEVICE uint64_t* open(uint32_t a_bytes = kABytes) {
    Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1);
    uint64_t* bar = &sm.full[pipe.index];
    if constexpr (C::AnyGather && !Gathered) Barrier::arrive(bar);
    TxBarrier::arrive_and_expect_tx(bar, kBBytes + (Gathered ? 0 : a_bytes));
    return bar;
  }

  // B in two halves. In a cluster that shares it each CTA copies one half to both.
  template <class Copy>
  CUTE_DEVICE void halves(const Tile& t, Copy copy) {
    if (C::Cluster > 1 && !C::Swapped && t.multicast) copy(rank, true);
    else {
      copy(0, false);
      copy(1, false);
    }
  }

  CUTE_DEVICE void load_weight(uint64_t* bar, const Tile& t, int k) {
    if constexpr (C::Swapped && C::PairedWeight) {  // eight gate and eight up columns by turns
      SM90_TMA_LOAD_5D::copy(maps + kWeightMap, bar, kEvictNormal, sm.b[pipe.index], k * C::BK, 0, 0, t.n0 / 8, t.expert);
      return;
    }
    halves(t, [&](int half, bool shared) {
      const bool up_tensor = C::SplitWeight && half == 1;
      const TmaDescriptor* map = maps + (up_tensor ? kUpMap : kWeightMap);
      const int n = t.n0 * C::WeightColumnScale + (up_tensor ? 0 : half * (C::PairedWeight ? p.N : C::BN / 2));
      uint8_t* dst = sm.b[pipe.index] + half * (C::BN / 2) * 128;
      if constexpr (!C::WeightKN) copy_3d(map, bar, dst, k * C::BK, n, t.expert, shared);
      else {
        CUTE_UNROLL
        for (int j = 0; j < C::BN / 128; ++j) copy_3d(map, bar, dst + j * (C::BK * 128), n + 64 * j, k * C::BK, t.expert, shared);
      }
    });
  }
  CUTE_DEVICE void copy_3d(const TmaDescriptor* map, uint64_t* bar, uint8_t* dst, int x, int y, int z, bool shared) {
    if (C::Cluster > 1 && shared) SM90_TMA_LOAD_MULTICAST_3D::copy(map, bar, 3, kEvictNormal, dst, x, y, z);
    else SM90_TMA_LOAD_3D::copy(map, bar, kEvictNormal, dst, x, y, z);
  }

  CUTE_DEVICE void row_tile(const Tile& t, int from, int to) {
    const int blocks = ceil_div(t.rows, C::RowBox);  // of rows; the others of the tile are not read
    for (int k = from; k < to; ++k) {
      uint64_t* bar = open<C::GatherRows>(blocks * (C::RowBox * 128));
      if constexpr (!C::GatherRows) {
        for (int i = kShareRows ? rank : 0; i < blocks; i += kShareRows ? C::Cluster : 1) {
          uint8_t* dst = sm.a[pipe.index] + i * (C::RowBox * 128);
          const int row = t.row0 + C::RowBox * i;
          if constexpr (kShareRows) SM90_TMA_LOAD_MULTICAST_2D::copy(maps + kRowsMap, bar, 3, kEvictNormal, dst, k * C::BK, row);
          else SM90_TMA_LOAD_2D::copy(maps + kRowsMap, bar, kEvictNormal, dst, k * C::BK, row);
        }
      }
      load_weight(bar, t, k);
      pipe.template next<C::Stages>();
    }
    if (C::Borrow && to == t.k_tiles) {  // a stage of nothing: the epilogue's, once the tile's last steps leave it
      Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1);
      for (int i = 0; i < (C::AnyGather ? 2 : 1); ++i) Barrier::arrive(&sm.full[pipe.index]);
      pipe.template next<C::Stages>();
    }
  }

  // Step 0 holds the odd rows, so that only it needs zeros (see clear_tail).
  CUTE_DEVICE void weight_tile(const Tile& t, int from, int to) {
    const int odd = t.rows - (t.k_tiles - 1) * C::BK;
    for (int k = from; k < to; ++k) {
      uint64_t* bar = open<C::GatherWeight>();
      const int row = t.row0 + (k == 0 ? 0 : odd + (k - 1) * C::BK);
      if constexpr (!C::GatherWeight) {
        CUTE_UNROLL
        for (int j = 0; j < C::BM / 64; ++j)
          SM90_TMA_LOAD_2D::copy(maps + kPMap, bar, kEvictNormal, sm.a[pipe.index] + j * (C::BK * 128), t.m0 + 64 * j, row);
      }
      halves(t, [&](int half, bool shared) {
        CUTE_UNROLL
        for (int i = 0; i < C::BN / 128; ++i) {
          const int j = half * (C::BN / 128) + i;
          uint8_t* dst = sm.b[pipe.index] + j * (C::BK * 128);
          if (C::Cluster > 1 && shared) SM90_TMA_LOAD_MULTICAST_2D::copy(maps + kQMap, bar, 3, kEvictNormal, dst, t.n0 + 64 * j, row);
          else SM90_TMA_LOAD_2D::copy(maps + kQMap, bar, kEvictNormal, dst, t.n0 + 64 * j, row);
        }
      });
      pipe.template next<C::Stages>();
    }
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    TileWriter<C> writer;
    const Counts<C> counts(p);
    const bool lead = cute::elect_one_sync(), scheduler = lead && rank == 0;
    if (scheduler) writer.publish(sm, p, counts, fetch_ticket(p));
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      int ticket = 0;
      if (scheduler) ticket = fetch_ticket(p);
      // No earlier than that: gathering warps skip tiles of which they gather nothing, and a parity tells one round of the stages from
      // the next, not from the one behind that.
      const int late = kEarly ? max(t.k_tiles - C::Stages + 1, 0) : t.k_tiles;
#pragma unroll 1
      for (int part = 0; part < (kEarly ? 2 : 1); ++part) {
        const int from = part == 0 ? 0 : late, to = part == 0 ? late : t.k_tiles;
        if (lead) {
          if (C::RowOp && t.kind == kRowTile) row_tile(t, from, to);
          if (C::WeightOp && t.kind == kWeightTile) weight_tile(t, from, to);
        }
        if (part == 0 && scheduler) writer.publish(sm, p, counts, ticket);
      }
      __syncwarp();
    }
    if (scheduler) retire(p, gridDim.x / C::Cluster);
  }
};

// Two warps, or three.
template <class C>
struct Gatherer {
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

  CUTE_DEVICE uint32_t stage_address() const { return cast_smem_ptr_to_uint(sm.a[0]) + pipe.index * Smem<C>::ABytes; }

  // 8 threads a row of 64 columns; a thread keeps addresses of its BM / 8 rows for the whole tile. Rows past the end repeat the
  // last one: their results are never stored.
  CUTE_DEVICE void rows(const Tile& t) {
    constexpr int kRows = C::BM / 8;
    const int r = thread() >> 3, c = thread() & 7;
    const char* row[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int slot = __ldg(p.v + t.row0 + min(r + 8 * i, t.rows - 1));
      row[i] = static_cast<const char*>(p.a) + (size_t(token(slot)) * uint32_t(p.a_ld) + c * 8) * 2;
    }
    const uint32_t offset = r * 128 + ((c ^ r) << 4);
    const int blocks = t.rows > 64 ? kRows / 8 : 1;
    for (int k = 0; k < t.k_tiles; ++k) {
      wait_for_room();
      const uint32_t dst = opaque(stage_address() + offset);
      const int bytes = k * C::BK + c * 8 < p.K ? 16 : 0;
      CUTE_UNROLL
      for (int h = 0; h < kRows / 8; ++h) {
        if (h < blocks) {
          CUTE_UNROLL
          for (int i = 8 * h; i < 8 * h + 8; ++i) cp_async_16(dst + i * 1024, row[i], bytes);
        }
      }
      issued();
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) row[i] = opaque(row[i] + 2 * C::BK);
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
      row[i] = static_cast<const char*>(p.a) + (size_t(token(slot)) * uint32_t(p.a_ld) + c * 8) * 2;
    }
    const uint32_t offset = r * 128 + ((c ^ (r & 7)) << 4);
    const int passes = ceil_div(t.rows - r, kTogether);
    for (int k = 0; k < t.k_tiles; ++k) {
      const int left = __shfl_sync(~0u, passes, lane_id());  // itself: the compiler would keep all that follows from it, and spill
      wait_for_room();
      const uint32_t dst[2] = {opaque(stage_address() + offset), opaque(stage_address() + (offset ^ 64))};
      const int bytes = k * C::BK + c * 8 < p.K ? 16 : 0;
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) cp_async_16_if(i < left, dst[i & 1] + i * (kTogether * 128), row[i], bytes);
      issued();
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) row[i] = opaque(row[i] + 2 * C::BK);
    }
  }

  // A warp loads 32 of a step's 64 rows, 8 lanes 64 features of one. A lane knows one row's offset a step ahead. It asks for that row's
  // slot `kAhead` steps before it looks at it, in a register of its own: where a loop hands slots on, it waits for the newest to do so.
  CUTE_DEVICE void features(const Tile& t) {
    if (t.k_tiles == 0) return;
    constexpr int kHalves = C::BM / 64, kPasses = 8, kAhead = 2;
    const int lane = lane_id(), w = warp_in_group() & 1, sub = lane >> 3, c = lane & 7;
    const char* base = opaque(static_cast<const char*>(p.p) + size_t(t.m0 + c * 8) * 2);
    int bytes[kHalves];
    CUTE_UNROLL
    for (int h = 0; h < kHalves; ++h) bytes[h] = t.m0 + h * 64 + c * 8 < p.R ? 16 : 0;
    const uint32_t chunks = uint32_t(p.p_ld) / 8;
    const int odd = t.rows - (t.k_tiles - 1) * C::BK;
    const uint32_t offset = (w * 32 + sub) * 128 + ((c ^ sub) << 4);  // 4 rows on: + 512, and bit 6 flips
    const int* slots = p.v + t.row0;
    auto ask = [&](int k, int& slot) {  // rows past the odd ones of step 0, and past the end, repeat the last
      const int r = w * 32 + lane, row = k == 0 ? min(r, odd - 1) : min(odd + (k - 1) * C::BK + r, t.rows - 1);
      asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(slot) : "l"(slots + row));
    };
    int first, soon[kAhead];
    ask(0, first);
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) ask(1 + i, soon[i]);
    uint32_t now = token(first) * chunks;  // in 16 bytes
    auto step = [&](int k, int& next, auto whole) {
      const char* row[kPasses];
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) row[i] = opaque(base + size_t(__shfl_sync(~0u, now, i * 4 + sub)) * 16);
      now = opaque(token(next) * chunks);
      ask(k + 1 + kAhead, next);
      const uint32_t dst[2] = {opaque(stage_address() + offset), opaque(stage_address() + (offset ^ 64) + 512)};
      wait_for_room();
      const int last = opaque(uint32_t(odd - w * 32 - sub));  // rows of no interest become zeros
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        CUTE_UNROLL
        for (int h = 0; h < kHalves; ++h)
          cp_async_16(dst[i & 1] + (i >> 1) * 1024 + h * (C::BK * 128), row[i] + h * 128,
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
      if (!gathered<C>(t)) { pipe.template skip<C::Stages>(t.k_tiles); continue; }
      if constexpr (C::Swapped) many_rows(t);
      else if (C::RowOp && t.kind == kRowTile) rows(t);
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
  uint32_t parity = 0;  // of `landed`, a bit a stage: tiles without gathered operand pass it by, so the pipe's phase is not its
  CUTE_DEVICE void run() {
    TileReader<C> reader;
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (!gathered<C>(t)) { pipe.template skip<C::Stages>(t.k_tiles); continue; }
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
