// The persistent kernel of FP8 block compute: its barriers, and the roles of its warps. See config_fp8_sm90.cuh.
#pragma once
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>

#include <hexa_fx/epilogue/block_sm90.cuh>
#include <hexa_fx/load/block_sm90.cuh>
#include <hexa_fx/load/copy_sm90.cuh>
#include <hexa_fx/mma/block_loop_sm90.cuh>

namespace hexa::sm90 {

// A consumer warpgroup: its tiles, one after the other.
template <class C>
struct BlockConsumer {
  BlockSmem<C>& sm;
  const BlockParams& p;
  const TmaDescriptor* maps;
  int group;  // 0 or 1

  CUTE_DEVICE void run() const {
    Outbox<C> box(sm, group);
    TileReader<C> reader;
    Pipe pipe;
    const int row = group * 64 + warp_in_group() * 16;
    if (group == 1) __nanosleep(400);  // half a step behind the first, one's epilogue begins while the other multiplies
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (t.kind == kZeroTile) continue;  // rows of no expert: nobody reads them
      BlockLoop<C> loop(sm, group);
      if (t.k_tiles > 0 && (C::WeightOp || group * 64 < t.rows)) loop.run(pipe, t.k_tiles);
      else loop.skip(pipe, t.k_tiles);
      if constexpr (C::WeightOp) BlockWeightEpilogue<C>{p, maps, t, box, row}.run(loop.total);
      else if (row < t.rows) BlockRowEpilogue<C>{sm, p, maps, t, box, row}.run(loop.total);
    }
    box.template wait<0>();  // shared memory lasts as long as it is read
  }
};

template <class C>
CUTE_DEVICE void block_gemm(const TmaDescriptor* maps, const BlockParams& p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  BlockSmem<C>& sm = *reinterpret_cast<BlockSmem<C>*>(raw);
  const int group = __shfl_sync(~0u, int(threadIdx.x) >> 7, 0);  // warp-uniform for the compiler
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::Stages; ++i) {
      // copier, threads that bring scales, and the relay for gathered rows
      Barrier::init(&sm.full[i], C::WeightOp ? 1 : 1 + kScaleThreads + C::GatherRows);
      Barrier::init(&sm.empty[i], kConsumerWarps * (32 + C::Cluster - 1));  // see BlockLoop::release_scales
      Barrier::init(&sm.landed[i], kScaleThreads);
    }
    for (int i = 0; i < kTileSlots; ++i) {
      Barrier::init(&sm.tile_full[i], 1);
      const int loading = C::WeightOp ? 1 : C::GatherRows ? 4 : 3;  // copier (+ loaders + relay)
      Barrier::init(&sm.tile_empty[i], (kConsumerWarps + loading) * C::Cluster);
    }
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x < 32) tabulate(sm, p);
  if constexpr (C::Cluster > 1) cluster_sync();
  else __syncthreads();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<C::ProducerRegisters>();
    const int warp = warp_in_group();
    if constexpr (C::WeightOp) {
      if (warp == 3) GroupCopier<C>{sm, p, maps}.run();
    } else {
      if (warp == 3) Copier<C>{sm, p, maps, C::Cluster > 1 ? int(block_rank_in_cluster()) : 0}.run();
      if (warp < kScaleThreads / 32) BlockLoader<C>{sm, p}.run();
      if (C::GatherRows && warp == 2) RelayWarp<C>{sm, p}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<C::ConsumerRegisters>();
    BlockConsumer<C>{sm, p, maps, group - 1}.run();
  }
  if constexpr (C::Cluster > 1) {  // the other CTA may still write to this one's shared memory
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace hexa::sm90
