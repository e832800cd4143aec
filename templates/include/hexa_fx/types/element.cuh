// Element types in memory, as CUDA names them, and the type that arithmetic on them is in: float, double for double. A new element type is a
// `Wide`, a `widen` and a `narrow` here.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace hexa {

template <class T> struct Wide {
  using type = float;
};
template <> struct Wide<double> {
  using type = double;
};
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

}  // namespace hexa
