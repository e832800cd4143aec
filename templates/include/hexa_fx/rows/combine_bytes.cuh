// hexa::combine_int8: as hexa::combine, of rows of whole numbers that 128 columns have a scale for. A block has a few tokens, of which a thread
// has sixteen columns.
//
// A byte is a number of -127 to 127, and 128. The sixteen bytes of a thread's columns are four words of columns 2 q, 2 q + 1, 8 + 2 q and
// 9 + 2 q, as lanes of a product hold them.
#pragma once
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/ptx/sm80.cuh>
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
  int top_k, tokens;
};

// kTopK: k where it is known at compile time, 0 otherwise
template <class T, class W, bool kWeighted, int kTopK, bool kAligned, int kThreads>
struct CombineBytes {
  static constexpr int kColumns = 16, kTogether = kTopK ? kTopK : 1;
  // Two tokens' parts of rows, of which each thread has its own: one comes while the other is added up.
  struct Memory {
    uint4 piece[2][kTogether][kThreads];
  };

  // Block b: tokens b, b + gridDim.x, ..
  static __device__ void run(const CombineBytesParams& p, Memory& memory) {
    Tokens at{p, int(blockIdx.x), int(threadIdx.x) * kColumns};
    if (at.column >= p.width) return;
    if constexpr (kTopK) several(at, memory);
    else {
      for (; at.token < p.tokens; at.next()) {
        float sum[2][kChunk] = {};
        for (int slot = 0; slot < p.top_k; ++slot) {
          float w[1];
          ask(at, Slots(at, slot), memory.piece[0], w);
          wait_for_copies<0>();
          landed();
          add(sum, memory.piece[0][0][threadIdx.x], w[0]);
        }
        at.store(sum);
      }
    }
  }

 private:
  // A thread's part of a token, and those that follow.
  struct Tokens {
    const CombineBytesParams& p;
    int token, column;
    __device__ void next() {
      column += kThreads * kColumns;
      if (column < p.width) return;
      column = threadIdx.x * kColumns;
      token += gridDim.x;
    }
    __device__ void store(const float (&sum)[2][kChunk]) const {
      T* out = static_cast<T*>(p.out) + static_cast<long long>(token) * p.width + column;
      store_chunk<kAligned>(out, sum[0], p.width - column);
      if (column + kChunk < p.width) store_chunk<kAligned>(out + kChunk, sum[1], p.width - column - kChunk);
    }
  };
  // Where a token's rows lie, from a slot on; no row, whose weight and elements may hold anything, is -1. Past the last token: of that.
  struct Slots {
    int row[kTogether];
    float weight[kTogether];
    __device__ Slots(const Tokens& of, int first) {
      const CombineBytesParams& p = of.p;
      const int routed = __ldg(p.routed);
      const long long at = static_cast<long long>(min(of.token, p.tokens - 1)) * (kTopK ? kTopK : p.top_k) + first;
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
        const int found = __ldg(p.inv + at + s);
        row[s] = found < routed ? found : -1;
        weight[s] = kWeighted ? float(widen(static_cast<const W*>(p.weights)[at + s])) : 1.f;
      }
    }
  };

  // Parts of rows on their way to memory, by asynchronous copies, and what they are multiplied by.
  static __device__ void ask(const Tokens& of, const Slots& slots, uint4 (&to)[kTogether][kThreads], float (&w)[kTogether]) {
    const CombineBytesParams& p = of.p;
#pragma unroll
    for (int s = 0; s < kTogether; ++s) {
      const bool wanted = slots.row[s] >= 0;
      const unsigned long long at = static_cast<unsigned long long>(max(slots.row[s], 0)) * unsigned(p.padded) + of.column;
      copy_async16(shared_address(&to[s][threadIdx.x]), p.y + at, wanted ? 16 : 0);
      w[s] = wanted ? __ldg(p.scales + at / kScaleBlock) : 0.f;
      if (kWeighted && wanted) w[s] *= slots.weight[s];
    }
    commit_copies();
  }
  static __device__ void several(Tokens at, Memory& memory) {
    float next_w[kTogether];
    ask(at, Slots(at, 0), memory.piece[0], next_w);
    Tokens ahead = at;
    ahead.next();
    Slots slots(ahead, 0);
    for (int stage = 0; at.token < at.p.tokens; stage ^= 1) {
      float w[kTogether];
#pragma unroll
      for (int s = 0; s < kTogether; ++s) w[s] = next_w[s];
      const Tokens now = at;
      at.next();
      if (at.token < at.p.tokens) {
        ask(at, slots, memory.piece[stage ^ 1], next_w);
        ahead.next();
        slots = Slots(ahead, 0);
        wait_for_copies<1>();
      } else wait_for_copies<0>();
      landed();
      float sum[2][kChunk] = {};
#pragma unroll
      for (int s = 0; s < kTogether; ++s) add(sum, memory.piece[stage][s][threadIdx.x], w[s]);
      now.store(sum);
    }
  }
  // No element is read before it: the compiler knows of no other thread that waits.
  static __device__ void landed() { asm volatile("" ::: "memory"); }
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
