// hexa::combine: out[t] = sum over s of w[t, s] * y[inv[t*k + s]], in a fixed order. One block a token; 16-byte accesses.
#pragma once
#include <hexa_fx/load/vector.cuh>

namespace hexa {

struct CombineParams {
  const void* y;        // (n, D) rows
  const void* weights;  // (T, k) or null
  const int* inv;       // (n,)
  const int* routed;    // offs + E: the number of routed rows
  void* out;            // (T, D)
  long long y_stride;
  long long out_stride;
  int width;  // D
  int top_k;
};

// kTopK: k where it is known at compile time (all loads of a chunk are in flight together), 0 otherwise
template <class T, class W, bool kWeighted, int kTopK, bool kAligned>
struct Combine {
  using F = wide_t<T>;

  static __device__ void run(const CombineParams& p) {
    const long long token = blockIdx.x;
    const int top_k = kTopK ? kTopK : p.top_k;
    const int routed = __ldg(p.routed);
    const int* inv = p.inv + token * top_k;
    const W* weights = static_cast<const W*>(p.weights) + token * top_k;
    T* out = static_cast<T*>(p.out) + token * p.out_stride;
    for (int c = threadIdx.x * kChunk; c < p.width; c += blockDim.x * kChunk) {
      F sum[kChunk] = {};
      if (kTopK && kAligned && p.width - c >= kChunk) add_all(p, inv, weights, routed, c, sum);
      else add_each(p, inv, weights, routed, c, sum);
      store_chunk<kAligned>(out + c, sum, p.width - c);
    }
  }

 private:
  static __device__ const T* at(const CombineParams& p, int row, int c) {
    return static_cast<const T*>(p.y) + row * p.y_stride + c;
  }

  // every load before the first use
  static __device__ void add_all(const CombineParams& p, const int* inv, const W* weights, int routed, int c, F (&sum)[kChunk]) {
    constexpr int kCount = kTopK ? kTopK : 1;
    Raw<T> raw[kCount];
    F w[kCount];
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      const int row = __ldg(inv + s);
      const bool wanted = row < routed;  // a sentinel's weight and row may hold anything, NaN included
      w[s] = kWeighted && wanted ? static_cast<F>(widen(weights[s])) : F(wanted);
      raw[s] = fetch(at(p, wanted ? row : 0, c), wanted);
    }
    __syncwarp(__activemask());  // nothing to exchange: it keeps the compiler from moving loads down to their uses
#pragma unroll
    for (int s = 0; s < kCount; ++s) add(sum, raw[s], w[s]);
  }

  static __device__ void add_each(const CombineParams& p, const int* inv, const W* weights, int routed, int c, F (&sum)[kChunk]) {
    for (int s = 0; s < p.top_k; ++s) {
      const int row = inv[s];
      if (row >= routed) continue;
      const F w = kWeighted ? static_cast<F>(widen(weights[s])) : F(1);
      F part[kChunk];
      load_chunk<kAligned>(part, at(p, row, c), p.width - c);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum[i] += w * part[i];
    }
  }

  static __device__ void add(F (&sum)[kChunk], const Raw<T>& raw, F w) {
    F part[kChunk];
    unpack<T>(part, raw);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] += w * part[i];
  }
};

}  // namespace hexa
