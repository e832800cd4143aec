// Weight tiles of FP8 block compute: accumulators -> dW, rounded once, or added to floats. The copy engine drops what lies outside.
#pragma once
#include <hexa_fx/epilogue/chunk_sm90.cuh>
#include <hexa_fx/kernels/config_fp8_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct BlockWeightEpilogue {
  using Out = typename C::Out;
  static constexpr int kWide = kLineBytes / int(sizeof(Out));  // columns of a chunk
  const BlockParams& p;
  const TmaDescriptor* maps;
  const Tile& t;
  Outbox<C>& box;
  int row;  // the warp's first, of the tile

  CUTE_DEVICE void run(const float (&total)[kParts][64]) const {
    if (t.m0 + row >= p.R || (C::AddGrad && t.k_tiles == 0)) return;
    CUTE_UNROLL
    for (int i = 0; i < kParts * kPart / kWide; ++i) {
      const int column = t.n0 + i * kWide;
      if (column >= p.C) break;
      const float (&x)[64] = total[i * kWide / kPart];
      const int first = i * kWide % kPart / 8;  // 8-column group of the part
      const Chunk s = box.next();
      if constexpr (sizeof(Out) == 4) {
        CUTE_UNROLL
        for (int j = 0; j < 8; ++j) {
          const int r = j & 1, at = 4 * (first + (j >> 1)) + 2 * r;
          *s.floats((lane_id() >> 2) + 8 * r, 4 * (j >> 1) + (lane_id() & 3)) = {x[at], x[at + 1]};
        }
      } else {
        s.put([&](int j, int r) {
          const int at = 4 * (first + j) + 2 * r;
          return pack<Out>(x[at], x[at + 1]);
        });
      }
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (Outbox<C>::sends()) {
        if constexpr (C::AddGrad) SM90_TMA_REDUCE_ADD_3D::copy(maps + kGradMap, s.base, column, t.m0 + row, t.expert);
        else SM90_TMA_STORE_3D::copy(maps + kGradMap, s.base, column, t.m0 + row, t.expert);
        tma_store_arrive();
      }
    }
  }
};

}  // namespace hexa::sm90
