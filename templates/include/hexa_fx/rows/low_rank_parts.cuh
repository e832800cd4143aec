// What blocks leave of experts whose rows they share, added up in the order of the blocks; zeros for experts without rows.
#pragma once
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/scheduler/runs.cuh>
#include <hexa_fx/types/low_rank.cuh>

namespace hexa {

template <class T, bool kRankMajor>
struct LowRankParts {
  static constexpr int kThreads = 256;

  // grid (eights of an expert's numbers, by threads; experts). Threads beside each other have columns beside each other if the rank is
  // the result's major dimension, else what lies beside each other.
  static __device__ void run(const LowRankParams& p) {
    const int expert = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x, size = p.N * p.R;
    int first, tiles;
    count(p, first, tiles);
    const int end = first + run_tiles(p.offs, expert);
    if (i * kChunk >= size) return;
    const int column = kRankMajor ? i % p.N : i / (p.R / kChunk), rank = (kRankMajor ? i / p.N : i % (p.R / kChunk)) * kChunk;
    float sum[kChunk] = {};
    if (first < end) {
      const int from = block_of_tile(first, tiles, p.blocks), to = block_of_tile(end - 1, tiles, p.blocks);
      if (from == to) return;
      for (int block = from; block <= to; ++block) {
        const int begin = run_begin(block, tiles, p.blocks);
        if (begin == run_begin(block + 1, tiles, p.blocks)) continue;
        float part[kChunk];
        load_chunk<true, true>(part, p.parts + static_cast<long long>(2 * block + (begin < first)) * size + column * p.R + rank);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) sum[j] += part[j];
      }
    }
    T* out = static_cast<T*>(p.dc) + static_cast<long long>(expert) * size;
    if constexpr (kRankMajor) {
#pragma unroll
      for (int j = 0; j < kChunk; ++j) out[static_cast<long long>(rank + j) * p.N + column] = narrow<T>(sum[j]);
    } else {
      store_chunk<true, true>(out + static_cast<long long>(column) * p.R + rank, sum);
    }
  }

  // Tiles before this block's expert, and of all.
  static __device__ void count(const LowRankParams& p, int& before, int& all) {
    __shared__ int sums[2];
    if (threadIdx.x < 2) sums[threadIdx.x] = 0;
    __syncthreads();
    int own_before = 0, own = 0;
    for (int e = threadIdx.x; e < p.experts; e += kThreads) {
      const int tiles = run_tiles(p.offs, e);
      own += tiles;
      own_before += e < int(blockIdx.y) ? tiles : 0;
    }
    atomicAdd(&sums[0], own_before);
    atomicAdd(&sums[1], own);
    __syncthreads();
    before = sums[0];
    all = sums[1];
  }
};

}  // namespace hexa
