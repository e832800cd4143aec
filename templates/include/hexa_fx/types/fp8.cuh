// The scale of a block of numbers in eight bits, as hexa_fx/formats/fp8_scaling.py has it.
#pragma once
#include <hexa_fx/ptx/math.cuh>

namespace hexa {

inline constexpr int kScaleBlock = 128;  // elements of a row or a column that share a scale
inline constexpr float kLargestE4m3 = 448.f, kScaleFloor = 1e-30f;

// The scale of a block, and what its numbers are multiplied by. fmaxf passes NaN by, so `largest` is that of the block's numbers.
struct BlockScale {
  float scale, inverse;
  __device__ __forceinline__ explicit BlockScale(float largest)
      : scale(fmaxf(largest, kScaleFloor) * (1.f / kLargestE4m3)), inverse(reciprocal_fast(scale)) {}
  static __device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
};

// The same as a power of two: what a block's elements are multiplied by is one too, which moves their exponents alone.
struct BinaryScale {
  float scale, inverse;
  __device__ __forceinline__ explicit BinaryScale(float largest) {
    const unsigned bits = __float_as_uint(fmaxf(largest, kScaleFloor)), infinity = 0x7f800000;
    const unsigned power = ((bits + 0x1fffff) & infinity) - (8 << 23);  // 448 is 1.75 * 2^8
    scale = __uint_as_float(bits < infinity ? power : infinity);
    inverse = bits < infinity ? __uint_as_float((254 << 23) - power) : 0.f;
  }
};

// The scale of a block of numbers as whole numbers of -127 to 127. If one of them is not finite, all are NaN.
struct IntegerScale {
  float scale, inverse;
  __device__ __forceinline__ explicit IntegerScale(float largest)
      : scale(larger(largest, kScaleFloor) * (1.f / 127.f)), inverse(reciprocal_fast(scale)) {}
  static __device__ __forceinline__ float larger(float a, float b) { return max_or_nan(a, b); }
};

}  // namespace hexa
