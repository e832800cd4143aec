// Sums over a warp's lanes.
#pragma once

namespace hexa {

// Of the lanes up to each, itself among them. All lanes call it.
template <class T>
__device__ __forceinline__ T sum_up_to_lane(T own, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, own, d);
    if (lane >= d) own += other;
  }
  return own;
}

}  // namespace hexa
