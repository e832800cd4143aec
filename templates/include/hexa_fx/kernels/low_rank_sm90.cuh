// Products of rows with factors of a few columns, and the factors' gradients, of one reading of the rows (T, N):
//
//   du[p, :] = rows[row(p), :] @ C[e(p)]                            (n, R): `Multiplies`
//   dC[e]    = sum over rows p of e of rows[row(p), :]^T u[p, :]    (E, N, R): `Sums`, in parts that rows/low_rank_parts.cuh adds up
//
// Both together are the paper's fused backward of y = u C^T. They take as long as their rows take to come. Where N columns are more than
// a block has registers for, launches have some each: du goes from one to the next in float32.
//
// A block takes a run of tiles of 64 rows. A tile passes through shared memory once, 128 columns a step, and both products read it there:
// a consumer warpgroup has 64 columns of every step. It keeps their part of dC in registers while the expert stays the same, and its part
// of du for the tile. C[e] stays in shared memory. Warpgroup 0 gathers.
#pragma once
#include <cutlass/arch/reg_reconfig.h>

#include <hexa_fx/epilogue/low_rank_sm90.cuh>
#include <hexa_fx/load/low_rank_sm90.cuh>
#include <hexa_fx/mma/low_rank_sm90.cuh>
#include <hexa_fx/ptx/dependent.cuh>

namespace hexa::sm90 {

template <class C>
CUTE_DEVICE void fetch_factor(LowRankSmem<C>& sm, const TmaDescriptor* map, int expert) {
  constexpr int kBoxes = C::RankMajor ? 2 * C::Steps : C::Steps, kColumns = C::Steps * 128 / kBoxes;
  TxBarrier::arrive_and_expect_tx(&sm.factor_full, C::FactorBytes);
  CUTE_UNROLL
  for (int i = 0; i < kBoxes; ++i)
    SM90_TMA_LOAD_3D::copy(map, &sm.factor_full, kEvictNormal, sm.factor + i * (kColumns * C::Pitch),
                           C::RankMajor ? i * kColumns : 0, C::RankMajor ? 0 : i * kColumns, expert);
}

template <class C>
CUTE_DEVICE void consume(LowRankSmem<C>& sm, const LowRankParams& p, const TmaDescriptor* map, int group) {
  LowRankLoop<C> loop(sm, group);
  const LowRankEpilogue<C> epilogue{sm, p, group};
  Pipe pipe, at_u;
  int expert = -1, turn = 0;
  uint32_t phase = 0;
  Run<C::MaxExperts> at(sm.table, p.experts);
  for (; !at.done(); at.next()) {
    const bool begins = at.expert != expert;
    if (begins) {  // neither consumer reads the last expert's factor: they have met since
      if (C::Multiplies && group == 0 && (threadIdx.x & 127) == 0) fetch_factor(sm, map, at.expert);
      if (C::Sums && expert >= 0) epilogue.sums(expert, loop.dc);
      expert = at.expert;
      if constexpr (C::Multiplies) Barrier::wait(&sm.factor_full, phase);
      phase ^= 1;
    }
    loop.run(pipe, begins, at_u);
    if constexpr (C::Multiplies) epilogue.rows(at, loop.du, turn);
    at_u.template next<C::Slots>();
    turn ^= 1;
  }
  if (C::Sums && expert >= 0) epilogue.sums(expert, loop.dc);
  if constexpr (C::Multiplies) epilogue.no_rows();
}

template <class C>
CUTE_DEVICE void low_rank(const TmaDescriptor* map, const LowRankParams& p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  LowRankSmem<C>& sm = *reinterpret_cast<LowRankSmem<C>*>(raw);
  const int group = __shfl_sync(~0u, int(threadIdx.x) >> 7, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::Stages; ++i) {
      Barrier::init(&sm.full[i], 128);
      Barrier::init(&sm.empty[i], kConsumerWarps);
    }
    for (int i = 0; i < C::Slots; ++i) Barrier::init(&sm.u_full[i], 128);
    Barrier::init(&sm.factor_full, 1);
    cutlass::arch::fence_barrier_init();
  }
  release_next_launch();  // its blocks come where blocks of this one have ended
  if (threadIdx.x < 32) sm.table.fill(p.offs, p.experts);
  __syncthreads();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    LowRankGatherer<C>{sm, p}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume(sm, p, map, group - 1);
  }
}

}  // namespace hexa::sm90
