// The second product of a row tile, where its operands take no stage of the pipeline: a warpgroup has its rows of U and all of C in the
// shared memory that its chunks leave from, which is free while the tile is multiplied. Neither warpgroup waits for the other.
#pragma once
#include <cute/arch/copy_sm90_tma.hpp>

#include <hexa_fx/epilogue/chunk_sm90.cuh>
#include <hexa_fx/mma/main_loop_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct SecondProduct {
  using T = typename C::T;
  using Operand = typename C::Operand;
  using M = Mma<C, false>;
  static constexpr int kInner = Operand::kInner, kLine = Operand::kLine, kRowBytes = Operand::bytes(kInner);
  static constexpr int kBlockBytes = 64 * kRowBytes, kUBytes = C::Blocks * kBlockBytes, kCBytes = C::BN * kRowBytes;
  static constexpr int kBox = C::WeightKN ? kLine : C::BN / 2;  // columns of C that the copy engine brings at a time
  static_assert(!C::AddedInStaging || (C::LowRank == 1 && kUBytes + kCBytes <= 4 * C::StagingBytes),
                "a few columns, beside the chunks");
  using LayoutU = decltype(tile_to_shape(GMMA::Layout_K_SW32_Atom<T>{}, cute::Shape<Int<64 * C::Blocks>, Int<kInner>>{}));
  static constexpr auto layout_c() {
    if constexpr (!C::WeightKN) return tile_to_shape(GMMA::Layout_K_SW32_Atom<T>{}, cute::Shape<Int<C::BN>, Int<kInner>>{});
    else return tile_to_shape(GMMA::Layout_MN_SW128_Atom<T>{}, cute::Shape<Int<C::BN>, Int<kInner>>{}, Step<_2, _1>{});
  }
  using LayoutC = decltype(layout_c());
  using Tiled = decltype(make_tiled_mma(typename M::Atom{}, Layout<cute::Shape<_1, _1, _1>>{}));

  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  int group;  // consumer warpgroup, 0 or 1
  uint32_t phase = 0;

  CUTE_DEVICE uint8_t* u() const { return sm.staging[4 * group]; }
  CUTE_DEVICE uint8_t* c() const { return u() + kUBytes; }
  CUTE_DEVICE uint64_t* landed() const { return sm.fetched[4 * group]; }

  // Starts copying when what is there has left. `rows`: of the tile, the first of the warpgroup's block m.
  template <class BlockRow>
  CUTE_DEVICE void ask(const Tile& t, const Outbox<C>& box, BlockRow rows) const {
    box.template wait<0>();
    meet();
    if (warp_in_group() != 0 || !cute::elect_one_sync()) return;
    const int blocks = C::Blocks > 1 && rows(C::Blocks - 1) < t.rows ? C::Blocks : 1;
    TxBarrier::arrive_and_expect_tx(landed(), blocks * kBlockBytes + kCBytes);
    for (int m = 0; m < blocks; ++m)
      SM90_TMA_LOAD_2D::copy(maps + kAddedRowsMap, landed(), kEvictNormal, u() + m * kBlockBytes, 0, t.row0 + rows(m));
    CUTE_UNROLL
    for (int at = 0; at < C::BN; at += kBox) {
      const int half = at / (C::BN / 2), n = first_column<C>(p, t, half) + at % (C::BN / 2);
      const TmaDescriptor* map = maps + (C::SplitWeight && half ? kAddedUpMap : kAddedWeightMap);
      const int x = C::WeightKN ? n : 0, y = C::WeightKN ? 0 : n;
      SM90_TMA_LOAD_3D::copy(map, landed(), kEvictNormal, c() + at * kRowBytes, x, y, t.expert);
    }
  }

  // Adds it. Its wgmma are the newest group.
  template <int Active, class Acc>
  CUTE_DEVICE void add(Acc& acc) {
    Tiled mma;
    mma.accumulate_ = GMMA::ScaleOut::One;
    auto slice = mma.get_slice(0);
    Tensor fu = slice.make_fragment_A(slice.partition_A(make_tensor(make_smem_ptr(reinterpret_cast<T*>(u())), LayoutU{})));
    Tensor fc = slice.make_fragment_B(slice.partition_B(make_tensor(make_smem_ptr(reinterpret_cast<T*>(c())), LayoutC{})));
    Barrier::wait(landed(), phase);
    phase ^= 1;
    warpgroup_arrive();
    CUTE_UNROLL
    for (int m = 0; m < Active; ++m) gemm(mma, fu(_, m, 0), fc(_, 0, 0), acc(_, m, 0));
    warpgroup_commit_batch();
  }

  // No warp writes chunks before all have read the operands, and the other way round.
  CUTE_DEVICE void meet() const { NamedBarrier::sync(128, kStageBarrier + group); }
};

}  // namespace hexa::sm90
