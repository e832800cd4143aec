// Results from registers to memory: through shared memory, so that stores are of 16 bytes, with bias and activation on the way.
#pragma once
#include <hexa_fx/epilogue/activations.cuh>
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/types/gemm_sm80.cuh>

namespace hexa {

template <class C, class Product>
struct Epilogue {
  using T = typename C::T;
  using F = wide_t<T>;
  static constexpr int kPitch = C::BN + 8;  // of the staged accumulators
  static constexpr int kBytes = Product::kRows * kPitch * int(sizeof(F));

  // One group of rows after the other. The operands' stages, which lie there too, have been read.
  static __device__ void run(const GemmParams& p, const GemmTile& t, F* stage, const Product& product,
                             const typename Product::Sum& sum) {
#pragma unroll
    for (int i = 0; i < Product::kM; ++i) {
      product.each_of_group(sum, i, [&](int row, int column, F value) { stage[row * kPitch + column] = value; });
      __syncthreads();
      store_rows(p, t, stage, i * Product::kRows);
      __syncthreads();
    }
  }

  // Rows that belong to no expert are zero.
  static __device__ void zero_tail(const GemmParams& p) {
    const int width = C::kGlu == Glu::none ? p.n : 2 * p.n;
    for (int row = __ldg(p.offs + p.experts) + blockIdx.x; row < p.rows; row += gridDim.x) {
      if constexpr (C::kKeep || !C::kActs) zero_row(static_cast<T*>(p.d) + row * p.d_stride, width);
      if constexpr (C::kActs) zero_row(static_cast<T*>(p.act) + row * p.act_stride, p.n);
    }
  }

 private:
  static __device__ void zero_row(T* row, int width) {
    const F zero[kChunk] = {};
    for (int c = threadIdx.x * kChunk; c < width; c += C::kThreads * kChunk) store_chunk(row + c, zero, width - c);
  }

  static __device__ void store_rows(const GemmParams& p, const GemmTile& t, const F* stage, int m0) {
    constexpr int kAcross = (C::kActs && C::kGlu != Glu::none ? C::BN / 2 : C::BN) / kChunk;
    for (int i = threadIdx.x; i < Product::kRows * kAcross; i += C::kThreads) {
      const int r = i / kAcross, c = i % kAcross * kChunk, n = t.n0 + c, left = p.n - n;
      if (m0 + r >= C::BM || left <= 0) continue;
      const F* from = stage + r * kPitch;
      if constexpr (C::kOp == Op::esmm) {
        const int row = t.row + m0 + r;
        if (row < t.end) store_esmm(p, t, from, row, c, n, left);
      } else {
        const int row = t.m0 + m0 + r;
        if (row >= p.m) continue;
        F value[kChunk];
        take(value, from + c, 1);
        const long long at = t.expert * p.d_expert + row * p.d_stride + n;
        if constexpr (C::kAdd) add_chunk(static_cast<F*>(p.d) + at, value, left);
        else store_chunk(static_cast<T*>(p.d) + at, value, left);
      }
    }
  }
  static __device__ void take(F (&value)[kChunk], const F* from, int stride) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) value[i] = from[i * stride];
  }
  static __device__ void add_bias(F (&value)[kChunk], const void* bias, long long at, int count) {
    F b[kChunk];
    load_chunk(b, static_cast<const T*>(bias) + at, count);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) value[i] += b[i];
  }

  static __device__ void store_esmm(const GemmParams& p, const GemmTile& t, const F* from, long long row, int c, int n, int left) {
    constexpr bool kFast = sizeof(T) == 2;
    T* d = static_cast<T*>(p.d) + row * p.d_stride;
    T* act = static_cast<T*>(p.act) + row * p.act_stride;
    const long long e = t.expert;
    if constexpr (C::kGlu == Glu::none) {
      F x[kChunk];
      take(x, from + c, 1);
      if constexpr (C::kBias) add_bias(x, p.bias, e * p.n + n, left);
      if constexpr (C::kKeep || !C::kActs) store_chunk(d + n, x, left);
      if constexpr (C::kActs) {
        F unused;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] = activate<C::kAct, false, kFast>(x[i], unused);
        store_chunk(act + n, x, left);
      }
    } else if constexpr (C::kHalves) {
      F gate[kChunk], up[kChunk];
      take(gate, from + c, 1);
      take(up, from + C::kHalf + c, 1);
      if constexpr (C::kBias) {
        constexpr bool kTwo = C::kGlu == Glu::split;
        add_bias(gate, p.bias, e * p.n * (kTwo ? 1 : 2) + n, left);
        add_bias(up, kTwo ? p.bias2 : p.bias, kTwo ? e * p.n + n : e * p.n * 2 + p.n + n, left);
      }
      if constexpr (C::kKeep) {
        store_chunk(d + n, gate, left);
        store_chunk(d + p.n + n, up, left);
      }
      store_gated(act + n, gate, up, p, left);
    } else {
      F low[kChunk], high[kChunk], gate[kChunk], up[kChunk];
      take(low, from + 2 * c, 1);
      take(high, from + 2 * c + kChunk, 1);
      if constexpr (C::kBias) {
        add_bias(low, p.bias, e * p.n * 2 + 2 * n, 2 * left);
        add_bias(high, p.bias, e * p.n * 2 + 2 * n + kChunk, 2 * left - kChunk);
      }
      if constexpr (C::kKeep) {
        store_chunk(d + 2 * n, low, 2 * left);
        store_chunk(d + 2 * n + kChunk, high, 2 * left - kChunk);
      }
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) {
        gate[i] = low[2 * i], up[i] = low[2 * i + 1];
        gate[i + kChunk / 2] = high[2 * i], up[i + kChunk / 2] = high[2 * i + 1];
      }
      store_gated(act + n, gate, up, p, left);
    }
  }
  static __device__ void store_gated(T* act, F (&gate)[kChunk], const F (&up)[kChunk], const GemmParams& p, int left) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) gate[i] = glu<C::kAct, sizeof(T) == 2>(gate[i], up[i], p.act_params);
    store_chunk(act, gate, left);
  }
};

}  // namespace hexa
