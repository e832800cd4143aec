// A consumer warpgroup's share of a tile: 64 columns of every step, multiplied by the factor, and by rows of u.
#pragma once
#include <cute/arch/mma_sm90.hpp>

#include <hexa_fx/kernels/low_rank_smem_sm90.cuh>
#include <hexa_fx/ptx/sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct LowRankLoop {
  using T = typename C::T;
  using Shape = cute::Shape<_64, Int<C::Rank>, _16>;
  static constexpr auto kFactorMajor = C::RankMajor ? GMMA::Major::K : GMMA::Major::MN;
  using ByRows = decltype(GMMA::ss_op_selector<T, T, float, Shape, GMMA::Major::K, kFactorMajor>());
  using ByColumns = decltype(GMMA::ss_op_selector<T, T, float, Shape, GMMA::Major::MN, GMMA::Major::MN>());
  LowRankSmem<C>& sm;
  int group;  // consumer warpgroup, 0 or 1
  float dc[C::Steps][C::Words], du[C::Words];

  CUTE_DEVICE LowRankLoop(LowRankSmem<C>& sm, int group) : sm(sm), group(group) {}

  // Lines of R numbers, which lie across the contraction: eights of it, one behind the other.
  static CUTE_DEVICE uint64_t lines_operand(uint32_t at) {
    using GMMA::LayoutType;
    constexpr auto kSwizzle = C::Rank == 16 ? LayoutType::B32 : LayoutType::B64;
    constexpr uint32_t kHigh = uint32_t(kSwizzle) << 30 | (8 * C::Pitch) >> 4, kUnused = 1 << 16;
    return uint64_t(kHigh) << 32 | kUnused | at >> 4;
  }
  // Sixteen of this consumer's columns of a step, `at` bytes behind the factor's begin.
  static CUTE_DEVICE uint64_t factor_operand(uint32_t factor, int k, int group, int kk) {
    if constexpr (C::RankMajor) return swizzled_operand(factor + (2 * k + group) * (C::Rank * kLineBytes) + kk * 32);
    else return lines_operand(factor + (k * 128 + group * 64 + kk * 16) * C::Pitch);
  }
  template <class Atom, int... I>
  static CUTE_DEVICE void multiply(uint64_t a, uint64_t b, float (&d)[C::Words], GMMA::ScaleOut keep, int_sequence<I...>) {
    Atom::fma(a, b, d[I]..., keep);
  }
  template <class Atom>
  static CUTE_DEVICE void multiply(uint64_t a, uint64_t b, float (&d)[C::Words], bool keep) {
    multiply<Atom>(a, b, d, keep ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero, make_int_sequence<C::Words>{});
  }
  CUTE_DEVICE void fence() {
    CUTE_UNROLL
    for (int i = 0; C::Multiplies && i < C::Words; ++i) warpgroup_fence_operand(du[i]);
    CUTE_UNROLL
    for (int k = 0; C::Sums && k < C::Steps; ++k) {
      CUTE_UNROLL
      for (int i = 0; i < C::Words; ++i) warpgroup_fence_operand(dc[k][i]);
    }
  }
  CUTE_DEVICE void release(int stage) {
    if (lane_id() == 0) Barrier::arrive(&sm.empty[stage]);
  }

  // `begins`: sums begin with this tile. `at_u`: where its rows of u are.
  CUTE_DEVICE void run(Pipe& pipe, bool begins, const Pipe& at_u) {
    const uint32_t rows = cast_smem_ptr_to_uint(sm.rows[0][group]), u = cast_smem_ptr_to_uint(sm.u[at_u.index]);
    const uint32_t factor = cast_smem_ptr_to_uint(sm.factor);
    if constexpr (C::Sums) Barrier::wait(&sm.u_full[at_u.index], at_u.phase);
    fence();
    int previous = 0;
    CUTE_UNROLL
    for (int k = 0; k < C::Steps; ++k) {
      Barrier::wait(&sm.full[pipe.index], pipe.phase);
      cutlass::arch::fence_view_async_shared();
      const uint32_t at = rows + pipe.index * (2 * C::HalfBytes);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int kk = 0; kk < 4; ++kk) {
        if constexpr (C::Multiplies)
          multiply<ByRows>(swizzled_operand(at + kk * 32), factor_operand(factor, k, group, kk), du, k + kk > 0);
        if constexpr (C::Sums)
          multiply<ByColumns>(swizzled_operand(at + kk * (16 * kLineBytes)), lines_operand(u + kk * (16 * C::Pitch)), dc[k],
                              kk > 0 || !begins);
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      if (k > 0) release(previous);
      previous = pipe.index;
      pipe.template next<C::Stages>();
    }
    warpgroup_wait<0>();
    fence();
    release(previous);
  }
};

}  // namespace hexa::sm90
