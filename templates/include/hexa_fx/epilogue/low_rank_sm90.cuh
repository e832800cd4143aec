// What the kernels of low-rank factors store: a few columns, so lanes write where their numbers go.
#pragma once
#include <hexa_fx/kernels/low_rank_smem_sm90.cuh>
#include <hexa_fx/ptx/sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct LowRankEpilogue {
  using T = typename C::T;
  LowRankSmem<C>& sm;
  const LowRankParams& p;
  int group;

  // A pair of columns of either result, and its first row.
  static CUTE_DEVICE int column(int j) { return 8 * j + 2 * (lane_id() & 3); }
  static CUTE_DEVICE int row(int half) { return warp_in_group() * 16 + (lane_id() >> 2) + 8 * half; }

  // The other consumer's half of the columns comes through shared memory. Both meet here once a tile.
  CUTE_DEVICE void rows(const Run<C::MaxExperts>& at, const float (&du)[C::Words], int turn) const {
    float (&other)[C::Words][128] = sm.other[turn];
    const int thread = threadIdx.x & 127;
    if (group == 1) {
      CUTE_UNROLL
      for (int i = 0; i < C::Words; ++i) other[i][thread] = du[i];
    }
    NamedBarrier::sync(256, kSumBarrier);
    if (group == 1) return;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= at.rows()) continue;
      const int64_t out = int64_t(at.row0() + row(half)) * p.R;
      CUTE_UNROLL
      for (int j = 0; j < C::Rank / 8; ++j) {
        const int i = 4 * j + 2 * half;
        if (column(j) < p.R) store(out + column(j), du[i] + other[i][thread], du[i + 1] + other[i + 1][thread]);
      }
    }
  }

  CUTE_DEVICE void store(int64_t at, float x, float y) const {
    if (p.before) {
      const float2 sum = *reinterpret_cast<const float2*>(p.before + at);
      x += sum.x, y += sum.y;
    }
    if (p.beyond) *reinterpret_cast<float2*>(p.beyond + at) = {x, y};
    else *reinterpret_cast<uint32_t*>(static_cast<T*>(p.du) + at) = pack<T>(x, y);
  }

  // Rows of no expert are zeros.
  CUTE_DEVICE void no_rows() const {
    const int64_t end = int64_t(p.n) * p.R / 8, step = int64_t(gridDim.x) * 256;
    for (int64_t i = int64_t(sm.table.offs[p.experts]) * p.R / 8 + blockIdx.x * 256 + threadIdx.x - 128; i < end; i += step)
      static_cast<uint4*>(p.du)[i] = uint4{};
  }

  // This block's part of an expert's sums.
  CUTE_DEVICE void sums(int expert, const float (&dc)[C::Steps][C::Words]) const {
    float* part = p.parts + int64_t(blockIdx.x + expert) * p.columns * p.R;
    CUTE_UNROLL
    for (int k = 0; k < C::Steps; ++k) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int n = k * 128 + group * 64 + row(half);
        if (n >= p.columns) continue;
        CUTE_UNROLL
        for (int j = 0; j < C::Rank / 8; ++j) {
          const int i = 4 * j + 2 * half;
          if (column(j) < p.R) *reinterpret_cast<float2*>(part + n * p.R + column(j)) = {dc[k][i], dc[k][i + 1]};
        }
      }
    }
  }
};

}  // namespace hexa::sm90
