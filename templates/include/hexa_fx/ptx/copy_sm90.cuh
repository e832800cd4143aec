// Loads that CuTe has no instruction for.
#pragma once
#include <cute/config.hpp>

namespace hexa::sm90 {

// 16 bytes into shared memory, of which all behind the first `bytes` are zeros.
CUTE_DEVICE void cp_async_16(uint32_t dst, const char* src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// The same for swapped tiles: only if `wanted`, and with the next step's part of the row into L2. All blocks that work on an expert read
// its rows at about the same time, so one that must wait for the memory holds up all.
CUTE_DEVICE void cp_async_16_if(bool wanted, uint32_t dst, const char* src, int bytes) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\tsetp.ne.b32 wanted, %3, 0;\n\t"
      "@wanted cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;\n\t}" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(int(wanted))
      : "memory");
}

// 4 bytes into shared memory.
CUTE_DEVICE void cp_async_4(uint32_t dst, const float* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

CUTE_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A number that is looked at later, in the place where it is asked for: the compiler does not move it.
CUTE_DEVICE int load_ahead(const int* from) {
  int x;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

}  // namespace hexa::sm90
