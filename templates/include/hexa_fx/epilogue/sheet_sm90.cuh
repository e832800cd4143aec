// Results of swapped tiles leave in sheets of 32 rows x the columns of a warpgroup, which its four warps fill together.
#pragma once
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include <hexa_fx/kernels/smem_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct Sheets {
  using T = typename C::T;
  static constexpr int kPiece = C::Operand::kPiece;
  static constexpr int kColumns = C::RowColumns / 2, kWarpColumns = kColumns / 4;  // result columns of a warpgroup, of a warp
  static constexpr int kRows = 32, kRowBytes = C::Operand::bytes(kColumns), kBytes = kRows * kRowBytes,
                       kPieces = kRowBytes / kPieceBytes;
  static constexpr int kSheets = 4 * C::StagingBytes / kBytes;
  static_assert(kSheets >= 2, "a sheet is written while the one before it leaves");

  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  int group;     // consumer warpgroup, 0 or 1
  int turn = 0;  // the sheet that is written next; it is free

  CUTE_DEVICE int thread() const { return threadIdx.x & 127; }
  CUTE_DEVICE bool sends() const { return thread() == 0; }  // one for all sheets: bulk groups are a thread's own
  CUTE_DEVICE int first_column(const Tile& t) const { return t.n0 + group * kColumns; }

  // A sheet: rows 32 s .. + 32 of the tile, columns `column` .. + kColumns of a result. `words(j, r)` packs two rows of eight j, column
  // half r. One barrier a sheet: behind it all have written this one, and the next one's place is free.
  template <class Words>
  CUTE_DEVICE void put(const Tile& t, int s, const void* result, int ld, Map map, int column, Words words) {
    uint8_t* base = sm.staging[4 * group] + turn * kBytes;
    CUTE_UNROLL
    for (int r = 0; r < kWarpColumns / 8; ++r) {
      const int piece = warp_in_group() * (kWarpColumns / 8) + r;
      SM90_U16x8_STSM_T::copy(words(0, r), words(1, r), words(2, r), words(3, r),
                              *reinterpret_cast<uint128_t*>(at(base, lane_id(), piece)));
    }
    cutlass::arch::fence_view_async_shared();
    if (sends()) tma_store_wait<kSheets - 2>();
    NamedBarrier::sync(128, kStageBarrier + group);
    const int row = s * kRows;
    if (row + kRows <= t.rows && first_column(t) + kColumns <= p.N) {
      if (sends()) SM90_TMA_STORE_2D::copy(maps + map, base, column, t.row0 + row);
    } else {
      T* first = static_cast<T*>(const_cast<void*>(result)) + (int64_t(t.row0) + row) * ld + column;
      each_piece(min(t.rows - row, kRows), t, [&](int r, int piece) {
        *reinterpret_cast<uint4*>(first + int64_t(r) * ld + piece * kPiece) = *reinterpret_cast<const uint4*>(at(base, r, piece));
      });
    }
    if (sends()) tma_store_arrive();  // a group a sheet, an empty one too: `wait` counts them
    turn = turn + 1 == kSheets ? 0 : turn + 1;
  }
  // Zeros in the tile's rows.
  CUTE_DEVICE void clear(const Tile& t, void* result, int ld, int column) const {
    T* first = static_cast<T*>(result) + int64_t(t.row0) * ld + column;
    each_piece(t.rows, t, [&](int r, int piece) { *reinterpret_cast<uint4*>(first + int64_t(r) * ld + piece * kPiece) = uint4{}; });
  }

 private:
  static CUTE_DEVICE uint8_t* at(uint8_t* base, int row, int piece) {
    return base + row * kRowBytes + (swizzled_piece<kRowBytes>(row, piece) << 4);
  }
  // Of `rows` rows, the pieces of the warpgroup's columns that exist, a thread each.
  template <class Each>
  CUTE_DEVICE void each_piece(int rows, const Tile& t, Each each) const {
    const int piece = thread() % kPieces;
    if (first_column(t) + piece * kPiece >= p.N) return;
    for (int r = thread() / kPieces; r < rows; r += 128 / kPieces) each(r, piece);
  }
};

}  // namespace hexa::sm90
