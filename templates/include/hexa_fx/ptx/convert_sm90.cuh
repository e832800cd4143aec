// Pairs of 16-bit elements and floats.
#pragma once
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/config.hpp>

namespace hexa::sm90 {

template <class T>
CUTE_DEVICE uint32_t pack(float lo, float hi) {
  uint32_t r;
  if constexpr (cute::is_same_v<T, cutlass::bfloat16_t>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

template <class T>
CUTE_DEVICE float low(uint32_t two) {
  if constexpr (cute::is_same_v<T, cutlass::bfloat16_t>) return __uint_as_float(two << 16);
  else return __half22float2(*reinterpret_cast<const __half2*>(&two)).x;
}
template <class T>
CUTE_DEVICE float high(uint32_t two) {
  if constexpr (cute::is_same_v<T, cutlass::bfloat16_t>) return __uint_as_float(two & 0xffff0000u);
  else return __half22float2(*reinterpret_cast<const __half2*>(&two)).y;
}
template <class T>
CUTE_DEVICE float2 unpack(uint32_t two) {
  return {low<T>(two), high<T>(two)};
}

}  // namespace hexa::sm90
