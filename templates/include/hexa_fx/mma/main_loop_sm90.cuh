// Consumer main loops: wgmma from shared memory, one stage behind its own issue; their instruction, how CuTe is told where its operands
// lie, and sums of columns of Q (ESS) from the same tiles.
#pragma once
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include <hexa_fx/kernels/smem_sm90.cuh>
#include <hexa_fx/ptx/sm90.cuh>

namespace hexa::sm90 {

template <class C, bool Weight>
struct Mma {
  using T = typename C::T;
  static constexpr auto MajorA = Weight ? GMMA::Major::MN : GMMA::Major::K;
  static constexpr auto MajorB = (Weight || C::WeightKN) ? GMMA::Major::MN : GMMA::Major::K;
  using Atom =
      decltype(GMMA::ss_op_selector<T, T, typename C::F, cute::Shape<Int<C::BM>, Int<C::BN>, Int<C::BK>>, MajorA, MajorB>());
  using Groups = conditional_t<C::PingPong, Layout<cute::Shape<_1, _1, _1>>, Layout<cute::Shape<_2, _1, _1>>>;
  using Tiled = decltype(make_tiled_mma(Atom{}, Groups{}));
  template <GMMA::Major Major, int Width>
  static constexpr auto layout() {
    if constexpr (Major == GMMA::Major::K)
      return tile_to_shape(GMMA::Layout_K_SW128_Atom<T>{}, cute::Shape<Int<Width>, Int<C::BK>, Int<C::Stages>>{});
    else  // blocks of a line of features, each BK rows: what a {line, BK} copy writes
      return tile_to_shape(GMMA::Layout_MN_SW128_Atom<T>{}, cute::Shape<Int<Width>, Int<C::BK>, Int<C::Stages>>{},
                           Step<_2, _1, _3>{});
  }
  using LayoutA = decltype(layout<MajorA, C::BM>());
  using LayoutB = decltype(layout<MajorB, C::BN>());
};

// A lane owns two neighbouring columns.
template <class C>
struct ColumnSum {
  static constexpr int kBlocks = C::BN / C::Operand::kLine;
  static constexpr int kRows = C::BK * kBlocks / kConsumerWarps;  // rows a warp adds up of its block
  static constexpr int kParts = C::BK / kRows;                    // warps that share a block
  float x = 0.f, y = 0.f;

  // Adds the first `rows` rows of a stage, which one lane of each warp may give back after it. __syncwarp would order that, but
  // compute-sanitizer's racecheck follows only the barrier.
  CUTE_DEVICE void add(const Smem<C>& sm, int stage, int warp, int group, int rows = C::BK) {
    const uint8_t* block = sm.b[stage] + (warp / kParts) * (C::BK * kLineBytes);
    const int lane = lane_id(), first = (warp % kParts) * kRows;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int r = first + i;
      if (r >= rows) break;
      const uint32_t two =
          *reinterpret_cast<const uint32_t*>(block + r * kLineBytes + (swizzled_by_lane(r, lane >> 2) << 4) + (lane & 3) * 4);
      x += low<typename C::T>(two);
      y += high<typename C::T>(two);
    }
    NamedBarrier::sync(128, kTailBarrier + group);
  }
};

template <class C, bool Weight>
struct MainLoop {
  using M = Mma<C, Weight>;
  using T = typename C::T;
  static_assert(is_same_v<typename C::Operand::Scale, Unscaled>, "this main loop multiplies operands as they lie in memory");
  typename M::Tiled mma;

  static CUTE_DEVICE auto make_accumulators() {
    return partition_fragment_C(typename M::Tiled{}, cute::Shape<Int<C::BM>, Int<C::BN>>{});
  }

  // A stage is given back when the step behind it is queued; in weight tiles, when that step's first product is: this keeps the tensor
  // cores busy meanwhile, and loads get most of a step more to come. Row tiles are no faster with that.
  // `Active` of the warpgroup's 64-row blocks hold rows. `group` is the consumer warpgroup. `meanwhile` is called once, behind the first step's
  // multiplications. Of a weight tile's step 0 the first `odd` rows count. The first `low_rank` steps are of the second product; or `last` adds
  // it behind all steps.
  template <int Active, bool Sum, class Acc, class Meanwhile, class Last>
  CUTE_DEVICE void run(Smem<C>& sm, Pipe& pipe, int k_tiles, int group, Acc& acc, ColumnSum<C>& sum, Meanwhile meanwhile, Last last,
                       int odd = 0, int low_rank = 0) {
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
      for (int kk = 0; kk < ceil_div(odd, C::Operand::kInner); ++kk) {
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
    if constexpr (!Weight && kAddedSteps<C>) {  // written out: kernels without it keep their code
      for (; k < low_rank; ++k) {
        Barrier::wait(&sm.full[pipe.index], pipe.phase);
        if constexpr (Active > 0) {
          warpgroup_arrive();
          CUTE_UNROLL
          for (int kk = 0; kk < C::LowRank; ++kk) {
            CUTE_UNROLL
            for (int m = 0; m < Active; ++m) gemm(mma, fa(_, m, kk, pipe.index), fb(_, 0, kk, pipe.index), acc(_, m, 0));
            mma.accumulate_ = GMMA::ScaleOut::One;
          }
          warpgroup_commit_batch();
        }
        if (k == 0) meanwhile();
        if constexpr (Active > 0) warpgroup_wait<1>();
        if (previous >= 0) release(sm, previous);
        previous = pipe.index;
        pipe.template next<C::Stages>();
      }
    }
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
      if (!kAddedSteps<C> && k == 0) meanwhile();
      if constexpr (!Weight) {
        if constexpr (Active > 0) warpgroup_wait<1>();
        if (previous >= 0) release(sm, previous);
      }
      previous = pipe.index;
      pipe.template next<C::Stages>();
    }
    if constexpr (C::AddedInStaging && Active > 0) {
      last(Int<Active>{});
      warpgroup_wait<1>();
      release(sm, previous);
      previous = -1;
    }
    if constexpr (C::PingPong) NamedBarrier::arrive(256, kTurnBarrier + (group ^ 1));
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
  constexpr int kInner = C::Operand::kInner, kLine = C::Operand::kLine, kBlockBytes = C::BK * kLineBytes;
  const int odd = t.rows - (t.k_tiles - 1) * C::BK, end = kInner * ceil_div(odd, kInner);
  if (odd == end) return odd;
  constexpr int kThreads = 128;
  const int id = threadIdx.x & 127;
  Barrier::wait(&sm.full[pipe.index], pipe.phase);
  const int pieces = (end - odd) * 8;  // at the end of every block of features
  for (int i = id; i < pieces * (C::BN / kLine); i += kThreads)
    *reinterpret_cast<uint4*>(sm.b[pipe.index] + (i / pieces) * kBlockBytes + odd * kLineBytes + (i % pieces) * kPieceBytes) =
        uint4{};
  if constexpr (!C::GatherWeight) {
    for (int i = id; i < pieces * (C::BM / kLine / 2); i += kThreads) {
      const int block = i / pieces * 2 + group;  // every second block of features is the other warpgroup's
      *reinterpret_cast<uint4*>(sm.a[pipe.index] + block * kBlockBytes + odd * kLineBytes + (i % pieces) * kPieceBytes) = uint4{};
    }
  }
  cutlass::arch::fence_view_async_shared();
  NamedBarrier::sync(kThreads, kTailBarrier + group);
  return odd;
}

}  // namespace hexa::sm90
