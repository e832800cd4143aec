// Both gradients of y = u C^T, of one reading of dy (the paper's fused backward for a weight of a few columns):
//
//   du[p, :] = dy[row(p), :] @ C[e(p)]                              (n, R)
//   dC[e]    = sum over rows p of e of dy[row(p), :]^T u[p, :]      (E, N, R)
//
// A block takes a run of tiles of 64 rows. A tile passes through shared memory once, 128 columns a step, and both products read it there:
// a consumer warpgroup has 64 columns of every step. It keeps their part of dC in registers while the expert stays the same, and its part
// of du for the tile. C[e] stays in shared memory. Warpgroup 0 gathers.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>

#include <hexa_fx/ptx/convert_sm90.cuh>
#include <hexa_fx/ptx/copy_sm90.cuh>
#include <hexa_fx/ptx/lanes.cuh>
#include <hexa_fx/ptx/wgmma_sm90.cuh>
#include <hexa_fx/scheduler/runs.cuh>
#include <hexa_fx/types/low_rank.cuh>
#include <hexa_fx/types/operand_sm90.cuh>

namespace hexa::sm90 {

using Barrier = cutlass::arch::ClusterBarrier;
using TxBarrier = cutlass::arch::ClusterTransactionBarrier;
using cutlass::arch::NamedBarrier;

// What a template states. Rank: R rounded up to 16, 32 or 64. Steps: of 128 columns.
template <class T_, int Rank_, int Steps_, int Stages_, bool Gather_, int MaxExperts_>
struct LowRankConfig {
  using T = T_;
  static constexpr int Rank = Rank_, Steps = Steps_, Stages = Stages_, MaxExperts = MaxExperts_;
  static constexpr bool Gather = Gather_;
  static constexpr int Words = Rank / 2;  // of an accumulator of 64 rows, a thread
  static constexpr int Pitch =
      Rank * int(sizeof(T));                        // bytes of a row of C and u in shared memory, swizzled as one of 32, 64 or 128
  static constexpr int Slots = Stages / Steps + 2;  // of u: a tile's is read until its last step, when later tiles are on their way
  static constexpr int HalfBytes = kRunRows * kLineBytes;  // of a step, a consumer's columns
};

template <class C>
struct alignas(1024) LowRankSmem {
  alignas(1024) uint8_t dy[C::Stages][2][C::HalfBytes];
  alignas(1024) uint8_t factor[C::Steps * 128 * C::Pitch];
  alignas(1024) uint8_t u[C::Slots][kRunRows * C::Pitch];
  alignas(16) float other[2][C::Words][128];  // the second consumer's part of du
  alignas(16) uint64_t full[C::Stages];
  uint64_t empty[C::Stages], factor_full;
  int offs[C::MaxExperts + 1], tiles[C::MaxExperts + 1];  // tiles: before each expert
};

// A block's way through its tiles.
template <class C>
struct Run {
  const LowRankSmem<C>& sm;
  int tile, end, expert = 0, first;  // first: expert of the run
  CUTE_DEVICE Run(const LowRankSmem<C>& sm, int experts) : sm(sm) {
    const int all = sm.tiles[experts];
    tile = run_begin(blockIdx.x, all, gridDim.x);
    end = run_begin(blockIdx.x + 1, all, gridDim.x);
    for (int hi = experts; hi - expert > 1;) {
      const int mid = (expert + hi) >> 1;
      if (sm.tiles[mid] <= tile) expert = mid;
      else hi = mid;
    }
    first = expert;
  }
  CUTE_DEVICE bool done() const { return tile >= end; }
  CUTE_DEVICE void next() {
    ++tile;
    while (tile < end && sm.tiles[expert + 1] <= tile) ++expert;
  }
  CUTE_DEVICE int row0() const { return sm.offs[expert] + (tile - sm.tiles[expert]) * kRunRows; }
  CUTE_DEVICE int rows() const { return min(kRunRows, sm.offs[expert + 1] - row0()); }
};

// Where a thread is in the stages.
template <class C>
struct Place {
  int stage = 0;
  uint32_t phase = 0;
  CUTE_DEVICE void next() {
    if (++stage == C::Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Called by one warp.
template <class C>
CUTE_DEVICE void tabulate(LowRankSmem<C>& sm, const LowRankGradientsParams& p) {
  int done = 0;
  for (int base = 0; base <= p.experts; base += 32) {
    const int e = base + lane_id();
    if (e <= p.experts) sm.offs[e] = __ldg(p.offs + e);
    const int own = e < p.experts ? row_tiles(p.offs, e) : 0;
    int sum = own;
    CUTE_UNROLL
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(~0u, sum, d);
      if (lane_id() >= d) sum += before;
    }
    if (e <= p.experts) sm.tiles[e] = done + sum - own;
    done += __shfl_sync(~0u, sum, 31);
  }
}

// Four warps: eight threads a line of a row, sixteen rows at a time. What is no row or no column becomes zeros.
template <class C>
struct LowRankGatherer {
  using Element = Operand<typename C::T>;
  LowRankSmem<C>& sm;
  const LowRankGradientsParams& p;
  Place<C> place;

  CUTE_DEVICE void run() {
    constexpr int kPasses = kRunRows / 16;
    const int r = threadIdx.x >> 3, c = threadIdx.x & 7;
    const uint32_t first = cast_smem_ptr_to_uint(sm.dy[0][0]) + swizzled(r, c), pieces = p.dy_stride / Element::kPiece;
    int slot = 0;
    for (Run<C> at(sm, p.experts); !at.done(); at.next()) {
      const int row0 = at.row0(), rows = at.rows();
      uint32_t from[kPasses];  // in 16 bytes
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        const uint32_t own = row0 + min(r + 16 * i, rows - 1);
        from[i] = (C::Gather ? __umulhi(2u * uint32_t(__ldg(p.v + own)), p.div_mul) >> p.div_shift : own) * pieces + c;
      }
#pragma unroll 1
      for (int k = 0; k < C::Steps; ++k) {
        Barrier::wait(&sm.empty[place.stage], place.phase ^ 1);
        const uint32_t dst = opaque(first + place.stage * (2 * C::HalfBytes));
        const int columns = p.N - k * 128 - c * Element::kPiece;
        CUTE_UNROLL
        for (int i = 0; i < kPasses; ++i) {
          const char* row = static_cast<const char*>(p.dy) + size_t(from[i]) * kPieceBytes;
          const uint32_t to = dst + i * (16 * kLineBytes);
          cp_async_16(to, row, r + 16 * i < rows && columns > 0 ? kPieceBytes : 0);
          cp_async_16(to + C::HalfBytes, row + kLineBytes, r + 16 * i < rows && columns > 64 ? kPieceBytes : 0);
          from[i] += 2 * kLineBytes / kPieceBytes;
        }
        if (k == 0) rows_of_u(slot, row0, rows);
        cutlass::arch::cpasync_barrier_arrive_noinc(&sm.full[place.stage]);
        place.next();
      }
      slot = slot + 1 == C::Slots ? 0 : slot + 1;
    }
    cp_async_wait_all();
  }

  CUTE_DEVICE void rows_of_u(int slot, int row0, int rows) {
    constexpr int kPieces = C::Pitch / kPieceBytes;  // a row
    const char* u = static_cast<const char*>(p.u) + size_t(row0) * p.R * sizeof(typename C::T);
#pragma unroll 1
    for (int at = threadIdx.x; at < kRunRows * kPieces; at += 128) {
      const int row = at / kPieces, piece = at % kPieces;
      const bool inside = row < rows && piece * Element::kPiece < p.R;
      const int from = inside ? row * (p.R / Element::kPiece) + piece : 0;
      const uint32_t to = row * C::Pitch + ((piece ^ (row * C::Pitch / kLineBytes & (kPieces - 1))) << 4);
      cp_async_16(cast_smem_ptr_to_uint(sm.u[slot]) + to, u + from * kPieceBytes, inside ? kPieceBytes : 0);
    }
  }
};

template <class C>
struct LowRankConsumer {
  using T = typename C::T;
  using Shape = cute::Shape<_64, Int<C::Rank>, _16>;
  using RowsAtom = decltype(GMMA::ss_op_selector<T, T, float, Shape, GMMA::Major::K, GMMA::Major::MN>());
  using ColumnsAtom = decltype(GMMA::ss_op_selector<T, T, float, Shape, GMMA::Major::MN, GMMA::Major::MN>());
  LowRankSmem<C>& sm;
  const LowRankGradientsParams& p;
  const TmaDescriptor* map;  // of C
  int group;
  float dc[C::Steps][C::Words], du[C::Words];
  Place<C> place;

  CUTE_DEVICE LowRankConsumer(LowRankSmem<C>& sm, const LowRankGradientsParams& p, const TmaDescriptor* map, int group)
      : sm(sm), p(p), map(map), group(group) {}

  // Rows of u or C: eights of the contraction, one behind the other.
  static CUTE_DEVICE uint64_t factor_operand(uint32_t at) {
    constexpr auto kSwizzle = C::Rank == 16   ? GMMA::LayoutType::B32
                              : C::Rank == 32 ? GMMA::LayoutType::B64
                                              : GMMA::LayoutType::B128;
    constexpr uint32_t kHigh = uint32_t(kSwizzle) << 30 | (8 * C::Pitch) >> 4, kUnused = 1 << 16;
    return uint64_t(kHigh) << 32 | kUnused | at >> 4;
  }
  template <class Atom, int... I>
  static CUTE_DEVICE void multiply(uint64_t a, uint64_t b, float (&d)[C::Words], GMMA::ScaleOut keep, int_sequence<I...>) {
    Atom::fma(a, b, d[I]..., keep);
  }
  template <class Atom>
  static CUTE_DEVICE void multiply(uint64_t a, uint64_t b, float (&d)[C::Words], GMMA::ScaleOut keep) {
    multiply<Atom>(a, b, d, keep, make_int_sequence<C::Words>{});
  }
  CUTE_DEVICE void fence() {
    CUTE_UNROLL
    for (int i = 0; i < C::Words; ++i) warpgroup_fence_operand(du[i]);
    CUTE_UNROLL
    for (int k = 0; k < C::Steps; ++k) {
      CUTE_UNROLL
      for (int i = 0; i < C::Words; ++i) warpgroup_fence_operand(dc[k][i]);
    }
  }
  CUTE_DEVICE void release(int stage) {
    if (lane_id() == 0) Barrier::arrive(&sm.empty[stage]);
  }

  CUTE_DEVICE void fetch_factor(int expert) {
    TxBarrier::arrive_and_expect_tx(&sm.factor_full, sizeof(sm.factor));
    CUTE_UNROLL
    for (int k = 0; k < C::Steps; ++k)
      SM90_TMA_LOAD_3D::copy(map, &sm.factor_full, uint64_t(TMA::CacheHintSm90::EVICT_NORMAL), sm.factor + k * (128 * C::Pitch), 0,
                             k * 128, expert);
  }

  // `begins`: the expert's first tile here.
  CUTE_DEVICE void multiply_tile(bool begins, int slot) {
    const uint32_t rows = cast_smem_ptr_to_uint(sm.dy[0][group]), u = cast_smem_ptr_to_uint(sm.u[slot]);
    const uint32_t factor = cast_smem_ptr_to_uint(sm.factor) + group * (64 * C::Pitch);
    const auto keep = begins ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    fence();
    int previous = 0;
    CUTE_UNROLL
    for (int k = 0; k < C::Steps; ++k) {
      Barrier::wait(&sm.full[place.stage], place.phase);
      cutlass::arch::fence_view_async_shared();
      const uint32_t at = rows + place.stage * (2 * C::HalfBytes);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int kk = 0; kk < 4; ++kk) {
        multiply<RowsAtom>(swizzled_operand(at + kk * 32), factor_operand(factor + (k * 128 + kk * 16) * C::Pitch), du,
                           k + kk == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One);
        multiply<ColumnsAtom>(swizzled_operand(at + kk * (16 * kLineBytes)), factor_operand(u + kk * (16 * C::Pitch)), dc[k],
                              kk == 0 ? keep : GMMA::ScaleOut::One);
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      if (k > 0) release(previous);
      previous = place.stage;
      place.next();
    }
    warpgroup_wait<0>();
    fence();
    release(previous);
  }

  // The other consumer's half of the columns comes through shared memory.
  CUTE_DEVICE void store_du(const Run<C>& at, int turn) {
    const int thread = threadIdx.x & 127, l = lane_id();
    if (group == 1) {
      CUTE_UNROLL
      for (int i = 0; i < C::Words; ++i) sm.other[turn][i][thread] = du[i];
    }
    NamedBarrier::sync(256, 1);
    if (group == 1) return;
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = warp_in_group() * 16 + (l >> 2) + 8 * half;
      if (row >= at.rows()) continue;
      T* out = static_cast<T*>(p.du) + int64_t(at.row0() + row) * p.R;
      CUTE_UNROLL
      for (int j = 0; j < C::Rank / 8; ++j) {
        const int i = 4 * j + 2 * half, column = 8 * j + 2 * (l & 3);
        if (column < p.R)
          *reinterpret_cast<uint32_t*>(out + column) =
              pack<T>(du[i] + sm.other[turn][i][thread], du[i + 1] + sm.other[turn][i + 1][thread]);
      }
    }
  }

  CUTE_DEVICE void store_dc(int expert, int first, int begin, int end) {
    const bool whole = sm.tiles[expert] >= begin && sm.tiles[expert + 1] <= end;
    T* out = static_cast<T*>(p.dc) + int64_t(expert) * p.N * p.R;
    float* part = p.parts + int64_t(2 * blockIdx.x + (expert != first)) * p.N * p.R;
    const int l = lane_id(), row = group * 64 + warp_in_group() * 16 + (l >> 2);
    CUTE_UNROLL
    for (int k = 0; k < C::Steps; ++k) {
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int at = k * 128 + row + 8 * half;
        if (at >= p.N) continue;
        CUTE_UNROLL
        for (int j = 0; j < C::Rank / 8; ++j) {
          const int i = 4 * j + 2 * half, column = 8 * j + 2 * (l & 3);
          if (column >= p.R) continue;
          const int64_t to = int64_t(at) * p.R + column;
          if (whole) *reinterpret_cast<uint32_t*>(out + to) = pack<T>(dc[k][i], dc[k][i + 1]);
          else *reinterpret_cast<float2*>(part + to) = {dc[k][i], dc[k][i + 1]};
        }
      }
    }
  }

  CUTE_DEVICE void run() {
    int expert = -1, slot = 0, turn = 0;
    uint32_t phase = 0;
    Run<C> at(sm, p.experts);
    const int begin = at.tile;
    for (; !at.done(); at.next()) {
      const bool begins = at.expert != expert;
      if (begins) {  // neither consumer reads the factor of the last one: they have met since
        if (group == 0 && (threadIdx.x & 127) == 0) fetch_factor(at.expert);
        if (expert >= 0) store_dc(expert, at.first, begin, at.end);
        expert = at.expert;
        Barrier::wait(&sm.factor_full, phase);
        phase ^= 1;
      }
      multiply_tile(begins, slot);
      store_du(at, turn);
      slot = slot + 1 == C::Slots ? 0 : slot + 1;
      turn ^= 1;
    }
    if (expert >= 0) store_dc(expert, at.first, begin, at.end);
  }
};

template <class C>
CUTE_DEVICE void low_rank_gradients(const TmaDescriptor* map, const LowRankGradientsParams& p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  LowRankSmem<C>& sm = *reinterpret_cast<LowRankSmem<C>*>(raw);
  const int group = __shfl_sync(~0u, int(threadIdx.x) >> 7, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::Stages; ++i) {
      Barrier::init(&sm.full[i], 128);
      Barrier::init(&sm.empty[i], 8);
    }
    Barrier::init(&sm.factor_full, 1);
    cutlass::arch::fence_barrier_init();
  }
  if (threadIdx.x < 32) tabulate(sm, p);
  __syncthreads();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    LowRankGatherer<C>{sm, p}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    LowRankConsumer<C>(sm, p, map, group - 1).run();
  }
}

}  // namespace hexa::sm90
