// Grouped products of few tokens (sm_80 and newer), which only stream weights: esmm, with an activation on the way out.
//
//   d[s] = act(x[s / top_k] W[e(s)]^T + bias[e(s)]), for every slot s that has an expert
//
// Every block sorts the slots for itself, so that nothing has to run before, and rows lie by slot. Blocks stay and take equal stretches of all
// columns, in tiles by all k; copies of the next tiles are under way while one is multiplied. Or they take the same columns of all experts,
// and weight and sum the rows of every token. The weight's columns are the 16 rows of mma.sync, an expert's rows its columns. The warps of a
// block share k, so that a tile is small, and add up in shared memory, in the same order always.
//
// The second launch of a layer begins while the first one runs: it sorts and fetches weights, and waits before it reads rows.
#pragma once
#include <hexa_fx/epilogue/activations.cuh>
#include <hexa_fx/epilogue/decode_sum.cuh>
#include <hexa_fx/load/decode.cuh>
#include <hexa_fx/ptx/dependent.cuh>
#include <hexa_fx/types/element.cuh>

namespace hexa {

template <class C_>
struct DecodeGemm {
  using C = C_;
  using T = typename C::T;
  using Stage = DecodeStage<C>;
  using Slots = SortedSlots<C::kRows, C::kExperts, C::kSlots, C::kWarps>;
  using Share = DecodeShare<Slots, C::kColumns, C::kGrain, C::kSummed>;
  using Feed = DecodeFeed<C, Slots, Share>;
  using Total = DecodeSum<C>;
  static constexpr int kThreads = C::kThreads, kStages = C::kStages, kGroups = C::kRows / 8;
  static constexpr int kPitch = C::kLines + 4;  // of a row's sums: a warp's stores meet in no bank
  static constexpr int kRingBytes = kStages * Stage::kBytes, kSumBytes = C::kWarpsK * C::kRows * kPitch * 4;
  static constexpr int kSharedBytes = kRingBytes + kSumBytes + Slots::kBytes + Total::kBytes;
  static_assert(Slots::kScratchBytes <= kRingBytes);

  static __device__ void run(const DecodeParams& p, unsigned char* shared) {
    if constexpr (C::kFirst) {
      wait_for_last_launch();
      release_next_launch();
    }
    Slots slots(shared + kRingBytes + kSumBytes, p.experts);
    slots.sort(static_cast<const typename C::Id*>(p.ids), p.slots, shared);
    const Share share(slots, p.n, p.columns);
    const Total total(p, shared + kRingBytes + kSumBytes + Slots::kBytes);
    total.prepare();
    const DecodeWork start = share.start();
    if (!Share::none(start)) {
      DecodeGemm(p, shared, slots, share, total).work(start);
    } else {
      release_next_launch();
      wait_for_last_launch();
    }
    total.store();
  }

 private:
  using Sum = float[2][kGroups][4];
  const DecodeParams& p;
  const Slots& slots;
  const Share& share;
  const Total& summed;
  const unsigned ring;
  float* sums;
  const int lane = threadIdx.x % 32, warp_m = threadIdx.x / 32 % C::kWarpsM, warp_k = threadIdx.x / 32 / C::kWarpsM;

  __device__ DecodeGemm(const DecodeParams& p_, unsigned char* shared, const Slots& slots_, const Share& share_,
                        const Total& summed_)
      : p(p_),
        slots(slots_),
        share(share_),
        summed(summed_),
        ring(shared_address(shared)),
        sums(reinterpret_cast<float*>(shared + kRingBytes)) {}

  // Weights of the first stages, then their rows, so that only these wait for the launch before. Groups of copies end in the order of stages.
  __device__ void fill(Feed& feed) const {
    Feed weights = feed;
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) {
      if (weights.more()) weights.copy_weight(ring + s * Stage::kBytes), weights.advance();
      commit_copies();
    }
    if constexpr (!C::kFirst) wait_for_last_launch();
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) {
      if (feed.more()) feed.copy_rows(ring + s * Stage::kBytes), feed.advance();
      commit_copies();
    }
  }

  __device__ void work(const DecodeWork& start) const {
    Feed feed(p, slots, share, start);
    fill(feed);
    DecodeWork here = start;
    int read = 0, write = kStages - 1;
#pragma unroll 1
    while (!Share::none(here)) {
      Sum sum = {};
#pragma unroll 1
      for (int depth = 0; depth < p.k; depth += C::kDepth) {
        wait_for_copies<kStages - 2>();
        __syncthreads();
        if (feed.more()) {
          feed.copy_weight(ring + write * Stage::kBytes);
          feed.copy_rows(ring + write * Stage::kBytes);
          feed.advance();
        } else if constexpr (!C::kFirst) {
          release_next_launch();  // what is left takes about as long as it needs to begin
        }
        commit_copies();
        multiply(ring + read * Stage::kBytes, sum);
        read = read + 1 == kStages ? 0 : read + 1;
        write = write + 1 == kStages ? 0 : write + 1;
      }
      hand_over(sum);
      __syncthreads();
      store(here);  // sums are written again behind the barrier of the next stage
      here = share.behind(here);
    }
  }

  __device__ void multiply(unsigned stage, Sum& sum) const {
    unsigned b[2][kGroups][2];
    load_rows(stage + Stage::kWeightBytes, b);
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        unsigned a[4];
        load_weight(stage, tile, step, a);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) TensorCore<T>::multiply(sum[tile][g], a, b[step][g]);
      }
  }

  // 16 columns of the weight, 16 deep.
  __device__ void load_weight(unsigned stage, int tile, int step, unsigned (&a)[4]) const {
    const int column = (warp_m * 2 + tile) * 16 + lane / 8 % 2 * 8, k = (warp_k * 2 + step) * 16 + lane / 16 * 8;
    if constexpr (C::kAlongK) {
      load_matrices(a, stage + Stage::template at<Stage::kWeightPieces>(column + lane % 8, k / 8));
    } else {
      load_matrices_transposed(a, stage + Stage::template at<Stage::kWeightPieces>(k + lane % 8, column / 8));
    }
  }
  // All rows, 32 deep.
  __device__ void load_rows(unsigned rows, unsigned (&b)[2][kGroups][2]) const {
    if constexpr (kGroups == 1) {
      unsigned r[4];
      load_matrices(r, rows + Stage::template at<Stage::kRowPieces>(lane % 8, warp_k * 4 + lane / 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][0][i % 2] = r[i];
    } else {
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int g = 0; g < kGroups; g += 2) {
          unsigned r[4];
          const int row = g * 8 + lane / 16 * 8 + lane % 8, piece = warp_k * 4 + step * 2 + lane / 8 % 2;
          load_matrices(r, rows + Stage::template at<Stage::kRowPieces>(row, piece));
#pragma unroll
          for (int i = 0; i < 4; ++i) b[step][g + i / 2][i % 2] = r[i];
        }
    }
  }

  __device__ void hand_over(const Sum& sum) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int line = (warp_m * 2 + tile) * 16 + lane / 4 + i / 2 * 8, row = g * 8 + lane % 4 * 2 + i % 2;
          sums[(warp_k * C::kRows + row) * kPitch + line] = sum[tile][g][i];
        }
  }
  __device__ float total(int row, int line) const {
    float x = 0;
#pragma unroll
    for (int w = 0; w < C::kWarpsK; ++w) x += sums[(w * C::kRows + row) * kPitch + line];
    return x;
  }

  // Two columns a thread.
  __device__ void store(const DecodeWork& here) const {
    constexpr int kPairs = C::kColumns / 2;
    const int before = here.part * C::kRows, rows = min(here.rows - before, C::kRows);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kPairs; i += kThreads) {
      const int row = i / kPairs, at = i % kPairs * 2, column = here.column + at;
      if (at >= here.columns || column >= p.n) continue;
      const int slot = slots.order[here.first_row + before + row];
      alignas(4) T pair[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) pair[j] = narrow<T>(result(here.expert, row, at + j, column + j));
      T* to = C::kSummed ? summed.of(slot, at) : static_cast<T*>(p.d) + static_cast<long long>(slot) * p.n + column;
      *reinterpret_cast<unsigned*>(to) = reinterpret_cast<const unsigned&>(pair);
    }
  }

  // Column `at` of the tile, which is `column` of the result (of one half).
  __device__ float result(int expert, int row, int at, int column) const {
    if constexpr (C::kGlu == Glu::none) {
      const float x = total(row, at) + bias(expert, p.bias, p.n, column);
      float unused;
      return activate<C::kAct, false>(x, unused);
    } else {
      constexpr bool kTurns = C::kGlu == Glu::interleaved;
      const int gate = kTurns ? 2 * at : at, up = kTurns ? gate + 1 : at + C::kLines / 2;
      float g = total(row, gate), u = total(row, up);
      if constexpr (C::kGlu == Glu::split) {
        g += bias(expert, p.bias, p.n, column), u += bias(expert, p.bias2, p.n, column);
      } else {
        g += bias(expert, p.bias, 2 * p.n, kTurns ? 2 * column : column);
        u += bias(expert, p.bias, 2 * p.n, kTurns ? 2 * column + 1 : p.n + column);
      }
      return glu<C::kAct>(g, u, p.act_params);
    }
  }
  __device__ static float bias(int expert, const void* from, int width, int column) {
    if constexpr (C::kBias) return widen(static_cast<const T*>(from)[static_cast<long long>(expert) * width + column]);
    else return 0.f;
  }
};

}  // namespace hexa
