// Which lane and warp a thread is, and what keeps the compiler from knowing too much or too little of a value.
#pragma once
#include <cute/config.hpp>

namespace hexa::sm90 {

CUTE_DEVICE int lane_id() { return threadIdx.x & 31; }
CUTE_DEVICE int warp_in_group() { return (threadIdx.x >> 5) & 3; }

// The same x, which is the same in every lane: the compiler sees it now. The copy engine's instructions want uniform registers; for
// other operands it writes a loop over lanes, 70 cycles each.
CUTE_DEVICE int uniform(int x) { return int(__reduce_max_sync(~0u, unsigned(x))); }

// Hides where an address came from, so that constant offsets to it stay immediates of the instruction. A load reads its address
// some 80 cycles after it was issued. A gathering warp issues 16 a step: if their addresses take turns in the same registers it
// is slower than the tensor cores. So each has its own, computed ahead, before the warp waits for room: the assembler does not move
// the computation across that.
CUTE_DEVICE uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
CUTE_DEVICE const char* opaque(const char* x) {
  asm volatile("" : "+l"(x));
  return x;
}

CUTE_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace hexa::sm90
