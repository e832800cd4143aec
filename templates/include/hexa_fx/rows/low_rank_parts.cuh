// The sums of experts' rows that blocks leave in parts (kernels/low_rank_sm90.cuh), added up in the order of the blocks, scaled, and stored
// as the factor lies in memory. Zeros for experts without rows. Of N columns, those of the launch that made the parts.
#pragma once
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/ptx/dependent.cuh>
#include <hexa_fx/scheduler/runs.cuh>
#include <hexa_fx/types/low_rank.cuh>

namespace hexa {

enum class FactorOrder { rank_minor, rank_major, experts_last };  // (E, N, R), (E, R, N), (N, R, E)

template <class T, FactorOrder kOrder, int kMaxExperts>
struct LowRankParts {
  static constexpr int kThreads = 256;
  static constexpr int kNumbers = kThreads * kChunk, kSide = 64;  // that a block takes of one expert; of numbers, and of experts
  using Table = RunTable<kMaxExperts>;

  // The blocks that had rows of an expert; none if the last is before the first.
  struct Blocks {
    int first, last;
  };

  static __device__ void run(const LowRankParams& p) {
    static __shared__ Table table;
    if (threadIdx.x < 32) table.fill(p.offs, p.experts);
    __syncthreads();
    wait_for_last_launch();
    if constexpr (kOrder == FactorOrder::experts_last) tile(p, table);
    else eight(p, table);
  }

  static __device__ Blocks blocks_of(const LowRankParams& p, const Table& table, int expert) {
    const int begin = table.tiles[expert], end = table.tiles[expert + 1], tiles = table.tiles[p.experts];
    if (begin == end) return {0, -1};
    return {block_of_tile(begin, tiles, p.blocks), block_of_tile(end - 1, tiles, p.blocks)};
  }

  // Eight numbers of an expert from `at` on.
  static __device__ void sum(float (&out)[kChunk], const LowRankParams& p, Blocks blocks, int tiles, int expert, int at) {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) out[j] = 0.f;
    for (int block = blocks.first; block <= blocks.last; ++block) {
      if (tiles < p.blocks && run_begin(block, tiles, p.blocks) == run_begin(block + 1, tiles, p.blocks)) continue;  // it had none
      const float* from = p.parts + static_cast<long long>(block + expert) * p.columns * p.R + at;
      Raw<float> raw{load_written16(from, true), load_written16(from + 4, true)};
      float part[kChunk];
      unpack<float>(part, raw);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) out[j] += part[j];
    }
#pragma unroll
    for (int j = 0; j < kChunk; ++j) out[j] *= p.scale;
  }

  // grid (eights of an expert's numbers, by threads; experts). Threads side by side store what lies side by side.
  static __device__ void eight(const LowRankParams& p, const Table& table) {
    const int i = blockIdx.x * kThreads + threadIdx.x, ranks = p.R / kChunk;
    if (i >= p.columns * ranks) return;
    const bool major = kOrder == FactorOrder::rank_major;
    const int column = major ? i % p.columns : i / ranks, rank = (major ? i / p.columns : i % ranks) * kChunk;
    float total[kChunk];
    sum(total, p, blocks_of(p, table, blockIdx.y), table.tiles[p.experts], blockIdx.y, column * p.R + rank);
    T* out = static_cast<T*>(p.dc) + static_cast<long long>(blockIdx.y) * p.N * p.R;
    if constexpr (kOrder == FactorOrder::rank_minor) store_chunk<true, true>(out + static_cast<long long>(i) * kChunk, total);
    else {
#pragma unroll
      for (int j = 0; j < kChunk; ++j) out[static_cast<long long>(rank + j) * p.N + column] = narrow<T>(total[j]);
    }
  }

  // grid (64 of an expert's numbers, 64 experts): they change places in shared memory.
  static __device__ void tile(const LowRankParams& p, const Table& table) {
    static __shared__ float turned[kSide][kSide + 1];
    static __shared__ Blocks blocks[kSide];
    const int size = p.columns * p.R, at0 = blockIdx.x * kSide, expert0 = blockIdx.y * kSide;
    if (threadIdx.x < kSide && expert0 + int(threadIdx.x) < p.experts)
      blocks[threadIdx.x] = blocks_of(p, table, expert0 + threadIdx.x);
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kSide * kSide / kChunk; i += kThreads) {
      const int expert = i / (kSide / kChunk), at = i % (kSide / kChunk) * kChunk;
      if (expert0 + expert >= p.experts || at0 + at >= size) continue;
      float total[kChunk];
      sum(total, p, blocks[expert], table.tiles[p.experts], expert0 + expert, at0 + at);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) turned[at + j][expert] = total[j];
    }
    __syncthreads();
    T* out = static_cast<T*>(p.dc) + expert0;
#pragma unroll 4
    for (int i = threadIdx.x; i < kSide * kSide; i += kThreads) {
      const int at = i / kSide, expert = i % kSide;
      if (expert0 + expert < p.experts && at0 + at < size)
        out[static_cast<long long>(at0 + at) * p.experts + expert] = narrow<T>(turned[at][expert]);
    }
  }
};

}  // namespace hexa
