// hexa::activate and hexa::activate_backward: element-wise, eight columns a thread, with the routing weight's gradient as a
// row reduction in the same pass.
#pragma once
#include <hexa_fx/epilogue/activations.cuh>
#include <hexa_fx/load/vector.cuh>

namespace hexa {

struct ActivateParams {
  const void* h;        // (n, I), or (n, 2I) gated
  const void* da;       // (n, I), backward
  const void* weights;  // by slot, or null
  const int* v;         // (n,), with weights
  const int* routed;    // offs + E, with weights
  void* a;              // (n, I): a, or w a in backward
  void* dh;             // shaped as h, contiguous
  void* dweights;       // by slot
  long long h_stride;
  long long da_stride;
  int rows;
  int width;  // I
  ActParams act;
};

// kWarpsPerRow: warps that share a row (1, 2 or 4 of a block's 4). In forward they only share the work.
template <class T, class W, Act kAct, Glu kGlu, bool kWeighted, bool kAligned, int kWarpsPerRow>
struct Activate {
  using F = wide_t<T>;
  static constexpr bool kFast = sizeof(T) == 2, kGated = kGlu != Glu::none;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRowsPerBlock = kWarps / kWarpsPerRow;

  static __device__ void forward(const ActivateParams& p) {
    const long long row = first_row();
    if (row >= p.rows) return;
    const T* h = static_cast<const T*>(p.h) + row * p.h_stride;
    T* a = static_cast<T*>(p.a) + row * p.width;
    for (int c = first_column(); c < p.width; c += kStep) {
      if (kAligned && p.width - c >= kChunk) forward_chunk<true>(p, h, a, c);
      else forward_chunk<false>(p, h, a, c);
    }
  }

  static __device__ void backward(const ActivateParams& p) {
    const long long row = first_row();
    const bool live = row < p.rows;
    int slot = 0;
    F w = F(1), dot = F(0);
    bool routed = true;
    if (kWeighted && live) {
      slot = __ldg(p.v + row);
      routed = row < __ldg(p.routed);
      w = routed ? static_cast<F>(widen(static_cast<const W*>(p.weights)[slot])) : F(0);
    }
    if (live) {
      const T* h = static_cast<const T*>(p.h) + row * p.h_stride;
      const T* da = static_cast<const T*>(p.da) + row * p.da_stride;
      T* a = static_cast<T*>(p.a) + row * p.width;
      T* dh = static_cast<T*>(p.dh) + row * p.width * (kGated ? 2 : 1);
      for (int c = first_column(); c < p.width; c += kStep) {
        if (kAligned && p.width - c >= kChunk) backward_chunk<true>(p, h, da, a, dh, c, routed, w, dot);
        else backward_chunk<false>(p, h, da, a, dh, c, routed, w, dot);
      }
    }
    if constexpr (kWeighted) finish_dot(p, live, routed, slot, dot);
  }

 private:
  template <bool kFull>
  static __device__ void forward_chunk(const ActivateParams& p, const T* h, T* a, int c) {
    F gate[kChunk], up[kChunk] = {};
    load_h<kFull>(h, c, p.width, gate, up);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) gate[i] = value(gate[i], up[i], p.act);
    store_chunk<kAligned, kFull>(a + c, gate, p.width - c);
  }

  template <bool kFull>
  static __device__ void backward_chunk(const ActivateParams& p, const T* h, const T* da, T* a, T* dh, int c, bool routed, F w,
                                        F& dot) {
    F gate[kChunk] = {}, up[kChunk] = {}, grad[kChunk] = {}, out[kChunk] = {};
    if (routed) {  // what a row without an expert holds counts for nothing, NaN included
      load_h<kFull>(h, c, p.width, gate, up);
      load_chunk<kAligned, kFull>(grad, da + c, p.width - c);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        F dgate, dup;
        const F y = value(gate[i], up[i], p.act, dgate, dup), weighted = kWeighted ? w * grad[i] : grad[i];
        if (kWeighted) dot += grad[i] * y;
        out[i] = kWeighted ? w * y : y;
        gate[i] = weighted * dgate;
        if (kGated) up[i] = weighted * dup;
      }
    }
    store_chunk<kAligned, kFull>(a + c, out, p.width - c);
    store_h<kFull>(dh, c, p.width, gate, up);
  }

  static constexpr int kStep = 32 * kChunk * kWarpsPerRow;

  static __device__ long long first_row() {
    return static_cast<long long>(blockIdx.x) * kRowsPerBlock + threadIdx.x / (32 * kWarpsPerRow);
  }
  static __device__ int first_column() { return (threadIdx.x % (32 * kWarpsPerRow)) * kChunk; }

  static __device__ F value(F gate, F up, const ActParams& p) {
    F unused;
    if constexpr (kGated) return glu<kAct, kFast>(gate, up, p);
    else return activate<kAct, false, kFast>(gate, unused);
  }
  // and its derivatives
  static __device__ F value(F gate, F up, const ActParams& p, F& dgate, F& dup) {
    if constexpr (kGated) return glu_slopes<kAct, kFast>(gate, up, p, dgate, dup);
    else return activate<kAct, true, kFast>(gate, dgate);
  }

  template <bool kFull>
  static __device__ void load_h(const T* h, int c, int width, F (&gate)[kChunk], F (&up)[kChunk]) {
    if constexpr (kGlu == Glu::interleaved) {
      F low[kChunk], high[kChunk];
      load_chunk<kAligned, kFull>(low, h + 2 * c, 2 * (width - c));
      load_chunk<kAligned, kFull>(high, h + 2 * c + kChunk, 2 * (width - c) - kChunk);
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) {
        gate[i] = low[2 * i], up[i] = low[2 * i + 1];
        gate[i + kChunk / 2] = high[2 * i], up[i + kChunk / 2] = high[2 * i + 1];
      }
    } else {
      load_chunk<kAligned, kFull>(gate, h + c, width - c);
      if constexpr (kGated) load_chunk<kAligned, kFull>(up, h + width + c, width - c);
    }
  }

  template <bool kFull>
  static __device__ void store_h(T* h, int c, int width, const F (&gate)[kChunk], const F (&up)[kChunk]) {
    if constexpr (kGlu == Glu::interleaved) {
      F low[kChunk], high[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) {
        low[2 * i] = gate[i], low[2 * i + 1] = up[i];
        high[2 * i] = gate[i + kChunk / 2], high[2 * i + 1] = up[i + kChunk / 2];
      }
      store_chunk<kAligned, kFull>(h + 2 * c, low, 2 * (width - c));
      store_chunk<kAligned, kFull>(h + 2 * c + kChunk, high, 2 * (width - c) - kChunk);
    } else {
      store_chunk<kAligned, kFull>(h + c, gate, width - c);
      if constexpr (kGated) store_chunk<kAligned, kFull>(h + width + c, up, width - c);
    }
  }

  static __device__ void finish_dot(const ActivateParams& p, bool live, bool routed, int slot, F dot) {
    __shared__ F shared[kWarps];
    const int warp = threadIdx.x / 32;
    dot = warp_sum(dot);
    if constexpr (kWarpsPerRow > 1) {
      if (threadIdx.x % 32 == 0) shared[warp] = dot;
      __syncthreads();
      dot = F(0);
#pragma unroll
      for (int i = 0; i < kWarpsPerRow; ++i) dot += shared[warp / kWarpsPerRow * kWarpsPerRow + i];
    }
    if (live && threadIdx.x % (32 * kWarpsPerRow) == 0)
      static_cast<W*>(p.dweights)[slot] = narrow<W>(static_cast<wide_t<W>>(routed ? dot : F(0)));
  }
};

}  // namespace hexa
