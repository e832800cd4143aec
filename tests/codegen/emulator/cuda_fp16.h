// float16 on the host.
#pragma once
#include "emulator.hpp"

struct __half {
  uint16_t bits;
};
inline float __half2float(__half x) {
  _Float16 h;
  std::memcpy(&h, &x, 2);
  return float(h);
}
inline __half __float2half_rn(float x) {
  const _Float16 h = _Float16(x);
  __half found;
  std::memcpy(&found, &h, 2);
  return found;
}
