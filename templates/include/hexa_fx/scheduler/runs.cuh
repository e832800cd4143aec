// Row tiles dealt out evenly: block b of G takes tiles b T / G up to (b + 1) T / G of all T, in expert order, so that one that sums over an
// expert's rows keeps its sums for many tiles. An expert may lie in the runs of several blocks. What block b has of expert e goes to place
// b + e, which is no other pair's: along the tiles, either goes up.
#pragma once
#include <hexa_fx/ptx/scan.cuh>

namespace hexa {

inline constexpr int kRunRows = 64;  // of a tile

__device__ inline int run_begin(int block, int tiles, int blocks) { return int(static_cast<long long>(block) * tiles / blocks); }

// The block whose run has this tile.
__device__ inline int block_of_tile(int tile, int tiles, int blocks) {
  return int((static_cast<long long>(tile + 1) * blocks + tiles - 1) / tiles) - 1;
}

__device__ inline int run_tiles(const int* offs, int expert) {
  return (__ldg(offs + expert + 1) - __ldg(offs + expert) + kRunRows - 1) / kRunRows;
}

// Offsets of experts, and how many tiles are before each.
template <int MaxExperts>
struct RunTable {
  int offs[MaxExperts + 1], tiles[MaxExperts + 1];

  // Called by one warp.
  __device__ void fill(const int* from, int experts) {
    const int lane = threadIdx.x % 32;
    int done = 0;
    for (int base = 0; base <= experts; base += 32) {
      const int e = base + lane;
      if (e <= experts) offs[e] = __ldg(from + e);
      const int own = e < experts ? run_tiles(from, e) : 0, upto = sum_up_to_lane(own, lane);
      if (e <= experts) tiles[e] = done + upto - own;
      done += __shfl_sync(~0u, upto, 31);
    }
  }
};

// This block's way through its tiles.
template <int MaxExperts>
struct Run {
  const RunTable<MaxExperts>& table;
  int tile, end, expert = 0;
  __device__ Run(const RunTable<MaxExperts>& table, int experts) : table(table) {
    tile = run_begin(blockIdx.x, table.tiles[experts], gridDim.x);
    end = run_begin(blockIdx.x + 1, table.tiles[experts], gridDim.x);
    for (int hi = experts; hi - expert > 1;) {
      const int mid = (expert + hi) >> 1;
      if (table.tiles[mid] <= tile) expert = mid;
      else hi = mid;
    }
  }
  __device__ bool done() const { return tile >= end; }
  __device__ void next() {
    ++tile;
    while (tile < end && table.tiles[expert + 1] <= tile) ++expert;
  }
  __device__ int row0() const { return table.offs[expert] + (tile - table.tiles[expert]) * kRunRows; }
  __device__ int rows() const { return min(kRunRows, table.offs[expert + 1] - row0()); }
};

}  // namespace hexa
