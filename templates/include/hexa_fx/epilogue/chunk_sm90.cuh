// What every epilogue of the row and weight tiles writes through: chunks of 16 rows x a line of 128 bytes, in a warp's own shared memory,
// from where the copy engine stores them while the warp goes on. Chunks with rows or columns that must not be written go out by
// predicated 16-byte stores.
//
// Accumulator map: lane l holds, of 8-column group j and row half r, row l / 4 + 8 r and columns 8 j + 2 (l % 4) + {0, 1}.
#pragma once
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include <hexa_fx/kernels/smem_sm90.cuh>
#include <hexa_fx/ptx/sm90.cuh>

namespace hexa::sm90 {

// One chunk in shared memory: 16 lines of 128 bytes, swizzled as the copy engine has it.
struct Chunk {
  uint8_t* base;
  CUTE_DEVICE uint32_t* pair(int row, int group, int word) const {
    return reinterpret_cast<uint32_t*>(base + row * kLineBytes + (swizzled_by_lane(row, group) << 4) + word * 4);
  }
  CUTE_DEVICE uint4* piece(int row, int c) const {
    return reinterpret_cast<uint4*>(base + row * kLineBytes + (swizzled_by_lane(row, c) << 4));
  }
  // A chunk of floats: 16 rows x 32.
  CUTE_DEVICE float2* floats(int row, int pair) const {
    return reinterpret_cast<float2*>(base + row * kLineBytes + (swizzled_piece(row, pair >> 1) << 4) + (pair & 1) * 8);
  }
  // The same turned round: 32 rows x 16, rows of 64 bytes.
  CUTE_DEVICE float* turned(int row, int column) const {
    return reinterpret_cast<float*>(base + row * 64 + (swizzled_piece<64>(row, column >> 2) << 4) + (column & 3) * 4);
  }
  // Where a lane points ldmatrix and stmatrix for groups j and j + 1 (j even): four 8 x 8 matrices, row halves first.
  CUTE_DEVICE uint128_t& matrices(int j) const {
    const int l = lane_id(), z = l >> 3, row = (l & 7) + 8 * (z & 1);
    return *reinterpret_cast<uint128_t*>(base + row * kLineBytes + ((((z >> 1) ^ (l & 7)) ^ j) << 4));
  }
  // 8-column groups 2 i and 2 i + 1: words by group and row half.
  CUTE_DEVICE void put(int i, const uint32_t (&x)[2][2]) const {
    SM90_U32x4_STSM_N::copy(x[0][0], x[0][1], x[1][0], x[1][1], matrices(2 * i));
  }
  // `value(j, r)` packs the pair of 8-column group j and row half r.
  template <class Value>
  CUTE_DEVICE void put(Value value) const {
    CUTE_UNROLL
    for (int j = 0; j < 8; j += 2) SM90_U32x4_STSM_N::copy(value(j, 0), value(j, 1), value(j + 1, 0), value(j + 1, 1), matrices(j));
  }
};

// A consumer warp's chunks. Chunk i of the four warps of a warpgroup lie one after another: 64 rows.
template <class C>
struct Outbox {
  static constexpr int kChunks = C::StagingBytes / kChunkBytes;
  uint8_t* base;
  int turn = 0;
  CUTE_DEVICE Outbox(Smem<C>& sm, int group) : base(sm.staging[4 * group] + warp_in_group() * kChunkBytes) {}
  CUTE_DEVICE Chunk at(int i) const { return {base + i * (4 * kChunkBytes)}; }
  // The lane that starts copies: the same for all of a kernel's, for bulk groups are a lane's own. See Copier.
  static CUTE_DEVICE bool sends() { return C::WeightOp && C::GatherWeight ? cute::elect_one_sync() : lane_id() == 0; }
  // Waits until the copy engine has read all but the newest `Pending` chunks (one bulk group each).
  template <int Pending>
  CUTE_DEVICE void wait() const {
    tma_store_wait<Pending>();  // lanes without groups pass
    __syncwarp();
  }
  CUTE_DEVICE Chunk next() {
    wait<kChunks - 1>();
    const Chunk free = at(turn);
    turn = turn + 1 == kChunks ? 0 : turn + 1;
    return free;
  }
};

// Where a warp's 16 rows of a result lie.
template <class T>
struct Rows {
  T* base;  // row 0 of the chunk
  int64_t ld;
  int valid;  // rows of the 16 that exist
  const TmaDescriptor* map;
  int x, y;  // of base, in the map

  CUTE_DEVICE Rows right(int columns) const { return {base + columns, ld, valid, map, x + columns, y}; }
  // A line's columns from `column` on, of `columns`; `Full`: all of them, and all rows, exist. Every lane has written the chunk; one `sends` it,
  // as a bulk group.
  template <bool Full>
  CUTE_DEVICE void store(const Chunk& chunk, int column, int columns, bool sends) const {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if constexpr (!Full) direct(chunk, column, columns);
    else if (sends) send(chunk, column);
    if (sends) tma_store_arrive();
  }
  CUTE_DEVICE void send(const Chunk& chunk, int column) const { SM90_TMA_STORE_2D::copy(map, chunk.base, x + column, y); }
  CUTE_DEVICE void direct(const Chunk& chunk, int column, int columns) const {
    constexpr int kPiece = kPieceBytes * 8 / sizeof_bits_v<T>;
    const int c = lane_id() & 7, n = column + c * kPiece;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = (lane_id() >> 3) + 4 * i;
      const uint4 d = *chunk.piece(r, c);
      if (r < valid && n < columns) *reinterpret_cast<uint4*>(base + r * ld + n) = d;
    }
  }
};

// The accumulators of a thread as chunks of 32, in the order of the tile. A loop works on the first and moves the rest down, so
// that it may be rolled: the gradient's is at edges. Where it is unrolled, nothing moves.
template <int Chunks>
struct Values {
  float x[Chunks][32];
  template <class Acc>
  CUTE_DEVICE explicit Values(const Acc& acc) {
    CUTE_UNROLL
    for (int i = 0; i < Chunks * 32; ++i) x[i / 32][i % 32] = acc(i);
  }
  template <int By>
  CUTE_DEVICE void advance() {
    CUTE_UNROLL
    for (int i = 0; i + By < Chunks; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < 32; ++j) x[i][j] = x[i + By][j];
    }
  }
};

}  // namespace hexa::sm90
