// The rows of every token weighted and summed, where a block gives the same columns of all slots: they wait in shared memory, rounded as
// rows in global memory are. out[t] = sum over s of w[t, s] * y[t * k + s], in the order of slots; those without an expert count nothing.
#pragma once
#include <hexa_fx/types/decode.cuh>
#include <hexa_fx/types/element.cuh>

namespace hexa {

template <class C, bool kSummed = C::kSummed>
struct DecodeSum {
  using T = typename C::T;
  static constexpr int kBytes = 0;
  __device__ DecodeSum(const DecodeParams&, unsigned char*) {}
  __device__ void prepare() const {}
  __device__ T* of(int, int) const { return nullptr; }
  __device__ void store() const {}
};

template <class C>
struct DecodeSum<C, true> {
  using T = typename C::T;
  static constexpr int kColumns = C::kColumns, kPairs = kColumns / 2;
  static constexpr int kBytes = C::kSlots * int(sizeof(float) + kColumns * sizeof(T));
  const DecodeParams& p;
  float* weights;  // 0 for slots without an expert, whose rows are zeros
  T* rows;

  __device__ DecodeSum(const DecodeParams& p_, unsigned char* shared)
      : p(p_), weights(reinterpret_cast<float*>(shared)), rows(reinterpret_cast<T*>(weights + C::kSlots)) {}

  __device__ T* of(int slot, int column) const { return rows + slot * kColumns + column; }

  // Weights of slots without an expert may be anything, NaN included.
  __device__ void prepare() const {
#pragma unroll 1
    for (int slot = threadIdx.x; slot < p.slots; slot += C::kThreads) {
      const long long id = static_cast<long long>(static_cast<const typename C::Id*>(p.ids)[slot]);
      const bool there = id >= 0 && id < p.experts;
      weights[slot] = there ? weight(slot) : 0.f;
      if (there) continue;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) reinterpret_cast<unsigned*>(of(slot, 0))[i] = 0;
    }
  }

  // Two columns a thread.
  __device__ void store() const {
    __syncthreads();
    const int first = blockIdx.x * p.columns, tokens = p.slots / p.together;
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * kPairs; i += C::kThreads) {
      const int token = i / kPairs, at = i % kPairs * 2;
      if (at >= p.columns || first + at >= p.n) continue;
      float sum[2] = {};
#pragma unroll 4
      for (int slot = token * p.together; slot < (token + 1) * p.together; ++slot)
#pragma unroll
        for (int j = 0; j < 2; ++j) sum[j] += weights[slot] * widen(of(slot, at)[j]);
      alignas(4) T pair[2] = {narrow<T>(sum[0]), narrow<T>(sum[1])};
      *reinterpret_cast<unsigned*>(static_cast<T*>(p.d) + static_cast<long long>(token) * p.n + first + at) =
          reinterpret_cast<const unsigned&>(pair);
    }
  }

 private:
  __device__ float weight(int slot) const {
    return p.weights == nullptr ? 1.f : static_cast<float>(widen(static_cast<const typename C::W*>(p.weights)[slot]));
  }
};

}  // namespace hexa
