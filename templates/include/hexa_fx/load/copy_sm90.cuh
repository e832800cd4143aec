// The warp that runs the copy engine and the queue: one lane copies tiles of weights and of contiguous rows, and fetches tiles. An
// elected one, for the compiler knows that it is one and writes no loop over lanes for each copy.
#pragma once
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include <hexa_fx/scheduler/ring_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct Copier {
  using Operand = typename C::Operand;
  static constexpr uint32_t kABytes = Smem<C>::ABytes, kBBytes = Smem<C>::BBytes;
  static constexpr int kLine = Operand::kLine, kBlockBytes = C::BK * kLineBytes;  // of a box of features x BK rows
  static constexpr bool kShareRows = C::Swapped && C::Cluster > 1;                // each CTA copies every second box to both
  // Where weight tiles gather, or weights only stream, the next tile is worked out before this one's last steps. Elsewhere that was slower.
  static constexpr bool kEarly = (C::WeightOp && C::GatherWeight && C::Cluster == 1) || (C::Once && C::LowRank == 0);
  static constexpr uint64_t kWeightHint = C::Once ? static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_FIRST) : kEvictNormal;
  static constexpr bool kNarrow = C::BN == kLine;  // features of B are one line, which is all in the first half
  static constexpr int kHalfLines = kNarrow ? 1 : C::BN / 2 / kLine;
  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  int rank;  // in the cluster
  Pipe pipe;

  // Waits for room, announces the bytes to come, `a_bytes` of A among them. In a tile of which nothing is gathered the relay has no
  // part: arrives in its place.
  template <bool Gathered>
  CUTE_DEVICE uint64_t* open(uint32_t a_bytes) {
    Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1);
    uint64_t* bar = &sm.full[pipe.index];
    if constexpr (C::AnyGather && !Gathered && !C::Swapped) Barrier::arrive(bar);
    TxBarrier::arrive_and_expect_tx(bar, kBBytes + a_bytes);
    return bar;
  }

  // A in order, in boxes of rows; those of the tile past `blocks` are not read.
  CUTE_DEVICE void load_rows(uint64_t* bar, const Tile& t, int k, int blocks, Map from) {
    const TmaDescriptor* map = maps + from;
    for (int i = kShareRows ? rank : 0; i < blocks; i += kShareRows ? C::Cluster : 1) {
      uint8_t* dst = sm.a[pipe.index] + i * (C::RowBox * kLineBytes);
      const int row = t.row0 + C::RowBox * i;
      if constexpr (kShareRows) SM90_TMA_LOAD_MULTICAST_2D::copy(map, bar, 3, kEvictNormal, dst, k * C::BK, row);
      else SM90_TMA_LOAD_2D::copy(map, bar, kEvictNormal, dst, k * C::BK, row);
    }
  }

  // Where a tile's weight lies in its maps: by the expert's number, or of listed experts where their matrices do.
  struct Number {
    int own, up;
    CUTE_DEVICE int holding(int&) const { return own; }
  };
  CUTE_DEVICE auto weight_of(const Tile& t) const {
    if constexpr (C::Listed) return Matrices::of<C::SplitWeight>(p, t.expert);
    else return Number{t.expert, t.expert};
  }

  // B in two halves. In a cluster that shares it each CTA copies one half to both.
  template <Map Weight, Map Up, class At>
  CUTE_DEVICE void load_weight(uint64_t* bar, const Tile& t, int k, const At& at) {
    if constexpr (C::Swapped && C::PairedWeight) {  // eight gate and eight up columns by turns
      if constexpr (is_same_v<At, Number>)
        SM90_TMA_LOAD_5D::copy(maps + Weight, bar, kWeightHint, sm.b[pipe.index], k * C::BK, 0, 0, t.n0 / 8, at.own);
      else load_by_turns(maps + Weight, bar, t, k, at);
      return;
    }
    halves(t, [&](int half, bool shared) {
      const bool up_tensor = C::SplitWeight && half == 1;
      const TmaDescriptor* map = maps + (up_tensor ? Up : Weight);
      const int n = first_column<C>(p, t, half);
      int line = C::WeightKN ? k * C::BK : n;
      const int place = up_tensor ? at.up : at.holding(line);
      uint8_t* dst = sm.b[pipe.index] + half * (C::BN / 2) * kLineBytes;
      if constexpr (!C::WeightKN) copy_3d(map, bar, dst, k * C::BK, line, place, shared);
      else {
        if (kNarrow && half) return;
        CUTE_UNROLL
        for (int j = 0; j < kHalfLines; ++j) copy_3d(map, bar, dst + j * kBlockBytes, n + kLine * j, line, place, shared);
      }
    });
  }
  // Gate and up of a listed expert lie at any distance, so that no box of a map holds both.
  CUTE_DEVICE void load_by_turns(const TmaDescriptor* map, uint64_t* bar, const Tile& t, int k, const Matrices& at) {
    CUTE_UNROLL
    for (int i = 0; i < C::BN / 8; ++i) {
      int line = t.n0 + i / 2 * 8 + i % 2 * p.N;
      const int place = at.holding(line);
      SM90_TMA_LOAD_3D::copy(map, bar, kWeightHint, sm.b[pipe.index] + i * (8 * kLineBytes), k * C::BK, line, place);
    }
  }
  template <class Copy>
  CUTE_DEVICE void halves(const Tile& t, Copy copy) {
    if (C::Cluster > 1 && !C::Swapped && t.multicast > 0) copy(rank, true);
    else {
      copy(0, false);
      copy(1, false);
    }
  }
  CUTE_DEVICE void copy_3d(const TmaDescriptor* map, uint64_t* bar, uint8_t* dst, int x, int y, int z, bool shared) {
    if (C::Cluster > 1 && shared) SM90_TMA_LOAD_MULTICAST_3D::copy(map, bar, 3, kEvictNormal, dst, x, y, z);
    else SM90_TMA_LOAD_3D::copy(map, bar, kWeightHint, dst, x, y, z);
  }

  CUTE_DEVICE void row_tile(const Tile& t, int from, int to) {
    const int blocks = ceil_div(t.rows, C::RowBox), bytes = blocks * (C::RowBox * kLineBytes), added = low_rank_steps<C>(p);
    const auto at = weight_of(t);
    if constexpr (kAddedSteps<C>) {
      for (int k = 0; k < added; ++k) {
        uint64_t* bar = open<C::GatherRows>(bytes);
        load_rows(bar, t, k, blocks, kAddedRowsMap);
        load_weight<kAddedWeightMap, kAddedUpMap>(bar, t, k, Number{t.expert, t.expert});
        pipe.template next<C::Stages>();
      }
    }
    for (int k = from; k < to - added; ++k) {
      uint64_t* bar = open<C::GatherRows>(C::GatherRows ? 0 : bytes);
      if constexpr (!C::GatherRows) load_rows(bar, t, k, blocks, kRowsMap);
      load_weight<kWeightMap, kUpMap>(bar, t, k, at);
      pipe.template next<C::Stages>();
    }
    if (C::Borrow && to == t.k_tiles) {  // a stage of nothing: the epilogue's, once the tile's last steps leave it
      Barrier::wait(&sm.empty[pipe.index], pipe.phase ^ 1);
      for (int i = 0; i < (C::AnyGather ? 2 : 1); ++i) Barrier::arrive(&sm.full[pipe.index]);
      pipe.template next<C::Stages>();
    }
  }

  // Step 0 holds the odd rows, so that only it needs zeros (see clear_tail).
  CUTE_DEVICE void weight_tile(const Tile& t, int from, int to) {
    const int odd = t.rows - (t.k_tiles - 1) * C::BK;
    for (int k = from; k < to; ++k) {
      uint64_t* bar = open<C::GatherWeight>(C::GatherWeight ? 0 : kABytes);
      const int row = t.row0 + (k == 0 ? 0 : odd + (k - 1) * C::BK);
      if constexpr (!C::GatherWeight) {
        CUTE_UNROLL
        for (int j = 0; j < C::BM / kLine; ++j)
          SM90_TMA_LOAD_2D::copy(maps + kPMap, bar, kEvictNormal, sm.a[pipe.index] + j * kBlockBytes, t.m0 + kLine * j, row);
      }
      halves(t, [&](int half, bool shared) {
        if (kNarrow && half) return;
        CUTE_UNROLL
        for (int i = 0; i < kHalfLines; ++i) {
          const int j = half * kHalfLines + i;
          uint8_t* dst = sm.b[pipe.index] + j * kBlockBytes;
          if (C::Cluster > 1 && shared)
            SM90_TMA_LOAD_MULTICAST_2D::copy(maps + kQMap, bar, 3, kEvictNormal, dst, t.n0 + kLine * j, row);
          else SM90_TMA_LOAD_2D::copy(maps + kQMap, bar, kEvictNormal, dst, t.n0 + kLine * j, row);
        }
      });
      pipe.template next<C::Stages>();
    }
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    TileWriter<C> writer;
    const Counts<C> counts(p);
    const bool lead = cute::elect_one_sync(), scheduler = lead && rank == 0;
    writer.publish(sm, p, counts, scheduler, scheduler ? fetch_ticket(p) : 0, rank);
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      int ticket = 0;
      if (scheduler) ticket = fetch_ticket(p);
      // No earlier than that: gathering warps skip tiles of which they gather nothing, and a parity tells one round of the stages from
      // the next, not from the one behind that.
      const int late = kEarly ? max(t.k_tiles - C::Stages + 1, 0) : t.k_tiles;
#pragma unroll 1
      for (int part = 0; part < (kEarly ? 2 : 1); ++part) {
        const int from = part == 0 ? 0 : late, to = part == 0 ? late : t.k_tiles;
        if (lead) {
          if (C::RowOp && t.kind == kRowTile) row_tile(t, from, to);
          if (C::WeightOp && t.kind == kWeightTile) weight_tile(t, from, to);
        }
        if (part == 0) writer.publish(sm, p, counts, scheduler, ticket, rank);
      }
      __syncwarp();
    }
    if (scheduler) retire(p, gridDim.x / C::Cluster);
  }
};

}  // namespace hexa::sm90
