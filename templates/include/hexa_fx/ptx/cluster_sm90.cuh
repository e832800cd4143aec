// Shared memory of the other CTA of a cluster.
#pragma once
#include <cute/arch/util.hpp>

namespace hexa::sm90 {
using namespace cute;

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

}  // namespace hexa::sm90
