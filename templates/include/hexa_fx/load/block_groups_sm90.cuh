// The warp that copies FP8 weight tiles and runs their queue: groups of 128 rows of both operands, turned round, and their scales.
#pragma once
#include <cute/arch/cluster_sm90.hpp>

#include <hexa_fx/kernels/config_fp8_sm90.cuh>
#include <hexa_fx/scheduler/ring_sm90.cuh>

namespace hexa::sm90 {

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
