// hexa::combine_int8: as hexa::combine, of rows of whole numbers that 128 columns have a scale for. One block a token; a thread has sixteen columns.
//
// A byte is a number of -127 to 127, and 128. The sixteen bytes of a thread's columns are four words of columns 2 q, 2 q + 1, 8 + 2 q and
// 9 + 2 q, as lanes of a product hold them.
#pragma once
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/types/fp8.cuh>

namespace hexa {

struct CombineBytesParams {
  const unsigned char* y;  // (n, D')
  const float* scales;     // (n, D' / 128)
  const void* weights;     // (T, k) or null
  const int* inv;          // (n,)
  const int* routed;       // offs + E: the number of routed rows
  void* out;               // (T, D)
  int width, padded;       // D, D'
  int top_k;
};

// kTopK: k where it is known at compile time (all loads are in flight together), 0 otherwise
template <class T, class W, bool kWeighted, int kTopK, bool kAligned, int kThreads>
struct CombineBytes {
  static constexpr int kColumns = 16;

  static __device__ void run(const CombineBytesParams& p) {
    const long long token = blockIdx.x;
    const int top_k = kTopK ? kTopK : p.top_k, routed = __ldg(p.routed);
    const int* inv = p.inv + token * top_k;
    const W* weights = static_cast<const W*>(p.weights) + token * top_k;
    T* out = static_cast<T*>(p.out) + token * p.width;
    for (int c = threadIdx.x * kColumns; c < p.width; c += kThreads * kColumns) {
      float sum[2][kChunk] = {};
      constexpr int kTogether = kTopK ? kTopK : 1;
      for (int first = 0; first < top_k; first += kTogether) {
        uint4 raw[kTogether];
        float w[kTogether];
#pragma unroll
        for (int s = 0; s < kTogether; ++s) {
          const int row = __ldg(inv + first + s);
          const bool wanted = row < routed;  // a sentinel's weight and row may hold anything, NaN included
          const unsigned long long at = static_cast<unsigned long long>(wanted ? row : 0) * unsigned(p.padded) + c;
          raw[s] = fetch16(reinterpret_cast<const uint4*>(p.y + at), wanted);
          w[s] = wanted ? __ldg(p.scales + at / kScaleBlock) : 0.f;
          if (kWeighted && wanted) w[s] *= float(widen(weights[first + s]));
        }
#pragma unroll
        for (int s = 0; s < kTogether; ++s) add(sum, raw[s], w[s]);
      }
      store_chunk<kAligned>(out + c, sum[0], p.width - c);
      if (c + kChunk < p.width) store_chunk<kAligned>(out + c + kChunk, sum[1], p.width - c - kChunk);
    }
  }

 private:
  static __device__ void add(float (&sum)[2][kChunk], const uint4& raw, float w) {
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // the byte in the middle of 2^15 is added to it
        const float x = __uint_as_float(__byte_perm(word[q], 0x47000000u, 0x7404u | i << 4)) - (32768.f + 128.f);
        float& to = sum[i >> 1][2 * q + (i & 1)];
        to = fmaf(w, x, to);
      }
    }
  }
};

}  // namespace hexa
