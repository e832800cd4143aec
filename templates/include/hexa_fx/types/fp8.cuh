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
};

}  // namespace hexa
