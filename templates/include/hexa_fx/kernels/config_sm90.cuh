// Types shared by the sm_90a grouped kernels: configuration, arguments, shared memory, barriers.
//
//   row tile     D[p, :] = epilogue(A[row(p), :] @ W[e(p)] + bias[e(p)])            ESMM, p a row in expert order
//   weight tile  dW[e]   = sum over rows p of e of P[row(p), :]^T Q[p, :]            ESTMM, with column sums of Q: ESS
//
// One persistent CTA an SM: warpgroup 0 loads (warps 0 and 1 gather, 2 hands gathered stages over, 3 runs the copy engine and the
// queue), warpgroups 1 and 2 multiply and store. (Four warpgroups do not fit: a 64x256 wgmma needs 154 registers.) Which rows belong to which tile follows
// on the device from `offs`, so grids and sizes are static. `cooperative`: both consumers share a BM x BN tile, 64 rows each;
// `pingpong`: each has its own tile, one's epilogue runs behind the other's main loop. A cluster of two CTAs takes two tiles of
// one expert that share B and copies it once for both: reads from L2, not wgmma, bound these kernels. `swapped`: both consumers
// share a tile of BM rows x 128 columns, 64 columns each, see mma/swapped_sm90.cuh.
#pragma once
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <hexa_fx/epilogue/activations.cuh>

namespace hexa::sm90 {
using namespace cute;

enum class Schedule { cooperative, pingpong, swapped };
enum class Epilogue { store, activate, activate_backward };
using hexa::Glu;

// Arguments of one launch. Leading dimensions in elements. Unused members are zero.
struct GroupedParams {
  const int* v;             // (n,) slot of every row
  const int* offs;          // (E + 1,) rows of expert e: offs[e] .. offs[e + 1]
  int* queue;               // {next tile, finished CTAs}, zero before the launch and after it
  // row tiles
  const void* a;            // gathered operand: (T, K)
  void* out;                // (n, .) result; with an activation the pre-activation h (null: not wanted), or dh
  void* act;                // (n, N) activated result, or the scaled one for activate_backward
  const void* bias;         // (E, .) or null
  const void* bias_up;      // (E, N), split weights only
  const void* h;            // activate_backward: saved pre-activation
  const float* slot_scale;  // activate_backward: routing weight of every slot, or null for 1
  float* row_dot;           // activate_backward: (tiles along N, n) partial <da, a> by slot, or null
  // weight tiles
  const void* p;            // gathered operand: (T, R)
  void* dw;                 // (E, R, C), or (E, C, R) if transposed; float where it is added to
  void* db;                 // (E, C) column sums of Q, or null; likewise
  int n, experts;
  unsigned div_mul, div_shift;  // v / top_k == umulhi(2 v, div_mul) >> div_shift
  int a_ld, out_ld, act_ld, h_ld;
  int K, N;                 // contraction; columns of the result (for gated weights of one half)
  int bias_ld;              // elements a bias row
  int p_ld, R, C;
  int group_m;              // tiles along M that share B in L2
  ActParams act_params;
};

// What a template states. See gather_gemm_sm90.cu.j2.
template <class Element, Schedule Sched_, int BM_, int BN_, int Stages_, int Ops_, bool GatherRows_, bool GatherWeight_,
          int Cluster_>
struct Shape_ {
  using T = Element;
  static constexpr Schedule Sched = Sched_;
  static constexpr bool PingPong = Sched_ == Schedule::pingpong, Swapped = Sched_ == Schedule::swapped;
  static constexpr int BM = BM_, BN = BN_, BK = 64, Stages = Stages_, Cluster = Cluster_;
  static constexpr bool RowOp = Ops_ & 1, WeightOp = Ops_ & 2;
  static constexpr bool GatherRows = GatherRows_, GatherWeight = GatherWeight_;
  static constexpr bool AddGrad = false;  // weight tiles add to floats instead of storing T
  static constexpr int RowBox = Swapped ? 32 : 64;  // rows that the copy engine brings at a time
  static constexpr bool AnyGather = (RowOp && GatherRows) || (WeightOp && GatherWeight);
};

inline constexpr int kRowTile = 0, kWeightTile = 1, kZeroTile = 2, kEnd = 3;
inline constexpr int kTileSlots = 4, kConsumerWarps = 8;
template <class C>
inline constexpr int kGatherWarps = C::Swapped ? 3 : 2;
inline constexpr int kChunkBytes = 2048;  // 16 rows x 64 columns of 16 bits

// Tensor maps of a launch: what is read, then what is written 16 rows x 64 columns at a time.
enum Map { kRowsMap, kWeightMap, kUpMap, kPMap, kQMap, kHMap, kOutMap, kActMap, kGradMap, kMaps };

struct alignas(16) Tile {
  int kind, expert;
  int row0, rows;  // rows of this tile (row tile), of the expert (weight tile)
  int m0, n0;      // first feature of P and Q (weight tile); n0: first column (row tile)
  int k_tiles, n_tile;
  int multicast;   // the cluster's two tiles share B: each CTA copies half of it to both
  int pad[3];
};
inline constexpr int kTileWords = 9;  // of a tile that say something

template <class C>
struct alignas(1024) Smem {
  static constexpr int ABytes = C::BM * C::BK * 2, BBytes = C::BN * C::BK * 2;
  alignas(1024) uint8_t a[C::Stages][ABytes];
  alignas(1024) uint8_t b[C::Stages][BBytes];
  alignas(1024) uint8_t stage[kConsumerWarps][C::StageBytes];  // epilogue: chunks of 16 rows x 64 columns a warp
  alignas(16) uint64_t full[C::Stages];
  uint64_t empty[C::Stages];
  uint64_t landed[C::Stages];  // gathered part arrived, not yet fenced
  uint64_t tile_full[kTileSlots], tile_empty[kTileSlots];
  uint64_t fetched[kConsumerWarps][2];  // a warp's chunk of h arrived
  Tile tile[kTileSlots];
  // by expert, and by place in the queue; entry E: rows of no expert
  int offs[C::MaxExperts + 1];
  int m_tiles[C::MaxExperts + 2];       // exclusive prefix sum of row tiles. In a cluster of pairs << 11, plus tiles without a partner
  uint16_t expert_at[C::MaxExperts + 1];
};

struct Pipe {
  int index = 0;
  uint32_t phase = 0;
  template <int Slots>
  CUTE_DEVICE void next() {
    if (++index == Slots) { index = 0; phase ^= 1; }
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
inline constexpr uint64_t kEvictNormal = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
inline constexpr uint32_t kTurnBarrier = 0, kStageBarrier = 2, kTailBarrier = 4, kSumBarrier = 6;  // named barriers

CUTE_DEVICE int lane_id() { return threadIdx.x & 31; }
CUTE_DEVICE int warp_in_group() { return (threadIdx.x >> 5) & 3; }
// The same x, which is the same in every lane: the compiler sees it now. The copy engine's instructions want uniform registers; for
// other operands it writes a loop over lanes, 70 cycles each.
CUTE_DEVICE int uniform(int x) { return int(__reduce_max_sync(~0u, unsigned(x))); }
CUTE_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace hexa::sm90
