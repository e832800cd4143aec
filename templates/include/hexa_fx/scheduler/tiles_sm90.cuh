// Which tile comes next: a queue in global memory, so that tiles that share weights start together whatever the tiles before
// them cost. Per expert first its row tiles, then its weight tiles, so that both read the expert's rows from L2. Where a weight
// tile is a good part of a block's work, for experts are few and have many rows, all weight tiles come first instead: row
// tiles are short and fill up what is left of the blocks' time.
#pragma once
#include <hexa_fx/kernels/smem_sm90.cuh>

namespace hexa::sm90 {

// Row tiles are counted in units that one cluster takes at a time: two tiles one above the other, or, in an odd last row of tiles,
// two side by side. Without clusters a unit is a tile. Of swapped tiles those side by side share what is larger, the rows.
template <class C>
struct Counts {
  int n_tiles, n_pairs;  // row tiles along N; units of an odd row
  int w_m, w_n, weight;  // weight tiles of one expert, and units of them
  int ahead, beside;     // weight tiles in front of all row tiles; behind those of each expert
  CUTE_DEVICE explicit Counts(const GroupedParams& p) {
    n_tiles = C::RowOp ? ceil_div(p.N, C::RowColumns) : 0;
    n_pairs = ceil_div(n_tiles, C::Cluster);
    w_m = C::WeightOp ? ceil_div(p.R, C::BM) : 0;
    w_n = C::WeightOp ? ceil_div(p.C, C::BN) : 0;
    weight = units(w_m, w_n);
    const bool first = C::RowOp && C::WeightOp && long_weight_tiles(p);
    ahead = first ? weight * p.experts : 0;
    beside = first ? 0 : weight;
  }
  // Whether the steps of a weight tile are 4 % of those of a block; 25 % where tiles are narrow, which only stream rows: what comes
  // first is then read from memory twice.
  CUTE_DEVICE bool long_weight_tiles(const GroupedParams& p) const {
    const float steps = float(p.n) / float(max(p.experts, 1) * C::BK);
    const float all = float(w_m) * w_n * p.experts * steps + float(n_tiles) * p.n / C::BM * ceil_div(p.K, C::BK);
    return (C::BN == C::Operand::kLine ? 4.f : 25.f) * steps * gridDim.x > all;
  }
  static CUTE_DEVICE int units(int mb, int nb) {
    if constexpr (C::Swapped) return mb * ceil_div(nb, C::Cluster);
    else return mb / C::Cluster * nb + mb % C::Cluster * ceil_div(nb, C::Cluster);
  }
  CUTE_DEVICE int before(const Smem<C>& sm, int place) const {
    const int tiles = sm.m_tiles[place];
    if constexpr (C::Swapped) return tiles * n_pairs;
    return (C::Cluster == 1 ? tiles * n_tiles : (tiles >> 11) * n_tiles + (tiles & 2047) * n_pairs) + place * beside;
  }
};

// Every CTA tabulates offsets, the order of the experts and the prefix sums of row tiles into shared memory. Called by warp 0. Experts
// with far more rows than the mean come first: the weight tiles of one have as many steps as it has rows, and would run alone
// at the end.
template <class C>
CUTE_DEVICE void tabulate(Smem<C>& sm, const GroupedParams& p) {
  const int lane = lane_id(), mean = p.n / max(p.experts, 1) + 1;
  for (int e = lane; e <= p.experts; e += 32) sm.offs[e] = __ldg(p.offs + e);
  __syncwarp();
  auto own_tiles = [&](int rows) {
    const int tiles = ceil_div(rows, C::BM);
    return C::Cluster == 1 || C::Swapped ? tiles : (tiles >> 1 << 11) + (tiles & 1);
  };
  int done = 0, placed = 0;
  for (int size = 2; size >= 0; --size) {
    for (int base = 0; base < p.experts; base += 32) {
      const int e = base + lane;
      const int rows = e < p.experts ? sm.offs[e + 1] - sm.offs[e] : 0;
      const bool mine = e < p.experts && (rows > 4 * mean) + (2 * rows > 3 * mean) == size;
      const uint32_t all = __ballot_sync(~0u, mine);
      if (all == 0) continue;
      const int own = mine ? own_tiles(rows) : 0;
      int sum = own;
      CUTE_UNROLL
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      if (mine) {
        const int place = placed + __popc(all & ((1u << lane) - 1));
        sm.expert_at[place] = uint16_t(e);
        sm.m_tiles[place] = done + sum - own;
      }
      done += __shfl_sync(~0u, sum, 31);
      placed += __popc(all);
    }
  }
  if (lane == 0) {
    sm.expert_at[p.experts] = uint16_t(p.experts);
    sm.m_tiles[p.experts] = done;
    sm.m_tiles[p.experts + 1] = done + own_tiles(max(p.n - sm.offs[p.experts], 0));
  }
}

// Unit t of an mb x nb grid of tiles, `group` rows at a time, for CTA `rank` of the cluster. A unit without a second tile gives
// both CTAs the same one: `multicast` is -1 in the second. Of row tiles both store it, of weight tiles, which may be added, the first.
template <class C>
CUTE_DEVICE void raster(int t, int mb, int nb, int group, int rank, int& m, int& n, int& multicast) {
  const int paired = mb / C::Cluster;
  if (t >= paired * nb) {
    const int column = (t - paired * nb) * C::Cluster + rank;
    m = mb - 1;
    n = min(column, nb - 1);
    multicast = C::Cluster > 1 && column >= nb ? -1 : 0;
    return;
  }
  group = max(group / C::Cluster, 1);
  const int size = group * nb, g = t / size, within = t - g * size;
  const int rows = min(group, paired - g * group);
  n = within / rows;
  m = (g * group + (within - n * rows)) * C::Cluster + rank;
  multicast = C::Cluster > 1;
}

// The same for swapped tiles, of which a cluster takes two side by side.
template <class C>
CUTE_DEVICE void raster_swapped(int t, int mb, int nb, int group, int rank, int& m, int& n) {
  const int units = ceil_div(nb, C::Cluster), size = group * units, g = t / size, within = t - g * size;
  const int rows = min(group, mb - g * group), unit = within / rows;
  m = g * group + (within - unit * rows);
  n = min(unit * C::Cluster + rank, nb - 1);
}

// The last place that begins at q or before. All lanes together, each of which looks at every 32nd.
template <class C>
CUTE_DEVICE int place_of(const Smem<C>& sm, const GroupedParams& p, const Counts<C>& c, int q) {
  int before = 0;
  for (int base = 0; base <= p.experts; base += 32) {
    const int place = base + lane_id();
    before += __popc(__ballot_sync(~0u, place <= p.experts && c.before(sm, min(place, p.experts)) <= q));
  }
  return before - 1;
}

template <class C>
CUTE_DEVICE Tile decode(const Smem<C>& sm, const GroupedParams& p, const Counts<C>& c, int q, int rank) {
  Tile t{};
  int lo = 0;  // the expert's place
  const bool ahead = C::RowOp && C::WeightOp && q < c.ahead;
  if (ahead) {
    lo = q / c.weight;
    q -= lo * c.weight;
  } else {
    q -= c.ahead;
    if (q >= c.before(sm, p.experts + 1) - c.beside) {
      t.kind = kEnd;
      return t;
    }
    if constexpr (C::Cluster > 1) lo = place_of(sm, p, c, q);
    else {
      int hi = p.experts + 1;  // place `experts`: rows of no expert
      while (hi - lo > 1) {
        const int mid = (lo + hi) >> 1;
        if (c.before(sm, mid) <= q) lo = mid;
        else hi = mid;
      }
    }
    q -= c.before(sm, lo);
  }
  const int expert = sm.expert_at[lo];
  t.expert = expert;
  const int first = sm.offs[expert], end = expert < p.experts ? sm.offs[expert + 1] : p.n;
  const int mb = ceil_div(end - first, C::BM), row_units = C::RowOp && !ahead ? Counts<C>::units(mb, c.n_tiles) : 0;
  int m, n;
  if (q < row_units) {
    if constexpr (C::Swapped) raster_swapped<C>(q, mb, c.n_tiles, p.group_m, rank, m, n);
    else raster<C>(q, mb, c.n_tiles, p.group_m, rank, m, n, t.multicast);
    t.kind = expert < p.experts ? kRowTile : kZeroTile;
    const int rows = C::Swapped ? ceil_div(end - first, mb) : C::BM;  // swapped: all of the expert's tiles as narrow
    t.row0 = first + m * rows;
    t.rows = min(rows, end - t.row0);
    t.n0 = n * C::RowColumns;
    t.n_tile = n;
    t.k_tiles = expert < p.experts ? ceil_div(p.K, C::BK) + low_rank_steps<C>(p) : 0;
  } else {
    raster<C>(q - row_units, c.w_m, c.w_n, p.group_m, rank, m, n, t.multicast);
    t.kind = kWeightTile;
    t.row0 = first;
    t.rows = end - first;
    t.m0 = m * C::BM;
    t.n0 = n * C::BN;
    t.k_tiles = ceil_div(t.rows, C::BK);
  }
  return t;
}

}  // namespace hexa::sm90
