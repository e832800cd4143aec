// Shared memory of the sm_90a grouped kernels, and the barriers that its parts are handed over by.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include <hexa_fx/kernels/config_sm90.cuh>
#include <hexa_fx/ptx/sm90.cuh>

namespace hexa::sm90 {

enum TileKind { kRowTile, kWeightTile, kZeroTile, kEnd };
inline constexpr int kTileSlots = 4;

struct alignas(16) Tile {
  int kind, expert;
  int row0, rows;  // rows of this tile (row tile), of the expert (weight tile)
  int m0, n0;      // first feature of P and Q (weight tile); n0: first column (row tile)
  int k_tiles, n_tile;
  int multicast;  // 1: the cluster's two tiles share B, each CTA copies half of it to both. -1: they are the same tile
  int pad[3];
};
inline constexpr int kTileWords = 9;  // of a tile that say something

inline constexpr int kChunkRows = 16, kChunkBytes = kChunkRows * kLineBytes;  // what a warp stores at a time

template <class C>
struct alignas(1024) Smem {
  static constexpr int ABytes = C::Operand::bytes(C::BM * C::BK), BBytes = C::Operand::bytes(C::BN * C::BK);
  alignas(1024) uint8_t a[C::Stages][ABytes];
  alignas(1024) uint8_t b[C::Stages][BBytes];
  alignas(1024) uint8_t staging[kConsumerWarps][C::StagingBytes];  // epilogue: chunks of a warp
  alignas(16) uint64_t full[C::Stages];
  uint64_t empty[C::Stages];
  uint64_t landed[C::Stages];  // gathered part arrived, not yet fenced
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t fetched[kConsumerWarps][2];  // a warp's chunk of h arrived, or a warpgroup's second product
  Tile tile[kTileSlots];
  // by expert, and by place in the queue; entry E: rows of no expert
  int offs[C::MaxExperts + 1];
  int m_tiles[C::MaxExperts + 2];  // exclusive prefix sum of row tiles. In a cluster of pairs << 11, plus tiles without a partner
  uint16_t expert_at[C::MaxExperts + 1];
};

// The first column of B's half that a row tile multiplies: of the weight, or of up's own one.
template <class C>
CUTE_DEVICE int first_column(const GroupedParams& p, const Tile& t, int half) {
  const bool up_tensor = C::SplitWeight && half == 1;
  return t.n0 * C::WeightColumnScale + (up_tensor ? 0 : half * (C::PairedWeight ? p.N : C::BN / 2));
}

// Where a warp is in a ring of slots.
struct Pipe {
  int index = 0;
  uint32_t phase = 0;
  template <int Slots>
  CUTE_DEVICE void next() {
    if (++index == Slots) {
      index = 0;
      phase ^= 1;
    }
  }
  template <int Slots>
  CUTE_DEVICE void skip(int steps) {
    const int to = index + steps;
    phase ^= (to / Slots) & 1;
    index = to % Slots;
  }
};

using Barrier = cutlass::arch::ClusterBarrier;
using TxBarrier = cutlass::arch::ClusterTransactionBarrier;
using cutlass::arch::NamedBarrier;
inline constexpr uint64_t kEvictNormal = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
inline constexpr uint32_t kTurnBarrier = 0, kStageBarrier = 2, kTailBarrier = 4, kSumBarrier = 6;  // named barriers

// Gives a stage back. One that a cluster shares is free when both CTAs have read it.
template <class C>
CUTE_DEVICE void release(Smem<C>& sm, int stage) {
  if constexpr (C::Cluster == 1) {
    if (lane_id() == 0) Barrier::arrive(&sm.empty[stage]);
  } else {
    if (lane_id() < C::Cluster) Barrier::arrive(&sm.empty[stage], lane_id(), 1);
  }
}

}  // namespace hexa::sm90
