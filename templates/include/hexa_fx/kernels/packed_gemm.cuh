// Grouped products of few rows with weights of four or eight bits (sm_80 and newer): esmm, with an activation on the way out.
//
//   D[p, n] = sum_k x[row(p), k] W[e(p)][n, k] + bias[e(p), n], row(p) = v[p] / top_k or p
//
// Made for reading packed weights as fast as memory gives them. The weight's lines are the 16 rows of mma.sync, up to eight rows of
// an expert its columns (four, where each has a column for two scales). Codes come to registers by 16 bytes a lane, a unit ahead, and
// become elements there; x stays in registers while its rows are the same, but for lines that take more than one pass. The warps of
// a block share k, so that a unit is small, and add up in shared memory: in the half of the table's lines that holds no values.
#pragma once
#include <hexa_fx/epilogue/activations.cuh>
#include <hexa_fx/load/packed.cuh>
#include <hexa_fx/scheduler/units.cuh>
#include <hexa_fx/types/element.cuh>

namespace hexa {

template <class C_>
struct PackedGemm {
  using C = C_;
  using T = typename C::T;
  using Lines = PackedLines<C>;
  using Depth = PackedDepth<C>;
  using Source = PackedSource<C>;
  static constexpr int kThreads = C::kThreads, kMostExperts = 512;
  using Schedule = Units<C::kTokens, kMostExperts, kThreads>;
  // Fragments that are under way. Registers hold all of a unit's, or where x takes many a part.
  static constexpr int kFragments = 2 * C::kSteps, kRing = C::kBits == 8 ? 2 : C::kSteps <= 2 ? kFragments : C::kSteps == 3 ? 3 : 2;
  static constexpr int kSums = 128 * C::kWarpsM, kEach = (kSums + kThreads - 1) / kThreads;  // of one tile; of them a thread's
  static constexpr int kSharedBytes = PackedTable::kBytes + Schedule::kBytes;
  static_assert(2 * C::kWarps * 8 <= 256, "two times the sums fit behind the table");

  static __device__ void run(const PackedParams& p, unsigned char* shared) {
    Schedule units(reinterpret_cast<int*>(shared + PackedTable::kBytes), p.offs, p.experts,
                   (p.n + Lines::kColumns - 1) / Lines::kColumns);
    PackedTable::fill<C>(shared, p.values);
    units.deal();
    zero_tail(p, units.offs[p.experts]);
    if (units.begin < units.end) PackedGemm(p, shared).work(units);
  }

 private:
  const PackedParams& p;
  unsigned char* shared;
  const int lane = threadIdx.x % 32, warp_m = threadIdx.x / 32 / C::kWarpsK, warp_k = int(threadIdx.x) / 32 % C::kWarpsK;
  unsigned x[C::kSteps][16];
  PackedFragment<C> ring[kRing];

  __device__ PackedGemm(const PackedParams& p_, unsigned char* shared_) : p(p_), shared(shared_) {}

  __device__ void work(const Schedule& units) {
    Work here = units.at(units.begin);
    Source source(p, here.expert, here.tile, warp_m, lane);
#pragma unroll
    for (int f = 0; f < kRing; ++f) fetch(source, 0, f, true);
    bool other_rows = true;
    for (int unit = units.begin, buffer = 0;; buffer ^= 1) {
      float bias[kEach][2] = {};
      if constexpr (C::kBias) load_bias(bias, here);
      const bool more = ++unit < units.end;
      const Work next = more ? units.behind(here, unit) : here;
      const bool moves = next.begin != here.begin;
      Source ahead = source;
      if (C::kFull && C::kScaleRows == 1 && !moves) ahead.advance(p);
      else ahead = Source(p, next.expert, next.tile, warp_m, lane);
      float sum[2][4] = {};
#pragma unroll 1
      for (int pass = 0; pass < C::kPasses; ++pass) {
        const bool last = C::kPasses == 1 || pass + 1 == C::kPasses;
        if (C::kPasses > 1 || other_rows) load_rows(here, pass);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          ring[f % kRing].multiply(sum[f / C::kSteps], x[f % C::kSteps], shared, lane);
          if (f + kRing < kFragments) fetch(source, pass, f + kRing, true);
          else fetch(last ? ahead : source, last ? 0 : pass + 1, f + kRing - kFragments, more || !last);
        }
      }
      hand_over(sum, buffer);
      __syncthreads();
      store(here, buffer, bias);
      if (!more) return;
      other_rows = moves;
      here = next;
      source = ahead;
    }
  }

  // Tile 0 step by step, then tile 1.
  __device__ void fetch(const Source& source, int pass, int f, bool wanted) {
    source.fetch(ring[f % kRing], f / C::kSteps, Depth::at(pass, warp_k, f % C::kSteps, lane), p.k, wanted);
  }

  // Rows that are not there are zero, as is what lies behind k.
  __device__ void load_rows(const Work& here, int pass) {
    const int row = here.begin + Depth::row(lane);
    const bool there = row < here.end && Depth::holds(lane);
    const long long from = !there ? 0 : C::kGather ? static_cast<long long>(p.top_k(__ldg(p.v + row))) : row;
    const T* line = static_cast<const T*>(p.x) + from * p.x_stride;
#pragma unroll
    for (int s = 0; s < C::kSteps; ++s) {
      const int depth = Depth::at(pass, warp_k, s, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4 words = make_uint4(0, 0, 0, 0);
        if (there && depth < p.k) words = __ldg(reinterpret_cast<const uint4*>(line + depth) + i);
        x[s][4 * i] = words.x, x[s][4 * i + 1] = words.y, x[s][4 * i + 2] = words.z, x[s][4 * i + 3] = words.w;
      }
    }
  }

  // Sum i of four of lane `of` in tile j of a warp, in a buffer.
  __device__ float& handed(int buffer, int warp, int j, int i, int of) const {
    const int line = ((buffer * C::kWarps + warp) * 2 + j) * 4 + i;
    return reinterpret_cast<float*>(shared + line * PackedTable::kLine + PackedTable::kLine / 2)[of];
  }
  __device__ void hand_over(const float (&sum)[2][4], int buffer) const {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) handed(buffer, warp_m * C::kWarpsK + warp_k, j, i, lane) = sum[j][i];
  }

  // A result that a thread adds up, from both tiles: sum i of a lane of the warps that share k.
  struct Place {
    int warp, i, lane;
    __device__ explicit Place(unsigned number) : warp(number / 128), i(number % 128 / 32), lane(number % 32) {}
    __device__ int row() const { return lane % 4 * 2 + i % 2; }
    __device__ int column(int tile, int j) const { return Lines::column(tile, warp, j, lane / 4 + i / 2 * 8); }
  };

  template <class Do>
  static __device__ void each(Do&& one) {
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (kSums % kThreads == 0 || threadIdx.x + e * kThreads < kSums) one(e, Place(threadIdx.x + e * kThreads));
  }

  __device__ void load_bias(float (&bias)[kEach][2], const Work& here) const {
    each([&](int e, const Place& place) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        constexpr bool kBoth = C::kGlu == Glu::concat || C::kGlu == Glu::interleaved;
        const int c = place.column(here.tile, j);
        const T* from = static_cast<const T*>(C::kGlu == Glu::split && j == 1 ? p.bias2 : p.bias);
        if (c < p.n)
          bias[e][j] = widen(from[static_cast<long long>(here.expert) * (kBoth ? 2 * p.n : p.n) + Lines::line(j, c, p.n)]);
      }
    });
  }

  __device__ void store(const Work& here, int buffer, const float (&bias)[kEach][2]) const {
    each([&](int e, const Place& place) {
      float value[2] = {};
#pragma unroll
      for (int w = 0; w < C::kWarpsK; ++w)
#pragma unroll
        for (int j = 0; j < 2; ++j) value[j] += handed(buffer, place.warp * C::kWarpsK + w, j, place.i, place.lane);
      if constexpr (C::kGroups == 2) {
#pragma unroll
        for (int j = 0; j < 2; ++j) value[j] += __shfl_xor_sync(0xffffffffu, value[j], 2);
      }
      value[0] += bias[e][0], value[1] += bias[e][1];
      const int row = here.begin + place.row();
      if (place.row() < C::kTokens && row < here.end) put(row, place.column(here.tile, 0), place.column(here.tile, 1), value);
    });
  }

  __device__ void put(long long row, int c0, int c1, const float (&value)[2]) const {
    T* d = static_cast<T*>(p.d) + row * p.d_stride;
    T* act = static_cast<T*>(p.act) + row * p.act_stride;
    if constexpr (C::kGlu == Glu::none) {
      const int column[2] = {c0, c1};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (column[j] >= p.n) continue;
        float unused;
        if constexpr (C::kKeep || !C::kActs) d[column[j]] = narrow<T>(value[j]);
        if constexpr (C::kActs) act[column[j]] = narrow<T>(activate<C::kAct, false>(value[j], unused));
      }
    } else if (c0 < p.n) {
      constexpr bool kTurns = C::kGlu == Glu::interleaved;
      if constexpr (C::kKeep) {
        d[kTurns ? 2 * c0 : c0] = narrow<T>(value[0]);
        d[kTurns ? 2 * c0 + 1 : p.n + c0] = narrow<T>(value[1]);
      }
      act[c0] = narrow<T>(glu<C::kAct>(value[0], value[1], p.act_params));
    }
  }

  // Rows that belong to no expert are zero.
  static __device__ void zero_tail(const PackedParams& p, int routed) {
    const int width = C::kGlu == Glu::none ? p.n : 2 * p.n;
    for (long long row = routed + int(blockIdx.x); row < p.rows; row += gridDim.x) {
      if constexpr (C::kKeep || !C::kActs) zero(static_cast<T*>(p.d) + row * p.d_stride, width);
      if constexpr (C::kActs) zero(static_cast<T*>(p.act) + row * p.act_stride, p.n);
    }
  }
  static __device__ void zero(T* row, int width) {
    for (int c = threadIdx.x; c < width; c += kThreads) row[c] = narrow<T>(0.f);
  }
};

}  // namespace hexa
