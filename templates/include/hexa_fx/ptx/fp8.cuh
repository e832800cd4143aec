// Conversion to and from numbers in eight bits.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace hexa {

// Two neighbours, the first in the low byte. What is too large becomes the largest; NaN stays NaN.
__device__ __forceinline__ unsigned pack_e4m3(float first, float second) {
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
  return two;
}
__device__ __forceinline__ unsigned pack_e4m3(float a, float b, float c, float d) {
  return pack_e4m3(a, b) | pack_e4m3(c, d) << 16;
}

// Two numbers as halves in a word, exactly; their products with two powers of two; and back.
__device__ __forceinline__ unsigned halves_of_e4m3(unsigned two) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(two)));
  return halves;
}
__device__ __forceinline__ unsigned multiply_halves(unsigned halves, unsigned by) {
  unsigned r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(halves), "r"(by));
  return r;
}
__device__ __forceinline__ unsigned e4m3_of_halves(unsigned halves) {
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(two) : "r"(halves));
  return two;
}

// Two numbers, exactly: every one of e4m3 is one of half precision.
__device__ __forceinline__ float2 unpack_e4m3(unsigned two) {
  const unsigned halves = halves_of_e4m3(two);
  float2 x;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }" : "=f"(x.x), "=f"(x.y) : "r"(halves));
  return x;
}

// Two numbers as bf16 in a word.
__device__ __forceinline__ unsigned pack_bf16(float first, float second) {
  unsigned two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
  return two;
}

// Of two words of two numbers of T each, the larger magnitudes; NaN is passed by.
template <class T> __device__ unsigned larger_magnitudes(unsigned most, unsigned two);
template <> __device__ __forceinline__ unsigned larger_magnitudes<__nv_bfloat16>(unsigned most, unsigned two) {
  unsigned r;
  asm("{ .reg .b32 size; abs.bf16x2 size, %2; max.bf16x2 %0, %1, size; }" : "=r"(r) : "r"(most), "r"(two));
  return r;
}
template <> __device__ __forceinline__ unsigned larger_magnitudes<__half>(unsigned most, unsigned two) {
  unsigned r;
  asm("{ .reg .b32 size; abs.f16x2 size, %2; max.f16x2 %0, %1, size; }" : "=r"(r) : "r"(most), "r"(two));
  return r;
}

}  // namespace hexa
