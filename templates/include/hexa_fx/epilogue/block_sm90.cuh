// Results of FP8 block compute. Row tiles: accumulators -> (bias, activation) -> memory, as wide numbers or quantised in blocks of
// 1 x 128, which a part's columns are: a row of one lies in four lanes. Weight tiles: accumulators -> dW, rounded once, or added to
// floats. The copy engine drops what lies outside.
#pragma once
#include <hexa_fx/epilogue/chunk_sm90.cuh>
#include <hexa_fx/kernels/config_fp8_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct BlockRowEpilogue {
  using T = typename C::T;
  using Out = typename C::Out;
  static constexpr int kWide = kLineBytes / int(sizeof(Out));  // columns of a chunk of plain results
  using Values = float[64];                                    // of a part
  BlockSmem<C>& sm;
  const BlockParams& p;
  const TmaDescriptor* maps;
  const Tile& t;
  Outbox<C>& box;
  int row;  // the warp's first, of the tile

  // Whether all of the warp's rows exist, and so leave by the copy engine.
  CUTE_DEVICE bool whole() const { return row + 16 <= t.rows; }
  template <class U>
  CUTE_DEVICE Rows<U> rows(void* base, int ld, Map map) const {
    return {static_cast<U*>(base) + (int64_t(t.row0) + row) * ld, ld, t.rows - row, maps + map, 0, t.row0 + row};
  }

  // Adds the bias to the part whose first column of the weight is `column`; columns behind `columns` have none.
  CUTE_DEVICE void add_bias(Values& x, int column, int columns) const {
    if constexpr (C::Bias) {
      const float* bias = static_cast<const float*>(p.bias) + int64_t(t.expert) * p.bias_ld + column + (lane_id() & 3) * 2;
      CUTE_UNROLL
      for (int j = 0; j < 16; ++j) {
        if (column + 8 * j >= columns) break;
        const float2 b = __ldg(reinterpret_cast<const float2*>(bias + 8 * j));
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) x[4 * j + i] += i & 1 ? b.y : b.x;
      }
    }
  }

  // A part as rows of `Out`, columns `first` .. + 128 of `columns`.
  template <bool Full>
  CUTE_DEVICE void plain(const Values& x, int first, int columns) const {
    const Rows<Out> out = rows<Out>(p.out, p.out_ld, kOutMap);
    CUTE_UNROLL
    for (int q = 0; q < kPart / kWide; ++q) {
      if (!Full && first + q * kWide >= columns) break;
      const Chunk s = box.next();
      if constexpr (sizeof(Out) == 4) {
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          const int j = i >> 1, r = i & 1, at = 4 * (4 * q + j) + 2 * r;
          *s.floats((lane_id() >> 2) + 8 * r, 4 * j + (lane_id() & 3)) = {x[at], x[at + 1]};
        }
      } else {
        s.put([&](int j, int r) {
          const int at = 4 * (8 * q + j) + 2 * r;
          return pack<Out>(x[at], x[at + 1]);
        });
      }
      out.template store<Full>(s, first + q * kWide, columns, Outbox<C>::sends());
    }
  }

  // The scales of a part's rows, number `block` of `scales`, and what its numbers are multiplied by.
  template <class Scale>
  CUTE_DEVICE void scale_rows(const Values& x, float (&inverse)[2], float* scales, int scale_ld, int block) const {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float largest = 0.f;
      CUTE_UNROLL
      for (int j = 0; j < 16; ++j)
        largest = Scale::larger(largest, Scale::larger(fabsf(x[4 * j + 2 * r]), fabsf(x[4 * j + 2 * r + 1])));
      largest = Scale::larger(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = Scale::larger(largest, __shfl_xor_sync(~0u, largest, 2));
      const Scale of(largest);
      inverse[r] = of.inverse;
      const int at = row + (lane_id() >> 2) + 8 * r;
      if ((lane_id() & 3) == 0 && at < t.rows) scales[(int64_t(t.row0) + at) * scale_ld + block] = of.scale;
    }
  }
  CUTE_DEVICE void leave(const Chunk& s, const Rows<T>& out, int column) const {
    const int columns = column + kPart;
    if (whole()) out.template store<true>(s, column, columns, Outbox<C>::sends());
    else out.template store<false>(s, column, columns, Outbox<C>::sends());
  }

  // A part as bytes, from column `first` on: whole numbers, 128 more than they are, as rows/combine_bytes.cuh reads them. Adding 2^23
  // rounds a number to the lowest bits of a float.
  CUTE_DEVICE void bytes(const Values& x, int first) const {
    float inverse[2];
    scale_rows<IntegerScale>(x, inverse, p.h_scale, p.N / kPart, first / kPart);
    const Chunk s = box.next();
    s.put([&](int j, int r) {
      uint32_t two[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int at = 4 * (2 * j + i) + 2 * r;
        const float low = fmaf(x[at], inverse[r], 8388608.f + 128.f), high = fmaf(x[at + 1], inverse[r], 8388608.f + 128.f);
        two[i] = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x0040);
      }
      return __byte_perm(two[0], two[1], 0x5410);
    });
    leave(s, rows<T>(p.out, p.out_ld, kOutMap), first);
  }

  // A part quantised: one scale for each of its rows, number `block` of `scales`.
  CUTE_DEVICE void quantised(const Values& x, const Rows<T>& out, int column, float* scales, int scale_ld, int block) const {
    float inverse[2];
    scale_rows<BlockScale>(x, inverse, scales, scale_ld, block);
    const Chunk s = box.next();
    CUTE_UNROLL
    for (int j = 0; j < 16; ++j) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int at = 4 * j + 2 * r, line = (lane_id() >> 2) + 8 * r;
        *reinterpret_cast<uint16_t*>(s.base + swizzled(line, j >> 1) + (j & 1) * 8 + (lane_id() & 3) * 2) =
            uint16_t(pack_e4m3(x[at] * inverse[r], x[at + 1] * inverse[r]));
      }
    }
    leave(s, out, column);
  }

  CUTE_DEVICE void run(float (&total)[kParts][64]) const {
    const int h_columns = C::PairedWeight ? 2 * p.N : p.N;
    CUTE_UNROLL
    for (int h = 0; h < kParts; ++h) {
      const int first = t.n0 + h * (C::PairedWeight ? p.N : kPart);
      if (!C::PairedWeight && first >= p.N) break;
      add_bias(total[h], first, h_columns);
      if constexpr (C::Kind == Epilogue::store && sizeof(Out) == 1) bytes(total[h], first);
      else if constexpr (C::Kind == Epilogue::store) {
        if (whole() && first + kPart <= p.N) plain<true>(total[h], first, p.N);
        else plain<false>(total[h], first, p.N);
      } else {
        if constexpr (C::StoreH)
          quantised(total[h], rows<T>(p.out, p.out_ld, kOutMap), first, p.h_scale, h_columns / kPart, first / kPart);
        if constexpr (!C::PairedWeight) {
          CUTE_UNROLL
          for (int i = 0; i < 64; ++i) {
            float unused;
            total[h][i] = activate<C::Activation, false>(total[h][i], unused);
          }
          quantised(total[h], rows<T>(p.act, p.act_ld, kActMap), first, p.act_scale, p.N / kPart, first / kPart);
        }
      }
    }
    if constexpr (C::Kind == Epilogue::activate && C::PairedWeight) {
      CUTE_UNROLL
      for (int i = 0; i < 64; ++i) total[0][i] = glu<C::Activation>(total[0][i], total[1][i], p.act_params);
      quantised(total[0], rows<T>(p.act, p.act_ld, kActMap), t.n0, p.act_scale, p.N / kPart, t.n0 / kPart);
    }
  }
};

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
