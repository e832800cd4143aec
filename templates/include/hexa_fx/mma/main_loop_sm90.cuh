// Consumer main loops: wgmma from shared memory, one stage behind its own issue.
#pragma once
#include <hexa_fx/scheduler/tiles_sm90.cuh>

namespace hexa::sm90 {

template <class C, bool Weight>
struct Mma {
  using T = typename C::T;
  static constexpr auto MajorA = Weight ? GMMA::Major::MN : GMMA::Major::K;
  static constexpr auto MajorB = (Weight || C::WeightKN) ? GMMA::Major::MN : GMMA::Major::K;
  using Atom = decltype(GMMA::ss_op_selector<T, T, float, cute::Shape<Int<C::BM>, Int<C::BN>, Int<C::BK>>, MajorA, MajorB>());
  using Groups = conditional_t<C::PingPong, Layout<cute::Shape<_1, _1, _1>>, Layout<cute::Shape<_2, _1, _1>>>;
  using Tiled = decltype(make_tiled_mma(Atom{}, Groups{}));
  template <GMMA::Major Major, int Width>
  static constexpr auto layout() {
    if constexpr (Major == GMMA::Major::K)
      return tile_to_shape(GMMA::Layout_K_SW128_Atom<T>{}, cute::Shape<Int<Width>, Int<C::BK>, Int<C::Stages>>{});
    else  // 64-wide feature blocks, each BK rows of 128 bytes: what a {64, BK} copy writes
      return tile_to_shape(GMMA::Layout_MN_SW128_Atom<T>{}, cute::Shape<Int<Width>, Int<C::BK>, Int<C::Stages>>{},
                           Step<_2, _1, _3>{});
  }
  using LayoutA = decltype(layout<MajorA, C::BM>());
  using LayoutB = decltype(layout<MajorB, C::BN>());
};

// Sums of columns of Q (ESS) from the tiles in shared memory: a lane owns two neighbouring columns.
template <class C>
struct ColumnSum {
  static constexpr int kWarps = C::PingPong ? 4 : 8, kBlocks = C::BN / 64;
  static constexpr int kRows = C::BK * kBlocks / kWarps;  // rows a warp adds up of its block
  static constexpr int kParts = C::BK / kRows;            // warps that share a block
  float x = 0.f, y = 0.f;

  // Adds the first `rows` rows of a stage, which one lane of each warp may give back after it. __syncwarp would order that, but
  // compute-sanitizer's racecheck follows only the barrier.
  CUTE_DEVICE void add(const Smem<C>& sm, int stage, int warp, int group, int rows = C::BK) {
    using Pair = conditional_t<is_same_v<typename C::T, cutlass::bfloat16_t>, __nv_bfloat162, __half2>;
    const uint8_t* block = sm.b[stage] + (warp / kParts) * (C::BK * 128);
    const int lane = lane_id(), first = (warp % kParts) * kRows;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int r = first + i;
      if (r >= rows) break;
      const uint32_t two = *reinterpret_cast<const uint32_t*>(block + r * 128 + ((((lane >> 2) ^ r) & 7) << 4) + (lane & 3) * 4);
      if constexpr (is_same_v<typename C::T, cutlass::bfloat16_t>) {
        x += __uint_as_float(two << 16);
        y += __uint_as_float(two & 0xffff0000u);
      } else {
        const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&two));
        x += f.x;
        y += f.y;
      }
    }
    cutlass::arch::NamedBarrier::sync(128, kTailBarrier + group);
  }
};

template <class C, bool Weight>
struct MainLoop {
  using M = Mma<C, Weight>;
  using T = typename C::T;
  typename M::Tiled mma;

  static CUTE_DEVICE auto make_accumulators() {
    return partition_fragment_C(typename M::Tiled{}, cute::Shape<Int<C::BM>, Int<C::BN>>{});
  }

  // A stage that a cluster shares is free when both CTAs have read it.
  static CUTE_DEVICE void release(Smem<C>& sm, int stage) {
    if constexpr (C::Cluster == 1) {
      if (lane_id() == 0) Barrier::arrive(&sm.empty[stage]);
    } else {
      if (lane_id() < C::Cluster) Barrier::arrive(&sm.empty[stage], lane_id(), 1);
    }
  }

  // A stage is given back when the step behind it is queued; in weight tiles, when that step's first sixteen is: this keeps the tensor
  // cores busy meanwhile, and loads get most of a step more to come. Row tiles are no faster with that.
  // `Active` of the warpgroup's 64-row blocks hold rows. `group` is the consumer warpgroup. `meanwhile` is called once, behind
  // the first step's multiplications. Of a weight tile's step 0 the first `odd` rows count.
  template <int Active, bool Sum, class Acc, class Meanwhile>
  CUTE_DEVICE void run(Smem<C>& sm, Pipe& pipe, int k_tiles, int group, Acc& acc, ColumnSum<C>& sum, Meanwhile meanwhile,
                       int odd = 0) {
    Tensor a = make_tensor(make_smem_ptr(reinterpret_cast<T*>(sm.a)), typename M::LayoutA{});
    Tensor b = make_tensor(make_smem_ptr(reinterpret_cast<T*>(sm.b)), typename M::LayoutB{});
    auto slice = mma.get_slice(C::PingPong ? 0 : group * 128);
    Tensor fa = slice.make_fragment_A(slice.partition_A(a));
    Tensor fb = slice.make_fragment_B(slice.partition_B(b));
    const int warp = (C::PingPong ? 0 : group * 4) + warp_in_group();
    int previous = -1;
    if constexpr (Active > 0) {
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      warpgroup_fence_operand(acc);
    }
    int k = 0;
    if (Weight && k_tiles > 0) {  // finished before the loop begins: the compiler would make that wait for every wgmma too
      Barrier::wait(&sm.full[pipe.index], pipe.phase);
#pragma unroll 1
      for (int kk = 0; kk < ceil_div(odd, 16); ++kk) {
        warpgroup_fence_operand(acc);
        warpgroup_arrive();
        CUTE_UNROLL
        for (int m = 0; m < Active; ++m) gemm(mma, fa(_, m, kk, pipe.index), fb(_, 0, kk, pipe.index), acc(_, m, 0));
        mma.accumulate_ = GMMA::ScaleOut::One;
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(acc);
      }
      if constexpr (Sum) sum.add(sm, pipe.index, warp, group, odd);
      release(sm, pipe.index);
      pipe.template next<C::Stages>();
      k = 1;
    }
    if (Weight) mma.accumulate_ = GMMA::ScaleOut::One;
    for (; k < k_tiles; ++k) {
      Barrier::wait(&sm.full[pipe.index], pipe.phase);
      if constexpr (Active > 0) {
        warpgroup_arrive();
        CUTE_UNROLL
        for (int kk = 0; kk < size<2>(fa); ++kk) {
          CUTE_UNROLL
          for (int m = 0; m < Active; ++m) gemm(mma, fa(_, m, kk, pipe.index), fb(_, 0, kk, pipe.index), acc(_, m, 0));
          mma.accumulate_ = GMMA::ScaleOut::One;
          if (Weight && kk == 0) {  // see above
            warpgroup_commit_batch();
            warpgroup_wait<1>();
            if (previous >= 0) release(sm, previous);
          }
        }
        warpgroup_commit_batch();
      }
      if constexpr (Sum) sum.add(sm, pipe.index, warp, group);
      if (k == 0) meanwhile();
      if constexpr (!Weight) {
        if constexpr (Active > 0) warpgroup_wait<1>();
        if (previous >= 0) release(sm, previous);
      }
      previous = pipe.index;
      pipe.template next<C::Stages>();
    }
    if constexpr (C::PingPong) cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier + (group ^ 1));
    if constexpr (Active > 0) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(acc);
    }
    if (previous >= 0) release(sm, previous);
  }
};

// The rows that step 0 of a weight tile has beyond its odd rows belong to another expert. The contraction goes by 16 rows: zeroes
// what else the last sixteen holds, in the copied operands (a gathered one was zero-filled on its way), and returns the number of
// odd rows. Each warpgroup zeroes all that it multiplies, so that neither waits for the other: both may write a zero.
template <class C>
CUTE_DEVICE int clear_tail(Smem<C>& sm, const Pipe& pipe, const Tile& t, int group) {
  if (t.k_tiles == 0) return 0;
  const int odd = t.rows - (t.k_tiles - 1) * C::BK, end = 16 * ceil_div(odd, 16);
  if (odd == end) return odd;
  constexpr int kThreads = 128;
  const int id = threadIdx.x & 127;
  Barrier::wait(&sm.full[pipe.index], pipe.phase);
  const int chunks = (end - odd) * 8;  // 16 bytes each, at the end of every 64-column block
  for (int i = id; i < chunks * (C::BN / 64); i += kThreads)
    *reinterpret_cast<uint4*>(sm.b[pipe.index] + (i / chunks) * (C::BK * 128) + odd * 128 + (i % chunks) * 16) = uint4{};
  if constexpr (!C::GatherWeight) {
    constexpr int kOwn = C::PingPong ? 1 : 2;  // every second block of features is the other warpgroup's
    for (int i = id; i < chunks * (C::BM / 64 / kOwn); i += kThreads) {
      const int block = i / chunks * kOwn + (C::PingPong ? 0 : group);
      *reinterpret_cast<uint4*>(sm.a[pipe.index] + block * (C::BK * 128) + odd * 128 + (i % chunks) * 16) = uint4{};
    }
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(kThreads, kTailBarrier + group);
  return odd;
}

}  // namespace hexa::sm90
