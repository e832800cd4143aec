// Numbers in eight bits: conversion, and the scale of a block. As hexa_fx/formats/fp8_scaling.py has them.
#pragma once
#include <cstdint>

namespace hexa {

inline constexpr int kScaleBlock = 128;  // elements of a row or a column that share a scale
inline constexpr float kLargestE4m3 = 448.f, kScaleFloor = 1e-30f;

// Two neighbours, the first in the low byte. What is too large becomes the largest; NaN stays NaN.
__device__ __forceinline__ uint32_t pack_e4m3(float first, float second) {
  uint16_t two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(second), "f"(first));
  return two;
}
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  return pack_e4m3(a, b) | pack_e4m3(c, d) << 16;
}

// Two numbers, exactly: every one of e4m3 is one of half precision.
__device__ __forceinline__ float2 unpack_e4m3(uint32_t two) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(two)));
  float2 x;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }" : "=f"(x.x), "=f"(x.y) : "r"(halves));
  return x;
}

// The scale of a block, and what its numbers are multiplied by. fmaxf passes NaN by, so `largest` is that of the block's numbers.
struct BlockScale {
  float scale, inverse;
  __device__ __forceinline__ explicit BlockScale(float largest) : scale(fmaxf(largest, kScaleFloor) / kLargestE4m3) {
    inverse = 1.f / scale;
  }
};

}  // namespace hexa
