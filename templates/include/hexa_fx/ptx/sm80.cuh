// Instructions of sm_80 that C++ has no function for: asynchronous copies, ldmatrix, mma.sync.
//
// Written out instead of through CuTe, whose headers and layout algebra took four fifths of a kernel's build time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace hexa {

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory, the last 16 - bytes of them zero.
__device__ inline void copy_async16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same of what is read once: it leaves L2 first.
__device__ inline void copy_async16_once(unsigned to, const void* from, int bytes) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;\n" ::"r"(to), "l"(from), "r"(bytes), "l"(policy)
               : "memory");
}
// What this thread has copied since the last commit is one group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n"); }
// Waits until at most kPending groups of this thread are under way.
template <int kPending> __device__ inline void wait_for_copies() {
  if constexpr (kPending == 0) asm volatile("cp.async.wait_all;\n");
  else asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

// Four matrices of 8 rows of 16 bytes: lane 8 i + r has the address of row r of matrix i, and gets 4 bytes of row lane / 4.
__device__ inline void load_matrices(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
// The same of the matrices' transposes; 16-bit elements.
__device__ inline void load_matrices_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Rounded to tf32; the bits of a float.
__device__ inline unsigned round_tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

#define HEXA_MMA(shape_and_types)                                                                                       \
  asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// One instruction of the tensor cores on elements of type T: d (16, 8) += a (16, kDepth) b (kDepth, 8). A register holds kPacked
// elements, which `element` takes out.
template <class T> struct TensorCore;
template <> struct TensorCore<__nv_bfloat16> {
  static constexpr int kDepth = 16, kPacked = 2;
  static __device__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    HEXA_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  }
  static __device__ float element(unsigned r, int i) { return __uint_as_float(i ? r & 0xffff0000u : r << 16); }
};
template <> struct TensorCore<__half> {
  static constexpr int kDepth = 16, kPacked = 2;
  static __device__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    HEXA_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  }
  static __device__ float element(unsigned r, int i) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(i ? r >> 16 : r)));
  }
};
template <> struct TensorCore<float> {  // tf32: float bits in shared memory, rounded in registers
  static constexpr int kDepth = 8, kPacked = 1;
  static __device__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    HEXA_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  }
  static __device__ float element(unsigned r, int) { return __uint_as_float(r); }
};

#undef HEXA_MMA

}  // namespace hexa
