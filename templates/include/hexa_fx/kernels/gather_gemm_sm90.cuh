// The persistent kernel: its barriers, and the roles of its warps. See config_sm90.cuh.
#pragma once
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>

#include <hexa_fx/kernels/consumer_sm90.cuh>
#include <hexa_fx/kernels/swapped_sm90.cuh>
#include <hexa_fx/load/copy_sm90.cuh>
#include <hexa_fx/load/gather_sm90.cuh>

namespace hexa::sm90 {

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
