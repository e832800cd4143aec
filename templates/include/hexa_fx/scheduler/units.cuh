// Work for blocks that stay: the rows of every expert in parts of at most kRows, times the tiles of a weight's lines. Every block
// takes units that follow one another, about as many as any other, so that most of its units have the same rows.
#pragma once
#include <hexa_fx/ptx/packed.cuh>
#include <hexa_fx/ptx/scan.cuh>

namespace hexa {

struct Work {
  int expert, begin, end;  // rows begin .. end, all of one expert
  int tile;
};

// kMost: experts that the tables have room for.
template <int kRows, int kMost, int kThreads>
struct Units {
  static constexpr int kBytes = (2 * (kMost + 1) * int(sizeof(int)) + 15) / 16 * 16;
  int* offs;
  int* first;  // units of the experts before
  int experts, tiles;
  int begin, end;  // units of this block

  // All threads together, then deal(). `shared` has kBytes. The offsets are under way meanwhile.
  __device__ Units(int* shared, const int* offsets, int experts_, int tiles_)
      : offs(shared), first(shared + kMost + 1), experts(experts_), tiles(tiles_) {
    for (int e = threadIdx.x; e <= experts; e += kThreads) copy_async4(offs + e, offsets + e);
    commit_copies();
  }
  __device__ void deal() {
    wait_for_copies<0>();
    __syncthreads();
    if (threadIdx.x < 32) count(threadIdx.x);
    __syncthreads();
    const long long all = first[experts];
    begin = int(all * blockIdx.x / gridDim.x), end = int(all * (blockIdx.x + 1) / gridDim.x);
  }

  __device__ Work at(int unit) const {
    int low = 0, high = experts;  // first[low] <= unit < first[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= unit) low = middle;
      else high = middle;
    }
    const int own = unit - first[low], part = own / tiles, row = offs[low] + part * kRows;
    return {low, row, min(row + kRows, offs[low + 1]), own - part * tiles};
  }
  // The one behind `work`, which is number `unit`.
  __device__ Work behind(const Work& work, int unit) const {
    if (work.tile + 1 < tiles) return {work.expert, work.begin, work.end, work.tile + 1};
    return at(unit);
  }

 private:
  __device__ void count(int lane) {
    int before = 0;
    for (int e0 = 0; e0 < experts; e0 += 32) {
      const int e = e0 + lane, own = e < experts ? (offs[e + 1] - offs[e] + kRows - 1) / kRows * tiles : 0;
      const int upto = sum_up_to_lane(own, lane);
      if (e < experts) first[e] = before + upto - own;
      before += __shfl_sync(0xffffffffu, upto, 31);
    }
    if (lane == 0) first[experts] = before;
  }
};

}  // namespace hexa
