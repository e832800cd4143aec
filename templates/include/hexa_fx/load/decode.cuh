// What a block copies for a product of few tokens, stage by stage and tile by tile, and where a lane finds it in shared memory.
//
// A stage is 16 KiB of the weight, four pieces of 16 bytes a thread, and the same k of the expert's rows. Lines in shared memory are permuted
// by 16 bytes so that the eight lines of a matrix meet in no bank.
#pragma once
#include <hexa_fx/ptx/sm80.cuh>
#include <hexa_fx/scheduler/share.cuh>
#include <hexa_fx/scheduler/slots.cuh>
#include <hexa_fx/types/decode.cuh>
#include <hexa_fx/types/places.cuh>

namespace hexa {

template <class C>
struct DecodeStage {
  static constexpr int kLineBytes = C::kDepth * int(sizeof(typename C::T));
  static constexpr int kWeightBytes = C::kLines * kLineBytes, kRowBytes = C::kRows * kLineBytes;
  static constexpr int kBytes = kWeightBytes + kRowBytes;
  static constexpr int kPass = 16 * C::kThreads;  // bytes that all threads copy with an instruction
  static constexpr int kPieces = 4;               // of a thread
  static_assert(kWeightBytes == kPieces * kPass);
  // 16-byte pieces in a line of the weight, and in a row of x.
  static constexpr int kWeightPieces = (C::kAlongK ? C::kDepth : C::kLines) / 8, kRowPieces = C::kDepth / 8;

  // Of a piece, in bytes. Lines of 64 bytes: two lie side by side in what all banks hold.
  template <int kPieces>
  static __device__ int at(int line, int piece) {
    const int turn = kPieces >= 8 ? line & 7 : line >> 1 & 3;
    return (line * kPieces + (piece ^ turn)) * 16;
  }
};

// Goes over a block's units of work and the stages of each.
template <class C, class Slots, class Share>
struct DecodeFeed {
  using T = typename C::T;
  using Stage = DecodeStage<C>;
  // Lines of the weight, and rows of x, from one piece of a thread to its next.
  static constexpr int kWeightStep = C::kThreads / Stage::kWeightPieces, kRowStep = C::kThreads / Stage::kRowPieces;
  static constexpr int kRowCopies = C::kRows > kRowStep ? C::kRows / kRowStep : 1;
  static constexpr int kHalf = C::kLines / 2;  // columns of a tile; gate and up where there is a gate

  const DecodeParams& p;
  const Slots& slots;
  const Share& share;
  int depth = 0;  // first k of the stage
  DecodeWork work;
  const T* weight[2];  // of this thread's first piece at k = 0: of both halves, or where lines run across k of its own half
  int left[2];         // columns of each half that exist
  const T* row[kRowCopies];

  __device__ DecodeFeed(const DecodeParams& p_, const Slots& slots_, const Share& share_, const DecodeWork& start)
      : p(p_), slots(slots_), share(share_), work(start) {
    locate();
  }

  __device__ bool more() const { return !Share::none(work); }

  // To the stage behind.
  __device__ void advance() {
    depth += C::kDepth;
    if (depth < p.k) return;
    depth = 0;
    work = share.behind(work);
    if (more()) locate();
  }

  __device__ void copy_weight(unsigned stage) const {
    const int line = threadIdx.x / Stage::kWeightPieces, piece = threadIdx.x % Stage::kWeightPieces;
    const unsigned to = stage + Stage::template at<Stage::kWeightPieces>(line, piece);
#pragma unroll
    for (int i = 0; i < Stage::kPieces; ++i) {
      const T* from;
      const bool there = locate_piece(i, line, piece, from);
      copy_async16_once(to + i * Stage::kPass, from, there ? 16 : 0);
    }
  }
  __device__ void copy_rows(unsigned stage) const {
    const int r = threadIdx.x / Stage::kRowPieces, piece = threadIdx.x % Stage::kRowPieces;
    const unsigned to = stage + Stage::kWeightBytes + Stage::template at<Stage::kRowPieces>(r, piece);
    if (r >= C::kRows) return;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const bool there = row[i] != nullptr && depth + 8 * piece < p.k;
      copy_async16(to + i * Stage::kPass, there ? row[i] + depth : static_cast<const T*>(p.x), there ? 16 : 0);
    }
  }

 private:
  // Where the thread's piece i is, and whether it exists.
  __device__ bool locate_piece(int i, int line, int piece, const T*& from) const {
    bool there;
    if constexpr (C::kAlongK) {
      const int half = i / 2, column = line + i % 2 * kWeightStep, k = depth + 8 * piece;
      there = column < left[half] && k < p.k;
      from = weight[half] + (there ? i % 2 * kWeightStep * p.w_line + depth : 0);
    } else {
      const int k = depth + line + i * kWeightStep;
      there = piece % (kHalf / 8) * 8 < left[0] && k < p.k;
      from = weight[0] + (there ? (depth + i * kWeightStep) * p.w_line : 0);
    }
    if (!there) from = static_cast<const T*>(p.w);
    return there;
  }

  // Column of the weight where a half of the tile begins, and how many columns of the tile it has.
  __device__ void begin_half(int half, long long& column, int& columns) const {
    constexpr bool kBoth = C::kGlu == Glu::concat || C::kGlu == Glu::split;
    constexpr int kTurns = C::kGlu == Glu::interleaved ? 2 : 1;
    const int before = kBoth ? 0 : half * kHalf;
    columns = min(work.columns, p.n - work.column) * kTurns - before;
    column = work.column * kTurns + before + (C::kGlu == Glu::concat && half == 1 ? static_cast<long long>(p.n) : 0);
  }
  // The expert's weight that holds a half, which begins at a column; of listed experts the column becomes that of the matrix.
  __device__ const T* of_half(int half, long long& column) const {
    const bool split_up = C::kGlu == Glu::split && half == 1;
    long long place = work.expert;
    if constexpr (C::kListed) {
      const Matrices at = Matrices::of<C::kGlu == Glu::split>(p, work.expert);
      int line = C::kAlongK ? int(column) : 0;
      place = split_up ? at.up : at.holding(line);
      if (C::kAlongK) column = line;
    }
    return static_cast<const T*>(split_up ? p.w2 : p.w) + place * p.w_expert;
  }

  __device__ void locate() {
    const int line = threadIdx.x / Stage::kWeightPieces, piece = threadIdx.x % Stage::kWeightPieces;
    long long column;
    if constexpr (C::kAlongK) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        begin_half(half, column, left[half]);
        const T* own = of_half(half, column);
        weight[half] = own + (column + line) * p.w_line + 8 * piece;
      }
    } else {
      const int half = piece / (kHalf / 8);
      begin_half(half, column, left[0]);
      const T* own = of_half(half, column);
      weight[0] = own + line * p.w_line + column + piece % (kHalf / 8) * 8;
    }
    const int r = threadIdx.x / Stage::kRowPieces, first = work.part * C::kRows;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const int at = r + i * kRowStep, number = first + at;
      row[i] = nullptr;
      if (at < C::kRows && number < work.rows)
        row[i] = static_cast<const T*>(p.x) + p.top_k(slots.order[work.first_row + number]) * p.x_stride +
                 threadIdx.x % Stage::kRowPieces * 8;
    }
  }
};

}  // namespace hexa
