// Row tiles with the operands of wgmma exchanged: the weight's columns are its 64 rows, and an expert's rows are its columns, which go
// by 16 instead of by 64. So an expert of a few hundred rows is one tile that reads its share of the weight once, with
// hardly any padding.
//
// A tile is BM rows of an expert (at most) x BN = 128 columns of the weight. Each consumer warpgroup has 64 of the columns and all rows.
#pragma once
#include <hexa_fx/kernels/smem_sm90.cuh>
#include <hexa_fx/ptx/sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct SwappedLoop {
  using Operand = typename C::Operand;
  static_assert(is_same_v<typename Operand::Scale, Unscaled>, "this main loop multiplies operands as they lie in memory");
  Smem<C>& sm;
  int group;     // consumer warpgroup, 0 or 1
  int low_rank;  // steps of the second product

  // The tile's product with `Rows` rows, of which some may be another tile's: their results go nowhere.
  template <int Rows>
  CUTE_DEVICE void run(Pipe& pipe, const Tile& t, float (&acc)[C::BM / 2]) {
    constexpr int kFirst = Rows > 256 ? 256 : Rows;  // as many as an instruction takes
    // bytes from one product's part of the contraction to the next
    constexpr int kStepB = Operand::bytes(Operand::kInner), kStepA = C::WeightKN ? Operand::kInner * kLineBytes : kStepB;
    const uint32_t a0 = cast_smem_ptr_to_uint(sm.b[0]) + group * (64 * kLineBytes), b0 = cast_smem_ptr_to_uint(sm.a[0]);
    auto fence = [&] {
      CUTE_UNROLL
      for (int i = 0; i < Rows / 2; ++i) warpgroup_fence_operand(acc[i]);
    };
    CUTE_UNROLL
    for (int i = 0; i < Rows / 2; ++i) acc[i] = 0.f;
    fence();
    int previous = -1;
    auto step = [&](auto parts) {
      Barrier::wait(&sm.full[pipe.index], pipe.phase);
      if constexpr (C::GatherRows) cutlass::arch::fence_view_async_shared();
      const uint32_t a = a0 + pipe.index * Smem<C>::BBytes, b = b0 + pipe.index * Smem<C>::ABytes;
      warpgroup_arrive();
      CUTE_UNROLL
      for (int kk = 0; kk < parts; ++kk) {
        const uint64_t weight = swizzled_operand(a + kk * kStepA);
        Wgmma<kFirst>::add(weight, swizzled_operand(b + kk * kStepB), acc);
        if constexpr (Rows > kFirst)
          Wgmma<Rows - kFirst>::add(weight, swizzled_operand(b + kk * kStepB + kFirst * kLineBytes), acc + kFirst / 2);
      }
      warpgroup_commit_batch();
      if constexpr (C::Once && Rows <= 64) {  // a stage is worth more than busy tensor cores
        warpgroup_wait<0>();
        release(sm, pipe.index);
      } else {
        warpgroup_wait<1>();
        if (previous >= 0) release(sm, previous);
        previous = pipe.index;
      }
      pipe.template next<C::Stages>();
    };
    if constexpr (C::LowRank > 0) {
#pragma unroll 1
      for (int k = 0; k < low_rank; ++k) step(Int<C::LowRank>{});
    }
#pragma unroll 1
    for (int k = 0; k < t.k_tiles - low_rank; ++k) step(Int<C::BK / Operand::kInner>{});
    warpgroup_wait<0>();
    fence();
    if (previous >= 0) release(sm, previous);
  }

  // The narrowest of the widths that holds the tile's rows. Outside of the main loop, so that each loop is as simple as any.
  template <int... Rows>
  CUTE_DEVICE void run(int_sequence<Rows...>, Pipe& pipe, const Tile& t, float (&acc)[C::BM / 2]) {
    bool done = false;
    ((!done && t.rows <= Rows ? (run<Rows>(pipe, t, acc), done = true) : false), ...);
  }
};

}  // namespace hexa::sm90
