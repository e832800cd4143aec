// What packed weights are made of, beside their scales.
#pragma once
#include <cuda_fp16.h>

namespace hexa {

enum class Element { code4, e4m3, int8 };

// An element of eight bits as a number.
template <Element kElement>
__device__ float number_of(unsigned byte) {
  if constexpr (kElement == Element::int8) return static_cast<float>(static_cast<int>(byte << 24) >> 24);
  if ((byte & 127) == 127) return __uint_as_float(0x7fffffffu);
  // Exponents of half are eight larger, and its subnormal numbers, too, are multiplied exactly.
  const unsigned short bits = static_cast<unsigned short>((byte & 127) << 7 | (byte & 128) << 8);
  return __half2float(reinterpret_cast<const __half&>(bits)) * 256.f;
}

}  // namespace hexa
