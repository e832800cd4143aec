// The rows of every expert cut into segments of at most kRows: the tile map, made on the device from offs.
#pragma once
#include <hexa_fx/ptx/scan.cuh>

namespace hexa {

struct Segment {
  int expert;  // -1: there is no such segment
  int begin;   // first row
  int end;     // one past the last row, inside the expert
};

// One of the units that an expert's rows are cut into.
struct Unit {
  int expert;  // -1: there is no such unit
  int begin;   // the expert's rows
  int end;
  int index;  // among the expert's units
};

// Unit `index` where an expert has `scale` units for each kRows of its rows, and `extra` besides. The sum over the experts before
// is done 32 experts at a time by every warp for itself: no shared memory.
template <int kRows>
__device__ Unit find_unit(const int* offs, int experts, int index, int scale, int extra) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int e0 = 0; e0 < experts; e0 += 32) {
    const int e = e0 + lane;
    const int begin = e < experts ? __ldg(offs + e) : 0, end = e < experts ? __ldg(offs + e + 1) : 0;
    const int own = e < experts ? (end - begin + kRows - 1) / kRows * scale + extra : 0, upto = sum_up_to_lane(own, lane);
    const unsigned past = __ballot_sync(0xffffffffu, before + upto > index);
    if (past) {
      const int owner = __ffs(past) - 1;
      const int at = index - (before + __shfl_sync(0xffffffffu, upto - own, owner));
      return {e0 + owner, __shfl_sync(0xffffffffu, begin, owner), __shfl_sync(0xffffffffu, end, owner), at};
    }
    before += __shfl_sync(0xffffffffu, upto, 31);
  }
  return {-1, 0, 0, 0};
}

template <int kRows>
__device__ Segment find_segment(const int* offs, int experts, int index) {
  const Unit u = find_unit<kRows>(offs, experts, index, 1, 0);
  const int row = u.begin + u.index * kRows;
  return {u.expert, row, min(row + kRows, u.end)};
}

// Index of the first segment of `expert`.
template <int kRows>
__device__ int first_segment(const int* offs, int expert) {
  int sum = 0;
  for (int e = threadIdx.x % 32; e < expert; e += 32) sum += (__ldg(offs + e + 1) - __ldg(offs + e) + kRows - 1) / kRows;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  return sum;
}

}  // namespace hexa
