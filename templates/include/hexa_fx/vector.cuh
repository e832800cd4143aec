// Chunks of eight elements: what one thread moves at a time. Arithmetic is in float, in double for double.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace hexa {

constexpr int kChunk = 8;

template <class T> struct Wide { using type = float; };
template <> struct Wide<double> { using type = double; };
template <class T> using wide_t = typename Wide<T>::type;

__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T> __device__ T narrow(wide_t<T> x);
template <> __device__ inline float narrow<float>(float x) { return x; }
template <> __device__ inline double narrow<double>(double x) { return x; }
template <> __device__ inline __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

template <class T> struct alignas(16) Packed { T value[kChunk]; };

template <class T> __device__ bool aligned16(const T* p) { return (reinterpret_cast<unsigned long long>(p) & 15) == 0; }

// out[i] = p[i] for i < count, 0 beyond. kAligned: p is known to be a multiple of 16 bytes.
template <bool kAligned = false, class T>
__device__ void load_chunk(wide_t<T> (&out)[kChunk], const T* p, int count = kChunk) {
  if (count >= kChunk && (kAligned || aligned16(p))) {
    Packed<T> raw;
    const uint4* from = reinterpret_cast<const uint4*>(p);
#pragma unroll
    for (int i = 0; i < int(sizeof(raw) / 16); ++i) reinterpret_cast<uint4*>(&raw)[i] = __ldg(from + i);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out[i] = widen(raw.value[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out[i] = i < count ? widen(p[i]) : wide_t<T>(0);
  }
}

// p[i] = in[i] for i < count
template <bool kAligned = false, class T>
__device__ void store_chunk(T* p, const wide_t<T> (&in)[kChunk], int count = kChunk) {
  if (count >= kChunk && (kAligned || aligned16(p))) {
    Packed<T> raw;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) raw.value[i] = narrow<T>(in[i]);
    uint4* to = reinterpret_cast<uint4*>(p);
#pragma unroll
    for (int i = 0; i < int(sizeof(raw) / 16); ++i) to[i] = reinterpret_cast<const uint4*>(&raw)[i];
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (i < count) p[i] = narrow<T>(in[i]);
  }
}

template <class F>
__device__ F warp_sum(F x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

}  // namespace hexa
