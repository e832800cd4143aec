// 16 bytes that are read once.
#pragma once

namespace hexa {

// Zeros if not wanted. Volatile: the compiler would otherwise move loads down to their uses, to save registers, and leave two or three in
// flight.
__device__ __forceinline__ uint4 fetch16(const uint4* from, bool wanted) {
  uint4 r;
  asm volatile(
      "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
      : "l"(from), "r"(int(wanted)));
  return r;
}

}  // namespace hexa
