// The persistent kernel: what a consumer warpgroup does with one tile, its barriers, and the roles of its warps. See config_sm90.cuh.
#pragma once
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>

#include <hexa_fx/epilogue/gradient_sm90.cuh>
#include <hexa_fx/epilogue/weight_sm90.cuh>
#include <hexa_fx/kernels/swapped_sm90.cuh>
#include <hexa_fx/load/copy_sm90.cuh>
#include <hexa_fx/load/gather_sm90.cuh>
#include <hexa_fx/mma/main_loop_sm90.cuh>
#include <hexa_fx/mma/second_product_sm90.cuh>
#include <hexa_fx/scheduler/ring_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct Consumer {
  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  int group;  // consumer warpgroup, 0 or 1
  Outbox<C> box;
  Pipe pipe;
  uint32_t h_phase = 0;
  int borrowed = -1;  // see GradEpilogue
  SecondProduct<C> second;

  CUTE_DEVICE Consumer(Smem<C>& sm, const GroupedParams& p, const TmaDescriptor* maps, int group)
      : sm(sm), p(p), maps(maps), group(group), box(sm, group), second{sm, p, maps, group} {}

  CUTE_DEVICE int warp() const { return group * 4 + warp_in_group(); }
  CUTE_DEVICE int block_row(int m) const { return C::PingPong ? m * 64 : m * 128 + group * 64; }  // first row of block m
  CUTE_DEVICE void wait_turn() const {
    if constexpr (C::PingPong) NamedBarrier::sync(256, kTurnBarrier + group);
  }

  // The stage that the last tile's epilogue worked in; its results have left.
  CUTE_DEVICE void give_back() {
    if (borrowed >= 0) release(sm, borrowed);
    borrowed = -1;
  }

  // `tiles`: where the warp is in the ring of tiles.
  CUTE_DEVICE void row_tile(const Tile& t, Pipe& tiles) {
    MainLoop<C, false> loop;
    auto acc = loop.make_accumulators();
    const int w16 = warp_in_group() * 16;
    ColumnSum<C> none;
    typename GradEpilogue<C>::Lanes lanes;
    const GradEpilogue<C> epilogue{{sm, p, maps, t, box}, warp(), lanes};
    if constexpr (C::Kind == Epilogue::activate_backward) epilogue.ask_slots();
    auto begin = [&] {
      if constexpr (C::Kind == Epilogue::activate_backward) epilogue.begin();
      if constexpr (C::Borrow) give_back();
      if constexpr (C::AddedInStaging) {
        if (block_row(0) < t.rows) second.ask(t, box, [&](int m) { return block_row(m); });
      }
    };
    auto last = [&](auto active) {
      if constexpr (C::AddedInStaging) second.template add<active>(acc);
    };
    const int low_rank = low_rank_steps<C>(p);
    wait_turn();
    if (C::Blocks > 1 && block_row(C::Blocks - 1) < t.rows)
      loop.template run<C::Blocks, false>(sm, pipe, t.k_tiles, group, acc, none, begin, last, 0, low_rank);
    else if (block_row(0) < t.rows) loop.template run<1, false>(sm, pipe, t.k_tiles, group, acc, none, begin, last, 0, low_rank);
    else loop.template run<0, false>(sm, pipe, t.k_tiles, group, acc, none, begin, last, 0, low_rank);
    if constexpr (C::AddedInStaging) {
      if (block_row(0) < t.rows) second.meet();
    }
    if constexpr (C::Kind == Epilogue::activate_backward) {
      uint32_t places = folded(tiles);
      epilogue.run(acc, pipe, places);
      unfold(places, tiles);
      if constexpr (C::Borrow) {
        borrowed = pipe.index;
        pipe.template next<C::Stages>();
      }
    } else epilogue.RowEpilogue<C>::run(acc, [&](int m) { return block_row(m) + w16; });
  }

  CUTE_DEVICE void zero_tile(const Tile& t) {
    if constexpr (C::PingPong) {  // keep the turns: no k steps to wait for
      wait_turn();
      NamedBarrier::arrive(256, kTurnBarrier + (group ^ 1));
    }
    if constexpr (C::Kind == Epilogue::activate_backward) box = Outbox<C>(sm, group);  // not kept until here
    const RowEpilogue<C> epilogue{sm, p, maps, t, box};
    for (int m = 0; m < C::Blocks; ++m) {
      __syncwarp();
      const int row = block_row(m) + warp_in_group() * 16;
      if (row < t.rows) epilogue.zeros(row);
    }
  }

  CUTE_DEVICE void weight_tile(const Tile& t) {
    MainLoop<C, true> loop;
    auto acc = loop.make_accumulators();
    const bool sums = p.db && t.m0 == 0;
    ColumnSum<C> sum;
    if (t.k_tiles == 0) clear(acc);
    const int odd = clear_tail(sm, pipe, t, group);
    if (C::ColumnSums && sums) loop.template run<C::Blocks, true>(sm, pipe, t.k_tiles, group, acc, sum, [] {}, [](auto) {}, odd);
    else loop.template run<C::Blocks, false>(sm, pipe, t.k_tiles, group, acc, sum, [] {}, [](auto) {}, odd);
    if (C::Cluster > 1 && t.multicast < 0) return;
    const WeightEpilogue<C> epilogue{sm, p, maps, t, box, warp(), group};
    if constexpr (C::AddGrad) {
      if (t.k_tiles == 0) return;
    }
    CUTE_UNROLL
    for (int m = 0; m < C::Blocks; ++m) {
      if constexpr (C::AddFloats) {
        const int row = block_row(m) + warp_in_group() * 16;
        if (t.m0 + row < p.R) epilogue.add(acc, m, row);
      } else if constexpr (C::TransposeWeight) {
        if (t.m0 + block_row(m) < p.R) epilogue.transposed(acc, m, block_row(m));
      } else {
        const int row = block_row(m) + warp_in_group() * 16;
        if (t.m0 + row < p.R) epilogue.plain(acc, m, row);
      }
    }
    if constexpr (C::ColumnSums) {
      if (sums) epilogue.column_sum(sum);
    }
  }

  // Where the warp is in its rings, in one register: during the gradient's epilogue there is room for no more.
  CUTE_DEVICE uint32_t folded(const Pipe& tiles) const {
    return opaque(h_phase | pipe.index << 8 | pipe.phase << 15 | tiles.index << 16 | tiles.phase << 24);
  }
  CUTE_DEVICE void unfold(uint32_t places, Pipe& tiles) {
    h_phase = places & 3;
    pipe = {int(places >> 8 & 127), places >> 15 & 1};
    tiles = {int(places >> 16 & 255), places >> 24};
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    if (C::PingPong && group == 1) NamedBarrier::arrive(256, kTurnBarrier);  // group 0 goes first
    for (int turn = 0;; turn ^= 1) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (C::PingPong && turn != group) {
        pipe.template skip<C::Stages>(t.k_tiles);
        continue;
      }
      if constexpr (C::RowOp) {
        if (t.kind == kRowTile) {
          row_tile(t, reader.at);
          if constexpr (C::Kind == Epilogue::activate_backward) continue;  // nothing of t is kept
        }
        if (t.kind == kZeroTile) zero_tile(t);
      }
      if constexpr (C::WeightOp) {
        if (t.kind == kWeightTile) weight_tile(t);
      }
    }
    box.template wait<0>();  // shared memory lasts as long as it is read
  }
};

template <class C>
CUTE_DEVICE void gather_gemm(const TmaDescriptor* maps, const GroupedParams& p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Smem<C>& sm = *reinterpret_cast<Smem<C>*>(raw);
  const int group = __shfl_sync(~0u, int(threadIdx.x) >> 7, 0);  // warp-uniform for the compiler
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::Stages; ++i) {
      Barrier::init(&sm.full[i], !C::AnyGather ? 1 : C::Swapped ? 1 + 32 * kGatherWarps<C> : 2);
      Barrier::init(&sm.empty[i], (C::PingPong ? 4 : kConsumerWarps) * C::Cluster);
      Barrier::init(&sm.landed[i], 32 * kGatherWarps<C>);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      Barrier::init(&sm.tile_full[i], 1);
      Barrier::init(&sm.tile_empty[i], (kConsumerWarps + (C::AnyGather ? 4 : 1)) * C::Cluster);  // + copier (+ gatherers + relay)
    }
    for (int i = 0; i < 2 * kConsumerWarps; ++i) Barrier::init(&sm.fetched[0][0] + i, 1);
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x < 32) tabulate(sm, p);
  if constexpr (C::Cluster > 1) cluster_sync();
  else __syncthreads();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::ProducerRegisters>();
    const int warp = warp_in_group();
    if (warp == 3) Copier<C>{sm, p, maps, C::Cluster > 1 ? int(block_rank_in_cluster()) : 0}.run();
    if constexpr (C::AnyGather) {
      if (warp < kGatherWarps<C>) Gatherer<C>{sm, p}.run();
      if (!C::Swapped && warp == 2) RelayWarp<C>{sm, p}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::ConsumerRegisters>();
    if constexpr (C::Swapped) SwappedConsumer<C>(sm, p, maps, group - 1).run();
    else Consumer<C>(sm, p, maps, group - 1).run();
  }
  if constexpr (C::Cluster > 1) {  // the other CTA may still write to this one's shared memory
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace hexa::sm90
