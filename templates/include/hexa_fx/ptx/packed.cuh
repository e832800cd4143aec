// Instructions that products with packed weights use.
#pragma once
#include <hexa_fx/ptx/sm80.cuh>

namespace hexa {

// 4 bytes from global to shared memory, in the thread's group of copies.
__device__ inline void copy_async4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// 16 bytes that are read once, if wanted; r stays as it is else. Volatile, so that loads stay where they were written.
__device__ inline void stream16(uint4& r, const void* from, bool wanted) {
  asm volatile(
      "{ .reg .pred wanted; setp.ne.b32 wanted, %5, 0;\n"
      "@wanted ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
      : "l"(from), "r"(int(wanted)));
}
// One number of kBytes bytes, as stream16; zeros above it.
template <int kBytes>
__device__ void stream_number(unsigned& r, const void* from, bool wanted) {
  if constexpr (kBytes == 4) {
    asm volatile("{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n@wanted ld.global.nc.u32 %0, [%1]; }"
                 : "+r"(r)
                 : "l"(from), "r"(int(wanted)));
  } else if constexpr (kBytes == 2) {
    asm volatile(
        "{ .reg .pred wanted; .reg .u16 h; setp.ne.b32 wanted, %2, 0;\nmov.b16 h, 0;\n@wanted ld.global.nc.u16 h, [%1];\n"
        "@wanted cvt.u32.u16 %0, h; }"
        : "+r"(r)
        : "l"(from), "r"(int(wanted)));
  } else {
    asm volatile("{ .reg .pred wanted; setp.ne.b32 wanted, %2, 0;\n@wanted ld.global.nc.u8 %0, [%1]; }"
                 : "+r"(r)
                 : "l"(from), "r"(int(wanted)));
  }
}

// 256 times byte i of `word`, plus `low`, which is less than 256.
__device__ inline unsigned byte_times_256(unsigned word, int i, unsigned low) { return __byte_perm(word, low, 0x5504 | i << 4); }

// Two elements in a word.
template <class Two, Two (*kTwice)(float)>
struct PairOf {
  static __device__ unsigned both(float x) {
    const Two r = kTwice(x);
    return reinterpret_cast<const unsigned&>(r);
  }
  static __device__ unsigned multiply(unsigned a, unsigned b) {
    const Two r = __hmul2(reinterpret_cast<const Two&>(a), reinterpret_cast<const Two&>(b));
    return reinterpret_cast<const unsigned&>(r);
  }
};
template <class T> struct Pair;
template <> struct Pair<__nv_bfloat16> : PairOf<__nv_bfloat162, __float2bfloat162_rn> {};
template <> struct Pair<__half> : PairOf<__half2, __float2half2_rn> {};

}  // namespace hexa
