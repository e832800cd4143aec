// out[t] = sum over s of w[t, s] * y[t * k + s], in the order of slots; those without an expert count nothing. Eight columns a thread.
//
// May begin while the launch that writes y ends: ids and weights are read, and it waits.
#pragma once
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/ptx/dependent.cuh>

namespace hexa {

struct DecodeCombineParams {
  const void* y;        // (n, D), by slot
  const void* weights;  // (T, k) or null
  const void* ids;      // (T, k)
  void* out;            // (T, D)
  int width;            // D, a multiple of 8
  int top_k, experts;
  int parts;  // blocks a token
};

template <class T, class W, class Id, bool kWeighted, int kThreads>
struct DecodeCombine {
  static constexpr int kTogether = 8;  // loads that are under way

  static __device__ void run(const DecodeCombineParams& p) {
    const int token = int(blockIdx.x) / p.parts, part = int(blockIdx.x) - token * p.parts;
    const int column = (part * kThreads + int(threadIdx.x)) * kChunk;
    const long long first = static_cast<long long>(token) * p.top_k;
    const Id* ids = static_cast<const Id*>(p.ids) + first;
    const W* weights = static_cast<const W*>(p.weights) + first;
    const T* y = static_cast<const T*>(p.y) + first * p.width + column;
    const bool mine = column < p.width;
    float sum[kChunk] = {};
    float w[kTogether];
    bool wanted[kTogether];
    look_up(p, ids, weights, 0, mine, w, wanted);
    wait_for_last_launch();
    release_next_launch();
    for (int s = 0; s < p.top_k; s += kTogether) {
      if (s > 0) look_up(p, ids, weights, s, mine, w, wanted);
      uint4 raw[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        raw[i] = load_written16(wanted[i] ? y + static_cast<long long>(s + i) * p.width : y, wanted[i]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (!wanted[i]) continue;
        float each[kChunk];
        unpack<T>(each, reinterpret_cast<const Raw<T>&>(raw[i]));
#pragma unroll
        for (int c = 0; c < kChunk; ++c) sum[c] += w[i] * each[c];
      }
    }
    if (mine) store_chunk<true, true>(static_cast<T*>(p.out) + static_cast<long long>(token) * p.width + column, sum);
  }

 private:
  // Whether slots from s on have an expert, and their weights: that of a slot without one may hold anything, NaN included.
  static __device__ void look_up(const DecodeCombineParams& p, const Id* ids, const W* weights, int s, bool mine,
                                 float (&w)[kTogether], bool (&wanted)[kTogether]) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const long long id = s + i < p.top_k ? static_cast<long long>(ids[s + i]) : -1;
      wanted[i] = mine && id >= 0 && id < p.experts;
      w[i] = !wanted[i] ? 0.f : kWeighted ? static_cast<float>(widen(weights[s + i])) : 1.f;
    }
  }
};

}  // namespace hexa
