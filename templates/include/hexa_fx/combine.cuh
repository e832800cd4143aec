// hexa::combine: out[t] = sum over s of w[t, s] * y[inv[t*k + s]], in a fixed order. One block a token; 16-byte accesses.
#pragma once
#include <hexa_fx/vector.cuh>

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

// kTopK: k where it is known at compile time (all loads of a chunk in flight), 0 otherwise
template <class T, class W, bool kWeighted, int kTopK, bool kAligned>
struct Combine {
  using F = wide_t<T>;

  static __device__ void run(const CombineParams& p) {
    const long long token = blockIdx.x;
    const int routed = __ldg(p.routed);
    const int* inv = p.inv + token * (kTopK ? kTopK : p.top_k);
    const W* weights = static_cast<const W*>(p.weights) + token * (kTopK ? kTopK : p.top_k);
    T* out = static_cast<T*>(p.out) + token * p.out_stride;
    for (int c = threadIdx.x * kChunk; c < p.width; c += blockDim.x * kChunk) {
      F sum[kChunk] = {};
      if constexpr (kTopK > 0) {
        F part[kTopK][kChunk];
#pragma unroll
        for (int s = 0; s < kTopK; ++s) load(p, inv[s], routed, c, part[s]);
#pragma unroll
        for (int s = 0; s < kTopK; ++s) add(sum, part[s], inv[s] < routed, kWeighted ? weight(weights, s) : F(1));
      } else {
#pragma unroll 4
        for (int s = 0; s < p.top_k; ++s) {
          F part[kChunk];
          const int row = inv[s];
          load(p, row, routed, c, part);
          add(sum, part, row < routed, kWeighted ? weight(weights, s) : F(1));
        }
      }
      store_chunk<kAligned>(out + c, sum, p.width - c);
    }
  }

 private:
  static __device__ F weight(const W* weights, int s) { return static_cast<F>(widen(weights[s])); }

  static __device__ void load(const CombineParams& p, int row, int routed, int c, F (&part)[kChunk]) {
    if (row < routed) {
      load_chunk<kAligned>(part, static_cast<const T*>(p.y) + row * p.y_stride + c, p.width - c);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) part[i] = F(0);
    }
  }

  static __device__ void add(F (&sum)[kChunk], const F (&part)[kChunk], bool routed, F w) {
    if (!routed) return;  // a sentinel's weight may be anything, NaN included
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] = kWeighted ? sum[i] + w * part[i] : sum[i] + part[i];
  }
};

}  // namespace hexa
