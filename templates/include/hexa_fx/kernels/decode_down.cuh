// The second product of few tokens and the sum over experts in one launch (sm_80 and newer), which only streams weights:
//
//   out[t] = sum over s of w[t, s] * (a[t * k + s] W[e]^T + bias[e]), of the slots s that have an expert e
//
// A block gives the same columns of all tokens, so it reads these columns of every expert that is reached, and nobody else has to be
// waited for. Each warp streams on its own: all parts of experts by all k are one list of chunks, of which the warps take equal stretches, with a
// ring of copies each and no barrier. A part that several warps share is added up at the end, in the order of warps: two runs give the
// same bits. Rows wait in shared memory by slot, are rounded as rows in global memory are, and are summed in the order of slots.
//
// Begins while the launch before still runs: it sorts and fetches weights, and waits before it reads rows. What stands for lines and rows that
// do not exist goes into sums that nobody reads.
#pragma once
#include <hexa_fx/ptx/dependent.cuh>
#include <hexa_fx/ptx/sm80.cuh>
#include <hexa_fx/scheduler/slots.cuh>
#include <hexa_fx/types/decode.cuh>
#include <hexa_fx/types/element.cuh>
#include <hexa_fx/types/places.cuh>

namespace hexa {

template <class C>
struct DecodeDown {
  using T = typename C::T;
  using Slots = SortedSlots<8, C::kExperts, C::kSlots, C::kWarps>;
  static constexpr int kWarps = C::kWarps, kThreads = C::kThreads, kRing = C::kStages, kRows = 8, kTiles = C::kTiles;
  static constexpr int kLines = 16 * kTiles, kDepth = 64, kPieces = kDepth / 8;  // of a chunk: 128 bytes of every line
  static constexpr int kLineBytes = kDepth * int(sizeof(T));
  static constexpr int kWeightBytes = kLines * kLineBytes, kChunk = kWeightBytes + kRows * kLineBytes;
  static constexpr int kRingBytes = kWarps * kRing * kChunk, kSumBytes = (C::kSlots + kWarps * kRows) * kLines * 4;
  static constexpr int kSharedBytes = kRingBytes + kSumBytes + Slots::kBytes + C::kSlots * 6;
  static_assert(Slots::kScratchBytes <= kRingBytes);

  static __device__ void run(const DecodeParams& p, unsigned char* shared) {
    Slots slots(shared + kRingBytes + kSumBytes, p.experts);
    slots.sort(static_cast<const typename C::Id*>(p.ids), p.slots, shared);
    const DecodeDown block(p, shared, slots);
    block.prepare();
    block.stream();
    __syncthreads();
    block.join();
    __syncthreads();
    block.store();
  }

 private:
  const DecodeParams& p;
  const Slots& slots;
  const unsigned ring;  // of this warp
  float* sums;          // (slots, kLines)
  float* rest;          // (warps, kRows, kLines) of the part that a warp goes on with
  float* weights;       // of slots
  unsigned short* expert;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x * p.columns, columns = min(p.columns, p.n - first), chunks = (p.k + kDepth - 1) / kDepth;

  __device__ DecodeDown(const DecodeParams& p_, unsigned char* shared, const Slots& slots_)
      : p(p_),
        slots(slots_),
        ring(shared_address(shared) + threadIdx.x / 32 * (kRing * kChunk)),
        sums(reinterpret_cast<float*>(shared + kRingBytes)),
        rest(sums + C::kSlots * kLines),
        weights(reinterpret_cast<float*>(shared + kRingBytes + kSumBytes + Slots::kBytes)),
        expert(reinterpret_cast<unsigned short*>(weights + C::kSlots)) {}

  __device__ int begin_of(int w) const { return slots.parts() * chunks * w / kWarps; }

  // Weights of slots without an expert may be anything, NaN included.
  __device__ void prepare() const {
#pragma unroll 1
    for (int slot = threadIdx.x; slot < p.slots; slot += kThreads) {
      const long long id = static_cast<long long>(static_cast<const typename C::Id*>(p.ids)[slot]);
      expert[slot] = static_cast<unsigned short>(id < 0 || id >= p.experts ? p.experts : id);
      weights[slot] = p.weights == nullptr ? 1.f : static_cast<float>(widen(static_cast<const typename C::W*>(p.weights)[slot]));
    }
  }

  // A part of an expert's rows.
  struct Part {
    int expert, row, rows;
  };
  __device__ Part part_of(int number) const {
    const int e = slots.expert[number], before = (number - slots.first[e]) * kRows;
    return {e, slots.offs[e] + before, min(slots.offs[e + 1] - slots.offs[e] - before, kRows)};
  }

  // What a warp copies next: lane by lane a piece of 16 bytes of every fourth line.
  struct Feed {
    const DecodeDown& block;
    int part, chunk, left;  // left: chunks of the warp's stretch
    int rows;
    const T* weight;
    int line_at[kLines / 4];
    const T* row[kRows / 4];

    __device__ Feed(const DecodeDown& block_, int part_, int chunk_, int left_)
        : block(block_), part(part_), chunk(chunk_), left(left_) {
#pragma unroll
      for (int i = 0; i < kLines / 4; ++i) line_at[i] = min(block.lane / kPieces + 4 * i, block.columns - 1) * int(block.p.w_line);
      if (left > 0) locate();
    }
    __device__ void locate() {
      const Part own = block.part_of(part);
      const int line = block.lane / kPieces, k = block.lane % kPieces * 8;
      rows = own.rows;
      long long place = own.expert;
      if constexpr (C::kListed) place = Matrices::of<false>(block.p, own.expert).own;
      weight = static_cast<const T*>(block.p.w) + place * block.p.w_expert + block.first * block.p.w_line + k;
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const int slot = block.slots.order[own.row + min(line + 4 * i, rows - 1)];
        row[i] = static_cast<const T*>(block.p.x) + slot * block.p.x_stride + k;
      }
    }
    __device__ void advance() {
      --left;
      if (++chunk < block.chunks) return;
      chunk = 0, ++part;
      if (left > 0) locate();
    }
    __device__ int bytes() const { return chunk * kDepth + block.lane % kPieces * 8 < block.p.k ? 16 : 0; }
    __device__ void copy_weight(unsigned to) const {
      const int line = block.lane / kPieces, size = bytes();
      const T* from = size ? weight + chunk * kDepth : weight;
#pragma unroll
      for (int i = 0; i < kLines / 4; ++i) copy_async16_once(to + at(line + 4 * i, block.lane % kPieces), from + line_at[i], size);
    }
    __device__ void copy_rows(unsigned to) const {
      const int line = block.lane / kPieces, size = bytes();
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i)
        if (line + 4 * i < rows)
          copy_async16(to + kWeightBytes + at(line + 4 * i, block.lane % kPieces), size ? row[i] + chunk * kDepth : row[i], size);
    }
  };

  // Of a piece, in bytes; permuted so that the eight lines of a matrix meet in no bank.
  static __device__ int at(int line, int piece) { return (line * kPieces + (piece ^ (line & 7))) * 16; }

  using Sum = float[kTiles][2][4];

  __device__ void stream() const {
    const int begin = begin_of(warp), end = begin_of(warp + 1);
    int part = begin / chunks, chunk = begin - part * chunks, left = end - begin;
    Feed feed(*this, part, chunk, left);
    Feed ahead = feed;
#pragma unroll 1
    for (int s = 0; s < kRing - 1; ++s) {
      if (ahead.left > 0) ahead.copy_weight(ring + s * kChunk), ahead.advance();
      commit_copies();
    }
    wait_for_last_launch();
#pragma unroll 1
    for (int s = 0; s < kRing - 1; ++s) {
      if (feed.left > 0) feed.copy_rows(ring + s * kChunk), feed.advance();
      commit_copies();
    }
    int read = 0, write = kRing - 1;
#pragma unroll 1
    while (left > 0) {
      Sum sum = {};
      const int here = min(chunks - chunk, left);
#pragma unroll 1
      for (int i = 0; i < here; ++i) {
        wait_for_copies<kRing - 2>();
        __syncwarp();
        if (feed.left > 0) {
          feed.copy_weight(ring + write * kChunk);
          feed.copy_rows(ring + write * kChunk);
          feed.advance();
        }
        commit_copies();
        multiply(ring + read * kChunk, sum);
        read = read + 1 == kRing ? 0 : read + 1;
        write = write + 1 == kRing ? 0 : write + 1;
      }
      keep(sum, part_of(part), chunk > 0);
      left -= here, chunk = 0, ++part;
    }
  }

  __device__ void multiply(unsigned chunk, Sum& sum) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned r[4];
      load_matrices(r, chunk + kWeightBytes + at(lane % 8, half * 4 + lane / 8));
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          unsigned a[4];
          load_matrices(a, chunk + at(tile * 16 + lane % 16, (half * 2 + step) * 2 + lane / 16));
          const unsigned b[2] = {r[2 * step], r[2 * step + 1]};
          TensorCore<T>::multiply(sum[tile][step], a, b);
        }
    }
  }

  // Sums of a part's rows; of one that another warp began, apart.
  __device__ void keep(const Sum& sum, const Part& own, bool begun) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane % 4 * 2 + i % 2;
      if (row >= own.rows) continue;
      float* to = begun ? rest + (warp * kRows + row) * kLines : sums + slots.order[own.row + row] * kLines;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) to[tile * 16 + lane / 4 + i / 2 * 8] = sum[tile][0][i] + sum[tile][1][i];
    }
  }

  // Adds what warps went on with, in their order.
  __device__ void join() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kLines; i += kThreads)
#pragma unroll 1
      for (int w = 1; w < kWarps; ++w) {
        const int begin = begin_of(w), number = begin / chunks;
        if (begin == number * chunks || begin == begin_of(w + 1)) continue;
        const Part own = part_of(number);
        if (i / kLines < own.rows) sums[slots.order[own.row + i / kLines] * kLines + i % kLines] += rest[w * kRows * kLines + i];
      }
  }

  // Two columns a thread.
  __device__ void store() const {
    constexpr int kPairs = kLines / 2;
    const int tokens = p.slots / p.together;
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * kPairs; i += kThreads) {
      const int token = i / kPairs, column = i % kPairs * 2;
      if (column >= columns) continue;
      float sum[2] = {};
#pragma unroll 4
      for (int slot = token * p.together; slot < (token + 1) * p.together; ++slot) {
        if (expert[slot] == p.experts) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const T y = narrow<T>(sums[slot * kLines + column + j] + bias(expert[slot], first + column + j));
          sum[j] += weights[slot] * widen(y);
        }
      }
      alignas(4) T pair[2] = {narrow<T>(sum[0]), narrow<T>(sum[1])};
      *reinterpret_cast<unsigned*>(static_cast<T*>(p.d) + static_cast<long long>(token) * p.n + first + column) =
          reinterpret_cast<const unsigned&>(pair);
    }
  }
  __device__ float bias(int e, int column) const {
    if constexpr (C::kBias) return widen(static_cast<const T*>(p.bias)[static_cast<long long>(e) * p.n + column]);
    else return 0.f;
  }
};

}  // namespace hexa
