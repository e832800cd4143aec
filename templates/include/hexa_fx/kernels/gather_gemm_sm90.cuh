// The persistent kernel: roles, and what a consumer warpgroup does with one tile. See config_sm90.cuh.
#pragma once
#include <hexa_fx/epilogue/row_sm90.cuh>
#include <hexa_fx/load/gather_sm90.cuh>
#include <hexa_fx/mma/swapped_sm90.cuh>

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
  bool late = false;  // see stagger

  CUTE_DEVICE Consumer(Smem<C>& sm, const GroupedParams& p, const TmaDescriptor* maps, int group)
      : sm(sm), p(p), maps(maps), group(group), box(sm, group), late(C::Lag > 0 && group == 1) {}

  CUTE_DEVICE int warp() const { return group * 4 + warp_in_group(); }
  CUTE_DEVICE int block_row(int m) const { return C::PingPong ? m * 64 : m * 128 + group * 64; }  // first row of block m
  CUTE_DEVICE void wait_turn() const {
    if constexpr (C::PingPong) cutlass::arch::NamedBarrier::sync(256, kTurnBarrier + group);
  }

  // Warpgroup 1 starts `Lag` steps behind warpgroup 0, once. The distance stays, as neither waits for the other but through the
  // pipeline, and so one's epilogue runs while the other still multiplies, or again.
  CUTE_DEVICE void stagger(const Tile& t) {
    if (C::Lag == 0 || !late || t.k_tiles == 0) return;
    Barrier::wait(&sm.full[pipe.index], pipe.phase);
    constexpr long long kStep = C::BM / 2 * C::BN * C::BK / 2048;  // cycles of a warpgroup's own wgmmas
    const long long start = clock64();
    while (clock64() - start < C::Lag * kStep) {}
    late = false;
  }

  // The stage that the last tile's epilogue worked in; its results have left.
  CUTE_DEVICE void give_back() {
    if (borrowed >= 0) MainLoop<C, false>::release(sm, borrowed);
    borrowed = -1;
  }

  // `tiles`: where the warp is in the ring of tiles.
  CUTE_DEVICE void row_tile(const Tile& t, Pipe& tiles) {
    MainLoop<C, false> loop;
    auto acc = loop.make_accumulators();
    constexpr int kBlocks = decltype(size<1>(acc))::value;
    const int w16 = warp_in_group() * 16;
    ColumnSum<C> none;
    typename GradEpilogue<C>::Lanes lanes;
    const GradEpilogue<C> epilogue{{sm, p, maps, t, box}, warp(), lanes};
    if constexpr (C::Kind == Epilogue::activate_backward) epilogue.ask_slots();
    auto begin = [&] {
      if constexpr (C::Kind == Epilogue::activate_backward) epilogue.begin();
      if constexpr (C::Borrow) give_back();
    };
    wait_turn();
    stagger(t);
    if (kBlocks > 1 && block_row(kBlocks - 1) < t.rows) loop.template run<kBlocks, false>(sm, pipe, t.k_tiles, group, acc, none, begin);
    else if (block_row(0) < t.rows) loop.template run<1, false>(sm, pipe, t.k_tiles, group, acc, none, begin);
    else loop.template run<0, false>(sm, pipe, t.k_tiles, group, acc, none, begin);
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
      cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier + (group ^ 1));
    }
    constexpr int kBlocks = C::PingPong ? C::BM / 64 : C::BM / 128;
    if constexpr (C::Kind == Epilogue::activate_backward) box = Outbox<C>(sm, group);  // not kept until here
    const RowEpilogue<C> epilogue{sm, p, maps, t, box};
    for (int m = 0; m < kBlocks; ++m) {
      __syncwarp();
      const int row = block_row(m) + warp_in_group() * 16;
      if (row < t.rows) epilogue.zeros(row);
    }
  }

  CUTE_DEVICE void weight_tile(const Tile& t) {
    MainLoop<C, true> loop;
    auto acc = loop.make_accumulators();
    constexpr int kBlocks = decltype(size<1>(acc))::value;
    const bool sums = p.db && t.m0 == 0;
    ColumnSum<C> sum;
    if (t.k_tiles == 0) clear(acc);
    wait_turn();
    const int odd = clear_tail(sm, pipe, t, group);  // in its turn: before, the stage may still be the other warpgroup's
    stagger(t);
    if (C::ColumnSums && sums) loop.template run<kBlocks, true>(sm, pipe, t.k_tiles, group, acc, sum, [] {}, odd);
    else loop.template run<kBlocks, false>(sm, pipe, t.k_tiles, group, acc, sum, [] {}, odd);
    const WeightEpilogue<C> epilogue{sm, p, maps, t, box, warp(), group};
    if constexpr (C::AddGrad) {
      if (t.k_tiles == 0 || again(t)) return;
    }
    CUTE_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      if constexpr (C::AddGrad) {
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

  // Whether this weight tile is the other CTA's too: see raster. In a row of single tiles CTA 1 has the odd ones.
  CUTE_DEVICE bool again(const Tile& t) const {
    return C::Cluster > 1 && !t.multicast && block_rank_in_cluster() == 1 && t.n0 / C::BN % 2 == 0;
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
    if (C::PingPong && group == 1) cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier);  // group 0 goes first
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
  if (threadIdx.x < 32) plan(sm, p);
  if constexpr (C::Cluster > 1) cluster_sync();
  else __syncthreads();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::ProducerRegisters>();
    const int warp = warp_in_group();
    if (warp == 3) Copier<C>{sm, p, maps, C::Cluster > 1 ? int(block_rank_in_cluster()) : 0}.run();
    if constexpr (C::AnyGather) {
      if (warp < kGatherWarps<C>) Gatherer<C>{sm, p}.run();
      if (!C::Swapped && warp == 2) RelayWarp<C>{sm}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::ConsumerRegisters>();
    if constexpr (C::Swapped) SwappedConsumer<C>{sm, p, maps, group - 1}.run();
    else Consumer<C>(sm, p, maps, group - 1).run();
  }
  if constexpr (C::Cluster > 1) {  // the other CTA may still write to this one's shared memory
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace hexa::sm90
