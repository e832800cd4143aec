// Launches that begin while the one before still runs (sm_90 and newer; nothing on older devices, and where a launch was not asked to).
#pragma once
#include <hexa_fx/ptx/sm80.cuh>

namespace hexa {

// The next launch may begin, once all blocks have come here or are done.
__device__ inline void release_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the launch before is done and what it wrote can be read. Every block of a launch that may begin early has to wait, or the launch
// behind it could begin before the one ahead of it is done.
__device__ inline void wait_for_last_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// 16 bytes that the launch before wrote, if wanted, else zeros. Not of the read-only kind: they were written while this launch was under way.
__device__ inline uint4 load_written16(const void* from, bool wanted) {
  uint4 r;
  asm volatile(
      "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@wanted ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
      : "l"(from), "r"(int(wanted))
      : "memory");
  return r;
}

}  // namespace hexa
