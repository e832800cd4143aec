// Weight tiles: accumulators -> memory, turned round or added to what is there, and the column sums.
#pragma once
#include <hexa_fx/epilogue/chunk_sm90.cuh>
#include <hexa_fx/mma/main_loop_sm90.cuh>

namespace hexa::sm90 {

// The copy engine drops what lies outside of dW.
template <class C>
struct WeightEpilogue {
  using T = typename C::T;
  static constexpr int kLine = C::Operand::kLine, kFloats = kLineBytes / int(sizeof(float));  // columns of a chunk of either
  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  const Tile& t;
  Outbox<C>& box;
  int warp, group;

  // rows m0 + row .. + 16 of dW[e]
  template <class Acc>
  CUTE_DEVICE void plain(const Acc& acc, int m, int row) const {
    CUTE_UNROLL
    for (int q = 0; q < C::BN / kLine; ++q) {
      if (t.n0 + q * kLine >= p.C) break;
      const Chunk s = box.next();
      s.put([&](int j, int r) {
        const int at = 2 * r + 4 * (8 * q + j);
        return pack<T>(acc(at, m, 0), acc(at + 1, m, 0));
      });
      send(s, t.n0 + q * kLine, t.m0 + row);
    }
  }
  CUTE_DEVICE void send(const Chunk& s, int x, int y) const {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (Outbox<C>::sends()) {
      if constexpr (C::AddGrad) SM90_TMA_REDUCE_ADD_3D::copy(maps + kGradMap, s.base, x, y, t.expert);
      else SM90_TMA_STORE_3D::copy(maps + kGradMap, s.base, x, y, t.expert);
      tma_store_arrive();
    }
  }

  // dW[e] is (C, R): the warpgroup turns 64 x 64 blocks round in its four warps' chunks.
  template <class Acc>
  CUTE_DEVICE void transposed(const Acc& acc, int m, int row64) const {
    constexpr int kChunks = Outbox<C>::kChunks;
    const int l = lane_id(), w = warp_in_group();
    CUTE_UNROLL
    for (int q = 0; q < C::BN / kLine; ++q) {
      if (t.n0 + q * kLine >= p.C) break;
      if (q == 0) box.template wait<0>();
      else box.template wait<kChunks - 1>();
      if (q == 0 || q >= kChunks) NamedBarrier::sync(128, kStageBarrier + group);
      uint8_t* s = sm.staging[4 * group] + (q % kChunks) * (4 * kChunkBytes);
      CUTE_UNROLL
      for (int j = 0; j < 8; j += 2) {
        uint32_t x[4];  // (group j, rows 0-7), (j, 8-15), (j + 1, 0-7), (j + 1, 8-15)
        CUTE_UNROLL
        for (int z = 0; z < 4; ++z) {
          const int at = 2 * (z & 1) + 4 * (8 * q + j + (z >> 1));
          x[z] = pack<T>(acc(at, m, 0), acc(at + 1, m, 0));
        }
        const int z = l >> 3, n = (j + (z >> 1)) * 8 + (l & 7), c = 2 * w + (z & 1);
        SM90_U16x8_STSM_T::copy(x[0], x[1], x[2], x[3],
                                *reinterpret_cast<uint128_t*>(s + n * kLineBytes + (swizzled_by_lane(n, c) << 4)));
      }
      cutlass::arch::fence_view_async_shared();
      NamedBarrier::sync(128, kStageBarrier + group);
      send(box.at(q % kChunks), t.m0 + row64, t.n0 + q * kLine + w * 16);
      box.turn = (q + 1) % kChunks;
    }
  }

  // Adds rows m0 + row .. + 16 of dW[e] to the floats that are there. The copy engine does it, each number once, as above.
  template <class Acc>
  CUTE_DEVICE void add(const Acc& acc, int m, int row) const {
    CUTE_UNROLL
    for (int q = 0; q < C::BN / kFloats; ++q) {
      if (t.n0 + q * kFloats >= p.C) break;
      const Chunk s = box.next();
      auto value = [&](int j, int r, int i) { return acc(2 * r + 4 * (4 * q + j) + i, m, 0); };
      if constexpr (C::TransposeWeight) put_turned(s, value);
      else put_floats(s, value);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (Outbox<C>::sends()) {
        const int x = t.n0 + q * kFloats, y = t.m0 + row;
        SM90_TMA_REDUCE_ADD_3D::copy(maps + kGradMap, s.base, C::TransposeWeight ? y : x, C::TransposeWeight ? x : y, t.expert);
        tma_store_arrive();
      }
    }
  }
  // `value(j, r, i)`: of 8-column group j, row half r, the pair's first or second. Lanes take turns so that no two of a bank meet:
  // rows next to each other write groups that are two apart, lanes next to each other the other one of their pair.
  template <class Value>
  CUTE_DEVICE void put_floats(const Chunk& s, Value value) const {
    const int l = lane_id(), row = l >> 2;
    const bool odd = row & 1;
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float x = odd ? value(j ^ 2, r, 0) : value(j, r, 0), y = odd ? value(j ^ 2, r, 1) : value(j, r, 1);
        *s.floats(row + 8 * r, 4 * (odd ? j ^ 2 : j) + (l & 3)) = {x, y};
      }
    }
  }
  template <class Value>
  CUTE_DEVICE void put_turned(const Chunk& s, Value value) const {
    const int l = lane_id(), odd = l & 1;
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i)
          *s.turned(8 * j + 2 * (l & 3) + (i ^ odd), (l >> 2) + 8 * r) = odd ? value(j, r, i ^ 1) : value(j, r, i);
      }
    }
  }

  CUTE_DEVICE void column_sum(const ColumnSum<C>& sum) const {
    using S = ColumnSum<C>;
    const int l = lane_id();
    auto sums = [&](int of) { return reinterpret_cast<float2*>(sm.staging[of & 4] + (of & 3) * kChunkBytes); };
    float2* mine = sums(warp);
    box.template wait<0>();
    mine[l] = {sum.x, sum.y};
    NamedBarrier::sync(256, kSumBarrier);
    if (warp % S::kParts == 0) {
      float2 total = mine[l];
      CUTE_UNROLL
      for (int i = 1; i < S::kParts; ++i) {
        const float2 other = sums(warp + i)[l];
        total.x += other.x;
        total.y += other.y;
      }
      const int n = t.n0 + (warp / S::kParts) * kLine + 2 * l;
      const int64_t at = int64_t(t.expert) * p.C + n;
      if constexpr (C::AddFloats) {
        float2* sum = reinterpret_cast<float2*>(static_cast<float*>(p.db) + at);
        if (n < p.C) *sum = {sum->x + total.x, sum->y + total.y};
      } else if (n < p.C) {
        T* sum = static_cast<T*>(p.db) + at;
        if constexpr (C::AddGrad) total = {total.x + float(sum[0]), total.y + float(sum[1])};
        *reinterpret_cast<uint32_t*>(sum) = pack<T>(total.x, total.y);
      }
    }
    NamedBarrier::sync(256, kSumBarrier);
  }
};

}  // namespace hexa::sm90
