// Epilogues: accumulators -> (bias, activation, its gradient) -> memory. A warp handles chunks of 16 rows x 64 columns that go
// through its own shared memory, so that every global access is 16 bytes and 8 lanes cover 128 contiguous bytes.
//
// Accumulator map: lane l holds, of 8-column group j and row half r, row l / 4 + 8 r and columns 8 j + 2 (l % 4) + {0, 1}.
#pragma once
#include <cute/arch/copy_sm90.hpp>

#include <hexa_fx/mma_sm90.cuh>

namespace hexa::sm90 {

template <class T>
CUTE_DEVICE uint32_t pack(float lo, float hi) {
  uint32_t r;
  if constexpr (is_same_v<T, cutlass::bfloat16_t>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <class T>
CUTE_DEVICE float2 unpack(uint32_t two) {
  if constexpr (is_same_v<T, cutlass::bfloat16_t>) return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
  else return __half22float2(*reinterpret_cast<const __half2*>(&two));
}

// One 16 x 64 chunk in shared memory: rows of 128 bytes, 16-byte chunks XORed by row.
struct Stage {
  uint8_t* base;
  CUTE_DEVICE uint32_t* pair(int row, int group, int word) const {
    return reinterpret_cast<uint32_t*>(base + row * 128 + (((group ^ row) & 7) << 4) + word * 4);
  }
  CUTE_DEVICE uint4* chunk(int row, int c) const { return reinterpret_cast<uint4*>(base + row * 128 + (((c ^ row) & 7) << 4)); }
};

// Where a warp's 16 rows of a result lie.
template <class T>
struct Rows {
  T* base;       // row 0 of the chunk
  int64_t ld;
  int valid;     // rows of the 16 that exist
  CUTE_DEVICE void store(const Stage& stage, int column, int columns) const {  // columns `column` .. + 64 of `columns`
    const int c = lane_id() & 7, n = column + c * 8;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = (lane_id() >> 3) + 4 * i;
      const uint4 d = *stage.chunk(r, c);
      if (r < valid && n < columns) *reinterpret_cast<uint4*>(base + r * ld + n) = d;
    }
  }
  // Starts copying columns `column` .. + 64 into `stage`; what does not exist becomes zero.
  CUTE_DEVICE void fetch(const Stage& stage, int column, int columns) const {
    const int c = lane_id() & 7, n = column + c * 8;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = (lane_id() >> 3) + 4 * i;
      const bool inside = r < valid && n < columns;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(cast_smem_ptr_to_uint(stage.chunk(r, c))),
                   "l"(inside ? base + r * ld + n : base), "r"(inside ? 16 : 0) : "memory");
    }
  }
};

template <class C>
struct RowEpilogue {
  using T = typename C::T;
  Smem<C>& sm;
  const GroupedParams& p;
  const Tile& t;
  int warp;  // consumer warp, 0..7

  CUTE_DEVICE Stage stage(int i) const { return {sm.stage[warp] + i * 2048}; }
  CUTE_DEVICE Rows<T> rows(const void* base, int ld, int row) const {
    T* first = static_cast<T*>(const_cast<void*>(base));
    return {first + (int64_t(t.row0) + row) * ld, ld, t.rows - row};
  }
  CUTE_DEVICE float2 bias2(const void* bias, int64_t at, bool inside) const {
    return inside ? unpack<T>(__ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(bias) + at))) : float2{0.f, 0.f};
  }

  // A chunk of values through shared memory: `value(j, r)` packs the pair of 8-column group j and row half r.
  template <class Value>
  CUTE_DEVICE void chunk(const Stage& s, const Rows<T>& out, int column, int columns, Value value) const {
    const int l = lane_id();
    __syncwarp();
    CUTE_UNROLL
    for (int j = 0; j < 8; ++j)
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) *s.pair((l >> 2) + 8 * r, j, l & 3) = value(j, r);
    __syncwarp();
    out.store(s, column, columns);
  }

  // Accumulator pair of chunk q (+ bias): columns `first` .. + 64 of a `columns` wide weight or half of it.
  template <class Acc>
  CUTE_DEVICE float2 pair(const Acc& acc, int m, int q, int j, int r, const void* bias, int64_t at, int first, int columns) const {
    const int i = 2 * r + 4 * (8 * q + j), n = first + j * 8 + (lane_id() & 3) * 2;
    float2 b{0.f, 0.f};
    if constexpr (C::Bias) b = bias2(bias, int64_t(t.expert) * p.bias_ld + at + n, n < columns);
    return {acc(i, m, 0) + b.x, acc(i + 1, m, 0) + b.y};
  }

  template <class Acc>
  CUTE_DEVICE void plain(const Acc& acc, int m, int row) const {
    const Rows<T> out = rows(p.out, p.out_ld, row);
    CUTE_UNROLL
    for (int q = 0; q < C::BN / 64; ++q) {
      const int first = t.n0 + q * 64;
      if (first >= p.N) break;
      chunk(stage(0), out, first, p.N, [&](int j, int r) {
        const float2 x = pair(acc, m, q, j, r, p.bias, 0, first, p.N);
        return pack<T>(x.x, x.y);
      });
    }
  }

  template <class Acc>
  CUTE_DEVICE void ungated(const Acc& acc, int m, int row) const {
    if constexpr (C::StoreH) plain(acc, m, row);
    const Rows<T> act = rows(p.act, p.act_ld, row);
    CUTE_UNROLL
    for (int q = 0; q < C::BN / 64; ++q) {
      const int first = t.n0 + q * 64;
      if (first >= p.N) break;
      chunk(stage(0), act, first, p.N, [&](int j, int r) {
        const float2 x = pair(acc, m, q, j, r, p.bias, 0, first, p.N);
        float unused;
        return pack<T>(activate<C::Activation, false>(x.x, unused), activate<C::Activation, false>(x.y, unused));
      });
    }
  }

  // Gate columns in the tile's left half, up columns in its right half.
  template <class Acc>
  CUTE_DEVICE void gated(const Acc& acc, int m, int row) const {
    const Rows<T> out = rows(p.out, p.out_ld, row), act = rows(p.act, p.act_ld, row);
    Rows<T> out_up = out;
    out_up.base += p.N;
    constexpr int kHalf = C::BN / 128;  // chunks of gate in the tile
    const void* up_bias = C::SplitWeight ? p.bias_up : p.bias;
    const int64_t up_at = C::SplitWeight ? 0 : p.N;
    CUTE_UNROLL
    for (int q = 0; q < kHalf; ++q) {
      const int first = t.n0 + q * 64;
      if (first >= p.N) break;
      auto gate = [&](int j, int r) { return pair(acc, m, q, j, r, p.bias, 0, first, p.N); };
      auto up = [&](int j, int r) { return pair(acc, m, q + kHalf, j, r, up_bias, up_at, first, p.N); };
      if constexpr (C::StoreH) {
        chunk(stage(0), out, first, p.N, [&](int j, int r) { const float2 g = gate(j, r); return pack<T>(g.x, g.y); });
        chunk(stage(0), out_up, first, p.N, [&](int j, int r) { const float2 u = up(j, r); return pack<T>(u.x, u.y); });
      }
      chunk(stage(0), act, first, p.N, [&](int j, int r) {
        const float2 g = gate(j, r), u = up(j, r);
        return pack<T>(glu<C::Activation>(g.x, u.x, p.act_params), glu<C::Activation>(g.y, u.y, p.act_params));
      });
    }
  }

  // Even columns are gate, odd ones up. Lane pairs trade groups so that each packs two neighbouring results.
  template <class Acc>
  CUTE_DEVICE void interleaved(const Acc& acc, int m, int row) const {
    const Rows<T> out = rows(p.out, p.out_ld, row), act = rows(p.act, p.act_ld, row);
    const int l = lane_id(), odd = l & 1, columns = 2 * p.N;
    const Stage s = stage(0);
    CUTE_UNROLL
    for (int q = 0; q < C::BN / 64; q += 2) {
      if (2 * t.n0 + q * 64 >= columns) break;
      if constexpr (C::StoreH) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int first = 2 * t.n0 + (q + i) * 64;
          chunk(stage(0), out, first, columns, [&](int j, int r) {
            const float2 x = pair(acc, m, q + i, j, r, p.bias, 0, first, columns);
            return pack<T>(x.x, x.y);
          });
        }
      }
      __syncwarp();
      CUTE_UNROLL
      for (int j = 0; j < 16; j += 2) {
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          float a[2];
          CUTE_UNROLL
          for (int i = 0; i < 2; ++i) {
            const float2 x = pair(acc, m, q, j + i, r, p.bias, 0, 2 * t.n0 + q * 64, columns);
            a[i] = glu<C::Activation>(x.x, x.y, p.act_params);
          }
          const float theirs = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1);
          *s.pair((l >> 2) + 8 * r, j / 2, odd * 2 + ((l & 3) >> 1)) = odd ? pack<T>(theirs, a[1]) : pack<T>(a[0], theirs);
        }
      }
      __syncwarp();
      act.store(s, t.n0 + q * 32, p.N);
    }
  }

  CUTE_DEVICE void zeros(int row) const {
    const int width = C::HColumns * p.N;
    const Stage s = stage(0);
    for (int i = lane_id(); i < 128; i += 32) reinterpret_cast<uint4*>(s.base)[i] = uint4{};
    __syncwarp();
    const bool h = C::Kind == Epilogue::store || C::StoreH;
    if (h) {
      const Rows<T> out = rows(p.out, p.out_ld, row);
      for (int f = 0; f < C::RowColumns * C::HColumns; f += 64) out.store(s, t.n0 * C::HColumns + f, width);
    }
    if constexpr (C::Kind != Epilogue::store) {
      const Rows<T> act = rows(p.act, p.act_ld, row);
      for (int f = 0; f < C::RowColumns; f += 64) act.store(s, t.n0 + f, p.N);
    }
    if constexpr (C::Kind == Epilogue::activate_backward) {
      if (p.row_dot && lane_id() < 16 && row + lane_id() < t.rows)
        p.row_dot[int64_t(t.n_tile) * p.n + __ldg(p.v + t.row0 + row + lane_id())] = 0.f;
    }
  }
};

// da -> dh = act'(h) (w da), scaled activation w a, and <da, a> a row. A warp's chunks of h come by cp.async into two buffers in
// turn, the first two while the main loop runs.
template <class C>
struct GradEpilogue : RowEpilogue<C> {
  using T = typename C::T;
  using Base = RowEpilogue<C>;
  static constexpr int kParts = C::HColumns;  // matrices of h a chunk: 1, or gate and up
  static constexpr int kChunks = C::BN / 64;  // of one 64-row block
  static_assert(C::Kind != Epilogue::activate_backward || C::StageBytes >= 2 * kParts * 2048, "two buffers a warp");

  CUTE_DEVICE Stage buffer(int index, int part) const { return this->stage((index & 1) * kParts + part); }

  CUTE_DEVICE int h_column(int part, int q) const {
    const int a = this->t.n0 + q * 64;
    return C::GluMode == Glu::interleaved ? 2 * a + part * 64 : a + part * this->p.N;
  }
  CUTE_DEVICE int h_limit(int part) const {
    return C::GluMode == Glu::interleaved ? 2 * this->p.N : (part + 1) * this->p.N;
  }
  // Chunk `index` of the tile's `blocks`; nothing past the last row or the last chunk, but always a group.
  template <class BlockRow>
  CUTE_DEVICE void fetch(int index, int blocks, BlockRow block_row) const {
    const int m = index / kChunks, q = index % kChunks;
    if (m < blocks && block_row(m) < this->t.rows) {
      const Rows<T> h = this->rows(this->p.h, this->p.h_ld, block_row(m));
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) h.fetch(buffer(index, i), h_column(i, q), h_limit(i));
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // The pairs of h that lane holds of 8-column group j and row `at`: one, or gate and up (interleaved: as they lie).
  CUTE_DEVICE uint32_t* pair_of_h(int index, int part, int at, int j) const {
    const int l = lane_id();
    if constexpr (C::GluMode == Glu::interleaved)
      return buffer(index, j >> 2).pair(at, 2 * (j & 3) + ((l & 3) >> 1), 2 * (l & 1)) + part;
    else return buffer(index, part).pair(at, j, l & 3);
  }

  // One pair of columns: h becomes dh, a the activation. Returns <da, a> of the two.
  CUTE_DEVICE float grad(float d0, float d1, float w, uint32_t (&h)[kParts], float2& a) const {
    const ActParams& ap = this->p.act_params;
    if constexpr (C::GluMode == Glu::none) {
      const float2 x = unpack<T>(h[0]);
      float s0, s1;
      a = {activate<C::Activation, true>(x.x, s0), activate<C::Activation, true>(x.y, s1)};
      h[0] = pack<T>(w * d0 * s0, w * d1 * s1);
    } else {
      constexpr bool kMixed = C::GluMode == Glu::interleaved;
      float2 g = unpack<T>(h[0]), u = unpack<T>(h[1]), dg, du;
      if (kMixed) { const float s = g.y; g.y = u.x; u.x = s; }
      a = {glu_slopes<C::Activation>(g.x, u.x, ap, dg.x, du.x), glu_slopes<C::Activation>(g.y, u.y, ap, dg.y, du.y)};
      const float w0 = w * d0, w1 = w * d1;
      h[0] = kMixed ? pack<T>(w0 * dg.x, w0 * du.x) : pack<T>(w0 * dg.x, w1 * dg.y);
      h[1] = kMixed ? pack<T>(w1 * dg.y, w1 * du.y) : pack<T>(w0 * du.x, w1 * du.y);
    }
    return d0 * a.x + d1 * a.y;
  }

  template <class Acc, class BlockRow>
  CUTE_DEVICE void block(const Acc& acc, int m, int blocks, BlockRow block_row) const {
    const int row = block_row(m);
    const GroupedParams& p = this->p;
    const int l = lane_id();
    const Rows<T> out = this->rows(p.out, p.out_ld, row), act = this->rows(p.act, p.act_ld, row);
    int slot[2];
    float w[2] = {1.f, 1.f}, dot[2] = {0.f, 0.f};
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int at = row + (l >> 2) + 8 * r;
      slot[r] = at < this->t.rows ? __ldg(p.v + this->t.row0 + at) : -1;
      if (p.slot_scale && slot[r] >= 0) w[r] = __ldg(p.slot_scale + slot[r]);
    }
    CUTE_UNROLL
    for (int q = 0; q < kChunks; ++q) {
      const int index = m * kChunks + q;
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncwarp();
      uint32_t scaled[8][2];
      CUTE_UNROLL
      for (int half = 0; half < 8; half += 4) {  // all loads before the first store, so that the pairs overlap
        uint32_t h[4][2][kParts];
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j)
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r)
            CUTE_UNROLL
            for (int i = 0; i < kParts; ++i) h[j][r][i] = *pair_of_h(index, i, (l >> 2) + 8 * r, half + j);
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {
            const int at = 2 * r + 4 * (8 * q + half + j);
            float2 a;
            dot[r] += grad(acc(at, m, 0), acc(at + 1, m, 0), w[r], h[j][r], a);
            scaled[half + j][r] = pack<T>(w[r] * a.x, w[r] * a.y);
          }
        }
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j)
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r)
            CUTE_UNROLL
            for (int i = 0; i < kParts; ++i) *pair_of_h(index, i, (l >> 2) + 8 * r, half + j) = h[j][r][i];
      }
      __syncwarp();
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) out.store(buffer(index, i), h_column(i, q), h_limit(i));
      this->chunk(buffer(index, 0), act, this->t.n0 + q * 64, p.N, [&](int j, int r) { return scaled[j][r]; });
      __syncwarp();
      fetch(index + 2, blocks, block_row);
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      dot[r] += __shfl_xor_sync(~0u, dot[r], 1);
      dot[r] += __shfl_xor_sync(~0u, dot[r], 2);
      if (p.row_dot && (l & 3) == 0 && slot[r] >= 0) p.row_dot[int64_t(this->t.n_tile) * p.n + slot[r]] = dot[r];
    }
  }
};

template <class C>
struct WeightEpilogue {
  using T = typename C::T;
  Smem<C>& sm;
  const GroupedParams& p;
  const Tile& t;
  int warp, group;

  // rows m0 + row .. + 16 of dW[e]
  template <class Acc>
  CUTE_DEVICE void plain(const Acc& acc, int m, int row) const {
    const Stage s{sm.stage[warp]};
    const int l = lane_id(), f = t.m0 + row;
    const Rows<T> out{static_cast<T*>(p.dw) + (int64_t(t.expert) * p.R + f) * p.C, p.C, p.R - f};
    CUTE_UNROLL
    for (int q = 0; q < C::BN / 64; ++q) {
      if (t.n0 + q * 64 >= p.C) break;
      __syncwarp();
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j)
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r)
          *s.pair((l >> 2) + 8 * r, j, l & 3) = pack<T>(acc(2 * r + 4 * (8 * q + j), m, 0), acc(2 * r + 1 + 4 * (8 * q + j), m, 0));
      __syncwarp();
      out.store(s, t.n0 + q * 64, p.C);
    }
  }

  // dW[e] is (C, R): the warpgroup turns 64 x 64 blocks round in its four warps' shared memory.
  template <class Acc>
  CUTE_DEVICE void transposed(const Acc& acc, int m, int row64) const {
    uint8_t* s = sm.stage[group * 4];
    const int l = lane_id(), w = warp_in_group(), f = t.m0 + row64;
    static_assert(!C::TransposeWeight || C::StageBytes == 2048, "a warpgroup's stages are one 8 KB block");
    CUTE_UNROLL
    for (int q = 0; q < C::BN / 64; ++q) {
      if (t.n0 + q * 64 >= p.C) break;
      cutlass::arch::NamedBarrier::sync(128, kStageBarrier + group);
      CUTE_UNROLL
      for (int j = 0; j < 8; j += 2) {
        uint32_t x[4];  // (group j, rows 0-7), (j, 8-15), (j + 1, 0-7), (j + 1, 8-15)
        CUTE_UNROLL
        for (int z = 0; z < 4; ++z) {
          const int at = 2 * (z & 1) + 4 * (8 * q + j + (z >> 1));
          x[z] = pack<T>(acc(at, m, 0), acc(at + 1, m, 0));
        }
        const int z = l >> 3, n = (j + (z >> 1)) * 8 + (l & 7), c = 2 * w + (z & 1);
        SM90_U16x8_STSM_T::copy(x[0], x[1], x[2], x[3], *reinterpret_cast<uint128_t*>(s + n * 128 + (((c ^ n) & 7) << 4)));
      }
      cutlass::arch::NamedBarrier::sync(128, kStageBarrier + group);
      const Stage mine{s + w * 2048};
      const int first = t.n0 + q * 64 + w * 16;
      const Rows<T> out{static_cast<T*>(p.dw) + (int64_t(t.expert) * p.C + first) * p.R, p.R, p.C - first};
      out.store(mine, f, p.R);
    }
  }

  CUTE_DEVICE void column_sum(const ColumnSum<C>& sum) const {
    using S = ColumnSum<C>;
    const int w = C::PingPong ? warp_in_group() : warp, l = lane_id();
    float2* mine = reinterpret_cast<float2*>(sm.stage[warp]);
    __syncwarp();
    mine[l] = {sum.x, sum.y};
    cutlass::arch::NamedBarrier::sync(C::PingPong ? 128 : 256, kTailBarrier + (C::PingPong ? group : 0));
    if (w % S::kParts == 0) {
      float2 total = mine[l];
      CUTE_UNROLL
      for (int i = 1; i < S::kParts; ++i) {
        const float2 other = reinterpret_cast<float2*>(sm.stage[warp + i])[l];
        total.x += other.x;
        total.y += other.y;
      }
      const int n = t.n0 + (w / S::kParts) * 64 + 2 * l;
      if (n < p.C) *reinterpret_cast<uint32_t*>(static_cast<T*>(p.db) + int64_t(t.expert) * p.C + n) = pack<T>(total.x, total.y);
    }
    cutlass::arch::NamedBarrier::sync(C::PingPong ? 128 : 256, kTailBarrier + (C::PingPong ? group : 0));
  }
};

}  // namespace hexa::sm90
