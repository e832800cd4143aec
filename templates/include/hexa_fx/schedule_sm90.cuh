// Which tile comes next: a queue in global memory, so that tiles that share weights start together whatever the tiles before
// them cost. Per expert first its row tiles, then its weight tiles, so that both read the expert's rows from L2.
#pragma once
#include <hexa_fx/grouped_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct Counts {
  int n_tiles;       // row tiles along N
  int w_m, w_n;      // weight tiles of one expert
  CUTE_DEVICE explicit Counts(const GroupedParams& p) {
    n_tiles = C::RowOp ? ceil_div(p.N, C::RowColumns) : 0;
    w_m = C::WeightOp ? ceil_div(p.R, C::BM) : 0;
    w_n = C::WeightOp ? ceil_div(p.C, C::BN) : 0;
  }
  CUTE_DEVICE int before(const int* m_tiles, int e) const { return m_tiles[e] * n_tiles + e * w_m * w_n; }
};

// Every CTA: offsets and the prefix sum of row tiles into shared memory. Called by warp 0.
template <class C>
CUTE_DEVICE void plan(Smem<C>& sm, const GroupedParams& p) {
  const int lane = lane_id();
  int done = 0;
  for (int base = 0; base <= p.experts; base += 32) {
    const int e = base + lane;
    const int from = e <= p.experts ? __ldg(p.offs + e) : 0;
    const int to = e < p.experts ? __ldg(p.offs + e + 1) : p.n;
    int sum = e <= p.experts ? ceil_div(to - from, C::BM) : 0;
    const int own = sum;
    CUTE_UNROLL
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    if (e <= p.experts) {
      sm.offs[e] = from;
      sm.m_tiles[e] = done + sum - own;
    }
    if (e == p.experts) sm.m_tiles[e + 1] = done + sum;
    done += __shfl_sync(~0u, sum, 31);
  }
}

// Tile t of an m x n grid, `group` rows of tiles at a time.
CUTE_DEVICE void raster(int t, int mb, int nb, int group, int& m, int& n) {
  const int size = group * nb, g = t / size, within = t - g * size;
  const int rows = min(group, mb - g * group);
  n = within / rows;
  m = g * group + (within - n * rows);
}

template <class C>
CUTE_DEVICE Tile decode(const Smem<C>& sm, const GroupedParams& p, const Counts<C>& c, int q) {
  Tile t{};
  const int weight_tiles = p.experts * c.w_m * c.w_n;
  if (q >= sm.m_tiles[p.experts + 1] * c.n_tiles + weight_tiles) { t.kind = kEnd; return t; }
  int lo = 0, hi = p.experts + 1;  // group `experts`: rows of no expert
  while (hi - lo > 1) {
    const int mid = (lo + hi) >> 1;
    if (c.before(sm.m_tiles, mid) <= q) lo = mid; else hi = mid;
  }
  q -= c.before(sm.m_tiles, lo);
  t.expert = lo;
  const int first = sm.offs[lo], end = lo < p.experts ? sm.offs[lo + 1] : p.n;
  const int mb = sm.m_tiles[lo + 1] - sm.m_tiles[lo];
  int m, n;
  if (C::RowOp && q < mb * c.n_tiles) {
    raster(q, mb, c.n_tiles, p.group_m, m, n);
    t.kind = lo < p.experts ? kRowTile : kZeroTile;
    t.row0 = first + m * C::BM;
    t.rows = min(C::BM, end - t.row0);
    t.n0 = n * C::RowColumns;
    t.n_tile = n;
    t.k_tiles = lo < p.experts ? C::k_tiles(p.K) : 0;
  } else {
    raster(q - mb * c.n_tiles, c.w_m, c.w_n, p.group_m, m, n);
    t.kind = kWeightTile;
    t.row0 = first;
    t.rows = end - first;
    t.m0 = m * C::BM;
    t.n0 = n * C::BN;
    t.k_tiles = ceil_div(t.rows, C::BK);
  }
  return t;
}

// A reader's view of the ring of tiles.
template <class C>
struct TileReader {
  Pipe at;
  CUTE_DEVICE Tile next(Smem<C>& sm) {
    Barrier::wait(&sm.tile_full[at.index], at.phase);
    const Tile t = sm.tile[at.index];
    __syncwarp();
    if (lane_id() == 0) Barrier::arrive(&sm.tile_empty[at.index]);
    at.template next<kTileSlots>();
    return t;
  }
};

// The one thread that fills it.
template <class C>
struct TileWriter {
  Pipe at;
  CUTE_DEVICE void publish(Smem<C>& sm, const Tile& t) {
    Barrier::wait(&sm.tile_empty[at.index], at.phase ^ 1);
    sm.tile[at.index] = t;
    Barrier::arrive(&sm.tile_full[at.index]);
    at.template next<kTileSlots>();
  }
};

CUTE_DEVICE int fetch_ticket(const GroupedParams& p) { return int(gridDim.x) + atomicAdd(p.queue, 1); }

// The last CTA to see the end leaves the queue as it found it.
CUTE_DEVICE void retire(const GroupedParams& p) {
  if (atomicAdd(p.queue + 1, 1) == int(gridDim.x) - 1) {
    p.queue[0] = 0;
    p.queue[1] = 0;
  }
}

}  // namespace hexa::sm90
