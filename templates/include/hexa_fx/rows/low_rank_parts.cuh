// What low_rank_gradients leaves: sums of experts whose rows several blocks had, in the order of the blocks, zeros of experts without rows, and
// of rows without an expert.
#pragma once
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/scheduler/runs.cuh>
#include <hexa_fx/types/low_rank.cuh>

namespace hexa {

template <class T>
struct LowRankParts {
  static constexpr int kThreads = 256;

  // grid (parts of an expert's numbers, experts + 1): the last ones clear rows of du
  static __device__ void run(const LowRankGradientsParams& p) {
    __shared__ int sums[2];
    const int expert = blockIdx.y, at = (blockIdx.x * kThreads + threadIdx.x) * kChunk, size = p.N * p.R;
    if (expert == p.experts) return clear(p);
    if (threadIdx.x < 2) sums[threadIdx.x] = 0;
    __syncthreads();
    int before = 0, all = 0;
    for (int e = threadIdx.x; e < p.experts; e += kThreads) {
      const int own = row_tiles(p.offs, e);
      all += own;
      before += e < expert ? own : 0;
    }
    atomicAdd(&sums[0], before);
    atomicAdd(&sums[1], all);
    __syncthreads();
    const int first = sums[0], tiles = sums[1], end = first + row_tiles(p.offs, expert);
    if (at >= size) return;
    float sum[kChunk] = {};
    if (first < end) {
      const int from = block_of_tile(first, tiles, p.blocks), to = block_of_tile(end - 1, tiles, p.blocks);
      if (from == to) return;
      for (int block = from; block <= to; ++block) {
        const int begin = run_begin(block, tiles, p.blocks);
        if (begin == run_begin(block + 1, tiles, p.blocks)) continue;
        float part[kChunk];
        load_chunk<true, true>(part, p.parts + static_cast<long long>(2 * block + (begin < first)) * size + at);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) sum[i] += part[i];
      }
    }
    store_chunk<true, true>(static_cast<T*>(p.dc) + static_cast<long long>(expert) * size + at, sum);
  }

  static __device__ void clear(const LowRankGradientsParams& p) {
    const long long end = static_cast<long long>(p.n) * p.R;
    for (long long i = static_cast<long long>(__ldg(p.offs + p.experts)) * p.R + blockIdx.x * kThreads + threadIdx.x; i < end;
         i += static_cast<long long>(gridDim.x) * kThreads)
      static_cast<T*>(p.du)[i] = narrow<T>(0.f);
  }
};

}  // namespace hexa
