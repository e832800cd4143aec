// Stands for templates/include/hexa_fx/ptx/fp8.cuh.
#pragma once
#include <cmath>

#include <hexa_fx/ptx/sm80.cuh>

namespace hexa {

inline uint32_t one_e4m3(float x) {
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return sign | 0x7f;
  const float size = std::min(std::fabs(x), 448.f);
  int exponent;
  std::frexp(size, &exponent);                          // size < 2^exponent
  const int step = std::max(exponent - 1, -6) - 3;      // of the last bit
  const float units = std::nearbyint(std::ldexp(size, -step));  // to even
  const float rounded = std::ldexp(units, step);
  if (rounded == 0) return sign;
  std::frexp(rounded, &exponent);
  if (exponent - 1 < -6) return sign | uint32_t(std::ldexp(rounded, 9));
  return sign | uint32_t(exponent - 1 + 7) << 3 | (uint32_t(std::ldexp(rounded, 4 - exponent)) & 7);
}
inline float read_e4m3(uint32_t byte) {
  const int exponent = byte >> 3 & 15, low = byte & 7;
  if ((byte & 0x7f) == 0x7f) return NAN;
  const float size = exponent ? std::ldexp(8.f + low, exponent - 10) : std::ldexp(float(low), -9);
  return byte & 0x80 ? -size : size;
}
inline uint32_t pack_e4m3(float first, float second) { return one_e4m3(first) | one_e4m3(second) << 8; }
inline uint32_t pack_e4m3(float a, float b, float c, float d) { return pack_e4m3(a, b) | pack_e4m3(c, d) << 16; }
inline float2 unpack_e4m3(uint32_t two) { return {read_e4m3(two & 255), read_e4m3(two >> 8 & 255)}; }
inline uint32_t halves_of_e4m3(uint32_t two) { return pair_of<__half>(read_e4m3(two & 255), read_e4m3(two >> 8 & 255)); }
inline uint32_t multiply_halves(uint32_t halves, uint32_t by) {
  return pair_of<__half>(half_of<__half>(halves, 0) * half_of<__half>(by, 0), half_of<__half>(halves, 1) * half_of<__half>(by, 1));
}
inline uint32_t e4m3_of_halves(uint32_t halves) { return pack_e4m3(half_of<__half>(halves, 0), half_of<__half>(halves, 1)); }
inline uint32_t pack_bf16(float first, float second) {
  return __float2bfloat16_rn(first).bits | uint32_t(__float2bfloat16_rn(second).bits) << 16;
}

template <class T> uint32_t larger_magnitudes(uint32_t most, uint32_t two) {
  const float low = std::fmax(half_of<T>(most, 0), std::fabs(half_of<T>(two, 0)));
  return pair_of<T>(low, std::fmax(half_of<T>(most, 1), std::fabs(half_of<T>(two, 1))));
}

}  // namespace hexa
