// The ring of tiles in shared memory, which one thread of a cluster fills for all warps of it, and the counter behind it.
#pragma once
#include <hexa_fx/ptx/sm90.cuh>
#include <hexa_fx/scheduler/tiles_sm90.cuh>

namespace hexa::sm90 {

// A reader's view of the ring. One lane reads for its warp, and it is the one that says so: an arrival speaks for its own thread's
// accesses.
template <class C>
struct TileReader {
  Pipe at;
  CUTE_DEVICE Tile next(Smem<C>& sm) {
    Tile t{};
    if (lane_id() == 0) {
      uint64_t* full = &sm.tile_full[at.index];
      if constexpr (C::Cluster == 1) Barrier::wait(full, at.phase);
      else wait_for_cluster(full, at.phase);
      t = sm.tile[at.index];
      if constexpr (C::Cluster == 1) Barrier::arrive(&sm.tile_empty[at.index]);
      else Barrier::arrive(&sm.tile_empty[at.index], 0, 1);  // CTA 0 writes for both
    }
    at.template next<kTileSlots>();
    int* word = reinterpret_cast<int*>(&t);
    CUTE_UNROLL
    for (int i = 0; i < kTileWords; ++i) word[i] = __shfl_sync(~0u, word[i], 0);
    return t;
  }
};

// The one thread that fills it, or of a cluster the one warp, for every CTA.
template <class C>
struct TileWriter {
  Pipe at;
  // `scheduler`: the lane that has the ticket, of the CTA with this `rank`. All lanes of CTA 0's copying warp come here.
  CUTE_DEVICE void publish(Smem<C>& sm, const GroupedParams& p, const Counts<C>& c, bool scheduler, int ticket, int rank) {
    if constexpr (C::Cluster == 1) {
      if (!scheduler) return;
      const Tile t = decode(sm, p, c, ticket, 0);
      Barrier::wait(&sm.tile_empty[at.index], at.phase ^ 1);
      sm.tile[at.index] = t;
      Barrier::arrive(&sm.tile_full[at.index]);
    } else {
      if (rank != 0) return;
      const Tile t = decode(sm, p, c, __reduce_max_sync(~0u, ticket), lane_id() % C::Cluster);
      Barrier::wait(&sm.tile_empty[at.index], at.phase ^ 1);
      if (lane_id() < C::Cluster) write(sm, t, lane_id());
      __syncwarp();
    }
    at.template next<kTileSlots>();
  }

 private:
  CUTE_DEVICE void write(Smem<C>& sm, const Tile& t, int rank) const {
    const uint32_t to = in_cta(&sm.tile[at.index], rank);
    const int4* from = reinterpret_cast<const int4*>(&t);
    CUTE_UNROLL
    for (int i = 0; i < int(sizeof(Tile) / 16); ++i) store_in_cta(to + 16 * i, from[i]);
    arrive_in_cta(in_cta(&sm.tile_full[at.index], rank));
  }
};

CUTE_DEVICE int fetch_ticket(const GroupedParams& p) { return atomicAdd(p.queue, 1); }

// The last one to see the end leaves the queue as it found it.
CUTE_DEVICE void retire(const GroupedParams& p, int clusters) {
  if (atomicAdd(p.queue + 1, 1) == clusters - 1) {
    p.queue[0] = 0;
    p.queue[1] = 0;
  }
}

}  // namespace hexa::sm90
