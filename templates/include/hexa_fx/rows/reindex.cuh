// hexa::reindex: a stable counting sort of routed slots by expert (paper, Algorithm 1). Static grid, nothing read back.
//
//   ids  (n,)    expert of every slot; below 0, or E and more, is a sentinel that sorts last
//   v    (n,)    slot of every row            inv (n,)  row of every slot            offs (E+1,)  first row of every expert
//
// Slots are dealt to blocks, and within a block to warps, in contiguous chunks: chunk order is slot order, which makes the
// sort stable. `count` writes counts (blocks, E+1); `place` sums them and writes the rows. One block does both at once.
#pragma once
#include <hexa_fx/ptx/scan.cuh>

namespace hexa {

struct ReindexParams {
  const void* ids;
  int* counts;  // (blocks, E+1), unused by one block
  int* v;
  int* inv;
  int* offs;
  int n;
  int experts;
  int chunk;  // slots a warp
  int pad;
};

template <class Id, int kWarps>
struct Reindex {
  static constexpr int kThreads = 32 * kWarps;

  static __device__ int bin(const ReindexParams& p, int slot) {
    const long long id = static_cast<long long>(static_cast<const Id*>(p.ids)[slot]);
    return id < 0 || id >= p.experts ? p.experts : static_cast<int>(id);
  }

  // tally[w][b]: slots of bin b in warp w's chunk
  static __device__ void tally_chunks(const ReindexParams& p, int* tally) {
    const int bins = p.experts + 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < kWarps * bins; i += kThreads) tally[i] = 0;
    __syncthreads();
    const long long first = (static_cast<long long>(blockIdx.x) * kWarps + warp) * p.chunk;
    const int begin = first < p.n ? static_cast<int>(first) : p.n, end = min(p.n - begin, p.chunk) + begin;
    for (int slot = begin + lane; slot < end; slot += 32) atomicAdd(&tally[warp * bins + bin(p, slot)], 1);
    __syncthreads();
  }

  static __device__ void count(const ReindexParams& p, int* tally) {
    const int bins = p.experts + 1;
    tally_chunks(p, tally);
    for (int b = threadIdx.x; b < bins; b += kThreads) {
      int sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += tally[w * bins + b];
      p.counts[blockIdx.x * bins + b] = sum;
    }
  }

  // first[b]: row of the first slot of bin b in this block's chunk. total is scratch of the same size.
  static __device__ void block_bases(const ReindexParams& p, const int* tally, int* first, int* total, int blocks) {
    const int bins = p.experts + 1, lane = threadIdx.x % 32;
    for (int b = threadIdx.x; b < bins; b += kThreads) {
      int before = 0, sum = 0;
      if (blocks == 1) {
        for (int w = 0; w < kWarps; ++w) sum += tally[w * bins + b];
      } else {
#pragma unroll 8
        for (int i = 0; i < blocks; ++i) {
          const int c = __ldg(&p.counts[i * bins + b]);
          before += i < static_cast<int>(blockIdx.x) ? c : 0;
          sum += c;
        }
      }
      first[b] = before;
      total[b] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // exclusive scan of total by one warp
      int carry = 0;
      for (int b0 = 0; b0 < bins; b0 += 32) {
        const int b = b0 + lane;
        const int own = b < bins ? total[b] : 0, inclusive = sum_up_to_lane(own, lane);
        if (b < bins) {
          const int start = carry + inclusive - own;
          first[b] += start;
          if (blockIdx.x == 0) p.offs[b] = start;  // bin E starts at the number of routed rows
        }
        carry += __shfl_sync(0xffffffffu, inclusive, 31);
      }
    }
    __syncthreads();
  }

  static __device__ void place(const ReindexParams& p, int* shared, int blocks) {
    const int bins = p.experts + 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int* tally = shared;
    int* first = tally + kWarps * bins;
    tally_chunks(p, tally);
    block_bases(p, tally, first, first + bins, blocks);
    for (int b = threadIdx.x; b < bins; b += kThreads) {  // counts of warps become their first rows
      int row = first[b];
      for (int w = 0; w < kWarps; ++w) {
        const int c = tally[w * bins + b];
        tally[w * bins + b] = row;
        row += c;
      }
    }
    __syncthreads();
    const long long start = (static_cast<long long>(blockIdx.x) * kWarps + warp) * p.chunk;
    const int begin = start < p.n ? static_cast<int>(start) : p.n, end = min(p.n - begin, p.chunk) + begin;
    int* next = tally + warp * bins;
    for (int s0 = begin; s0 < end; s0 += 32) {
      const int slot = s0 + lane;
      const bool live = slot < end;
      const int b = live ? bin(p, slot) : -1;
      const unsigned same = __match_any_sync(0xffffffffu, b);
      const int rank = __popc(same & ((1u << lane) - 1u));
      int row = live ? next[b] + rank : 0;
      __syncwarp();
      if (live && rank == 0) next[b] += __popc(same);
      __syncwarp();
      if (live) {
        p.v[row] = slot;
        p.inv[slot] = row;
      }
    }
  }
};

}  // namespace hexa
