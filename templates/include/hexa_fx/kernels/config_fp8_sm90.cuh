// What the sm_90a kernels of FP8 block compute are told beyond config_sm90.cuh, and their shared memory.
//
//   row tile     D[p, :] = epilogue(sum over blocks b of 128 of sa[row(p), b] sw[e(p), n, b] (A[row(p), b] @ W[e(p), n, b]^T) + bias[e(p)])
//   weight tile  dW[e]   = sum over groups g of 128 rows of e of (sp[g, :]^T sq[g, :]) * (P[g] @ Q[g]^T)
//
// Elements are e4m3, a line of shared memory holds the 128 that share a scale, and so does a step of the contraction. P and Q are
// turned round, (groups, features, 128 rows), since wgmma takes eight-bit operands along the contraction only. Warpgroup 0 loads: warps 0 and 1
// gather rows and scales, warp 2 hands gathered stages over, warp 3 runs the copy engine and the queue. Warpgroups 1 and 2 share a tile of 128 x
// 256, 64 rows each, which they multiply in parts of 128 columns: one adds a part up, scaled, while the other multiplies.
#pragma once
#include <cutlass/float8.h>

#include <hexa_fx/kernels/smem_sm90.cuh>
#include <hexa_fx/ptx/fp8.cuh>
#include <hexa_fx/types/fp8.cuh>

namespace hexa::sm90 {

struct BlockScales {};
using E4m3 = Operand<cutlass::float_e4m3_t, float, BlockScales>;

// Arguments of one launch. Scales lie as hexa_fx/ops/fp8.py says.
struct BlockParams : GroupedParams {
  const float* a_scale;  // row tiles: (rows of A, K / 128)
  const float* w_scale;  // (E, columns of the weight / 128, K / 128)
  float* h_scale;        // with an activation: (n, columns of h / 128), null where h is not wanted
  float* act_scale;      // (n, N / 128)
  const float* p_scale;  // weight tiles: (groups, features), and elements from one group to the next
  const float* q_scale;
  int p_scale_ld, q_scale_ld;
};

// What a template states. See block_gemm_sm90.cu.j2.
template <int Stages_, int Ops_, bool GatherRows_, int Cluster_>
struct BlockConfig : TileConfig<E4m3, Schedule::cooperative, 128, 256, Stages_, Ops_, GatherRows_, false, Cluster_> {
  static constexpr bool WeightKN = false, SplitWeight = false, Borrow = false;
  static constexpr int WeightColumnScale = 1;
};

// A part of a tile: what one warpgroup multiplies at a time, of 64 rows each.
inline constexpr int kParts = 2, kPart = 128;

template <class C>
struct alignas(1024) BlockSmem : Smem<C> {
  float row_scale[C::Stages][C::BM];  // of the tile's rows, of P's features
  float column_scale[C::Stages][C::WeightOp ? C::BN : 4];
};

// Threads that copy scales of row tiles and arrive for their own.
inline constexpr int kScaleThreads = 64;

}  // namespace hexa::sm90
