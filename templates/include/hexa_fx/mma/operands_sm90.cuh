// The instruction of the main loops, and how CuTe is told where its operands lie in shared memory.
#pragma once
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include <hexa_fx/kernels/smem_sm90.cuh>

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

}  // namespace hexa::sm90
