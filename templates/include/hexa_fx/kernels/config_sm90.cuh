// What the sm_90a grouped kernels are told: by the template (types, tiles) and by the launch (arguments).
//
//   row tile     D[p, :] = epilogue(A[row(p), :] @ W[e(p)] + bias[e(p)])            ESMM, p a row in expert order
//   weight tile  dW[e]   = sum over rows p of e of P[row(p), :]^T Q[p, :]            ESTMM, with column sums of Q: ESS
//
// `low_rank` row tiles add U[p, :] @ C[e(p)] to the product before the epilogue: the first steps of the contraction are over U, rows in expert
// order, and C, both by the copy engine, which fills up their last one with zeros, while gathered rows are still on their way. U of up to
// sixteen columns takes no step where the epilogue has room for both, see mma/second_product_sm90.cuh.
//
// One persistent CTA an SM: warpgroup 0 loads (warps 0 and 1 gather, 2 hands gathered stages over, 3 runs the copy engine and the
// queue), warpgroups 1 and 2 multiply and store. (Four warpgroups do not fit: a 64x256 wgmma needs 154 registers.) Which rows belong to
// which tile follows on the device from `offs`, so grids and sizes are static. `cooperative`: both consumers share a tile of 128 rows, 64
// each; `pingpong`: each has its own tile, one's epilogue runs behind the other's main loop. A cluster of two CTAs takes two row
// tiles of one expert that share B and copies it once for both. `swapped`: both consumers share a tile of BM rows x 128 columns, 64 columns
// each, see mma/swapped_sm90.cuh.
#pragma once
#include <cute/arch/copy_sm90_desc.hpp>

#include <hexa_fx/epilogue/activations.cuh>
#include <hexa_fx/types/operand_sm90.cuh>
#include <hexa_fx/types/places.cuh>

namespace hexa::sm90 {

enum class Schedule { cooperative, pingpong, swapped };
enum class Epilogue { store, activate, activate_backward };
using hexa::Glu;

// Arguments of one launch. Leading dimensions in elements. Unused members are zero.
struct GroupedParams {
  const int* v;     // (n,) slot of every row
  const int* offs;  // (E + 1,) rows of expert e: offs[e] .. offs[e + 1]
  int* queue;       // {next tile, finished CTAs}, zero before the launch and after it
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
  const void* p;  // gathered operand: (T, R)
  void* dw;       // (E, R, C), or (E, C, R) if transposed; float where it is added to
  void* db;       // (E, C) column sums of Q, or null; likewise
  int n, experts;
  unsigned div_mul, div_shift;  // v / top_k == umulhi(2 v, div_mul) >> div_shift
  int a_ld, out_ld, act_ld, h_ld;
  int K, N;        // contraction; columns of the result (for gated weights of one half)
  int bias_ld;     // elements a bias row, or one of row_dot
  int p_ld, R, C;  // low_rank: R columns of U
  int group_m;     // tiles along M that share B in L2
  ActParams act_params;
};

// What a template states. See gather_gemm_sm90.cu.j2.
template <class Operand_, Schedule Sched_, int BM_, int BN_, int Stages_, int Ops_, bool GatherRows_, bool GatherWeight_,
          int Cluster_>
struct TileConfig {
  using Operand = Operand_;
  using T = typename Operand::Element;
  using F = typename Operand::Accumulator;
  static constexpr bool PingPong = Sched_ == Schedule::pingpong, Swapped = Sched_ == Schedule::swapped;
  static constexpr int BM = BM_, BN = BN_, BK = Operand::kLine, Stages = Stages_, Cluster = Cluster_;
  static constexpr bool RowOp = Ops_ & 1, WeightOp = Ops_ & 2;
  static constexpr bool GatherRows = GatherRows_, GatherWeight = GatherWeight_;
  static constexpr bool AddGrad = false;            // weight tiles add to what is there
  static constexpr bool AddFloats = false;          // which is floats, not T
  static constexpr bool Listed = false;             // experts' matrices lie apart, see types/places.cuh
  static constexpr bool Once = false;               // weights leave L2 first: tiles of few rows, which take as long as these
  static constexpr int LowRank = 0;                 // row tiles add a second product: wgmma's parts of a step that are not zeros
  static constexpr bool AddedInStaging = false;     // its operands lie where the epilogue's chunks do, and take no step
  static constexpr int RowBox = Swapped ? 32 : 64;  // rows that the copy engine brings at a time
  static constexpr bool AnyGather = (RowOp && GatherRows) || (WeightOp && GatherWeight);
  static constexpr int Blocks = BM / (PingPong ? 64 : 128);  // of 64 rows, of a consumer warpgroup
  static_assert(!WeightOp || !PingPong, "weight tiles are shared by both warpgroups of one CTA");
};

inline constexpr int kConsumerWarps = 8;
template <class C>
inline constexpr int kGatherWarps = C::Swapped ? 3 : 2;

// Tensor maps of a launch: what is read, then what is written a chunk at a time.
enum Map { kRowsMap, kWeightMap, kUpMap, kPMap, kQMap, kHMap, kOutMap, kActMap, kGradMap, kMaps };
// What a second product is read through: maps of weight tiles, which such kernels have none of. U, C, and C of up columns.
inline constexpr Map kAddedRowsMap = kPMap, kAddedWeightMap = kQMap, kAddedUpMap = kGradMap;

// Whether the second product takes steps of the contraction, and how many.
template <class C>
inline constexpr bool kAddedSteps = C::LowRank > 0 && !C::AddedInStaging;

template <class C>
CUTE_DEVICE int low_rank_steps(const GroupedParams& p) {
  static_assert(C::LowRank == 0 || !C::WeightOp, "the maps and sizes of the second product are those of weight tiles");
  if constexpr (kAddedSteps<C>) return ceil_div(p.R, int(C::BK));
  else return 0;
}

}  // namespace hexa::sm90
