// PTX of sm_90 that CuTe has no instruction for, or keeps in a header of 3 MB: which lane a thread is, conversions, copies, shared memory of
// the other CTA of a cluster, and wgmma.
#pragma once
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace hexa::sm90 {
using namespace cute;

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

CUTE_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A number that is looked at later, in the place where it is asked for: the compiler does not move it.
CUTE_DEVICE int load_ahead(const int* from) {
  int x;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

// Address of a shared variable in CTA `rank` of the cluster.
CUTE_DEVICE uint32_t in_cta(const void* local, int rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(cast_smem_ptr_to_uint(local)), "r"(rank));
  return r;
}

CUTE_DEVICE void store_in_cta(uint32_t to, int4 x) {
  asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// An arrival at a barrier of another CTA, behind everything that this thread has written there.
CUTE_DEVICE void arrive_in_cta(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits at a barrier of this CTA for what another one has written.
CUTE_DEVICE void wait_for_cluster(const uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
      "@done bra stop;\n\t"
      "bra again;\n\t"
      "stop:\n\t}" ::"r"(cast_smem_ptr_to_uint(barrier)),
      "r"(phase)
      : "memory");
}

// Adds A (64 x 16) B (16 x Columns) to d.
template <int Columns>
struct Wgmma;

// Where an operand begins in shared memory, as wgmma is told of it: in units of 16 bytes, so that offsets can be added.
CUTE_DEVICE uint32_t operand_at(uint32_t address) {
  constexpr uint32_t kUnused = 1 << 16;
  return kUnused | address >> 4;
}
CUTE_DEVICE constexpr uint32_t operand_offset(int bytes) { return uint32_t(bytes) >> 4; }

// An operand in shared memory: swizzled lines of 128 bytes, along the contraction or across it, 1024 bytes an eight.
CUTE_DEVICE uint64_t swizzled_operand_at(uint32_t at) {
  constexpr uint32_t kSwizzle = uint32_t(SM90::GMMA::LayoutType::B128) << 30, kStride = 1024 >> 4;
  return uint64_t(kSwizzle | kStride) << 32 | at;  // GmmaDescriptor's fields, without a mask for each
}
CUTE_DEVICE uint64_t swizzled_operand(uint32_t address) { return swizzled_operand_at(operand_at(address)); }

// d = A (64 x 32) B (32 x 128), or d += where `adds`: 64 accumulators a thread. CuTe has it with 64 arguments.
CUTE_DEVICE void wgmma_e4m3(uint64_t a, uint64_t b, float (&d)[64], bool adds) {
  asm volatile(
      "{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, adds, 1, 1;\n\t}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
        "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
        "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]),
        "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
        "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(int(adds)));
}

}  // namespace hexa::sm90
