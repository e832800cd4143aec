// Row tiles with the operands of wgmma exchanged: the weight's columns are its 64 rows, and an expert's rows are its columns, which go
// by 16 instead of by 64. So an expert of a few hundred rows is one tile that reads its share of the weight once, with
// hardly any padding.
//
// A tile is BM rows of an expert (at most) x BN = 128 columns of the weight. Each consumer warpgroup has 64 of the columns and all rows.
//
// Accumulator map: lane l holds, of rows 8 j .. + 8 of the tile and column half r, column l / 4 + 8 r of its warp's sixteen, and
// rows 8 j + 2 (l % 4) + {0, 1}. With a gate, the copy engine brings eight gate and eight up columns by turns, so that both of a
// pair are one lane's.
#pragma once
#include <cute/arch/copy_sm90.hpp>

#include <hexa_fx/epilogue/row_sm90.cuh>

namespace hexa::sm90 {

// Adds A (64 x 16) B (16 x Columns) to d. The template writes those that a kernel needs.
template <int Columns>
struct Wgmma;

// An operand in shared memory, as wgmma is told of it: swizzled lines of 128 bytes, along the contraction or across it, 1024 bytes an eight.
CUTE_DEVICE uint64_t swizzled_operand(uint32_t at) {
  constexpr uint32_t kSwizzle128 = 1 << 30, kEightRows = 1024 >> 4, kUnused = 1 << 16;
  return uint64_t(kSwizzle128 | kEightRows) << 32 | kUnused | at >> 4;
}

template <class C>
struct SwappedConsumer {
  using T = typename C::T;
  static constexpr bool kPairs = C::GluMode != Glu::none;
  static constexpr int kColumns = C::RowColumns / 2, kWarpColumns = kColumns / 4;  // result columns of a warpgroup, of a warp
  // Results leave in sheets of 32 rows x kColumns, which the four warps of a warpgroup fill together.
  static constexpr int kSheetRows = 32, kRowBytes = kColumns * 2, kSheetBytes = kSheetRows * kRowBytes, kPieces = kRowBytes / 16;
  static constexpr int kSheets = 4 * C::StageBytes / kSheetBytes;
  static_assert(kSheets >= 2, "a sheet is written while the one before it leaves");
  static_assert(C::BN == 128 && C::BM % kSheetRows == 0);

  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  int group;  // consumer warpgroup, 0 or 1
  Pipe pipe;
  int turn = 0;  // the sheet that is written next; it is free

  CUTE_DEVICE int thread() const { return threadIdx.x & 127; }
  CUTE_DEVICE bool sends() const { return thread() == 0; }  // one for all sheets: bulk groups are a thread's own
  CUTE_DEVICE int first_column(const Tile& t) const { return t.n0 + group * kColumns; }

  // The tile's product with `Rows` rows, of which some may be another tile's: their results go nowhere.
  template <int Rows>
  CUTE_DEVICE void multiply(const Tile& t, float (&acc)[C::BM / 2]) {
    constexpr int kFirst = Rows > 256 ? 256 : Rows;  // as many as an instruction takes
    constexpr int kStepA = C::WeightKN ? 16 * 128 : 32, kStepB = 32;  // bytes from one sixteen of the contraction to the next
    const uint32_t a0 = cast_smem_ptr_to_uint(sm.b[0]) + group * (64 * 128), b0 = cast_smem_ptr_to_uint(sm.a[0]);
    auto fence = [&] {
      CUTE_UNROLL
      for (int i = 0; i < Rows / 2; ++i) warpgroup_fence_operand(acc[i]);
    };
    CUTE_UNROLL
    for (int i = 0; i < Rows / 2; ++i) acc[i] = 0.f;
    fence();
    int previous = -1;
#pragma unroll 1
    for (int k = 0; k < t.k_tiles; ++k) {
      Barrier::wait(&sm.full[pipe.index], pipe.phase);
      if constexpr (C::GatherRows) cutlass::arch::fence_view_async_shared();
      const uint32_t a = a0 + pipe.index * Smem<C>::BBytes, b = b0 + pipe.index * Smem<C>::ABytes;
      warpgroup_arrive();
      CUTE_UNROLL
      for (int kk = 0; kk < C::BK / 16; ++kk) {
        const uint64_t weight = swizzled_operand(a + kk * kStepA);
        Wgmma<kFirst>::add(weight, swizzled_operand(b + kk * kStepB), acc);
        if constexpr (Rows > kFirst)
          Wgmma<Rows - kFirst>::add(weight, swizzled_operand(b + kk * kStepB + kFirst * 128), acc + kFirst / 2);
      }
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      if (previous >= 0) release(previous);
      previous = pipe.index;
      pipe.template next<C::Stages>();
    }
    warpgroup_wait<0>();
    fence();
    if (previous >= 0) release(previous);
  }
  // A stage that a cluster shares is free when both CTAs have read it.
  CUTE_DEVICE void release(int stage) {
    if constexpr (C::Cluster == 1) {
      if (lane_id() == 0) Barrier::arrive(&sm.empty[stage]);
    } else {
      if (lane_id() < C::Cluster) Barrier::arrive(&sm.empty[stage], lane_id(), 1);
    }
  }

  // The narrowest of the widths that holds the tile's rows. Outside of the main loop, so that each loop is as simple as any.
  template <int... Rows>
  CUTE_DEVICE void multiply(int_sequence<Rows...>, const Tile& t, float (&acc)[C::BM / 2]) {
    bool done = false;
    ((!done && t.rows <= Rows ? (multiply<Rows>(t, acc), done = true) : false), ...);
  }

  // The lane's bias of columns `column` and, a pair's up or 8 further on.
  CUTE_DEVICE float bias(const Tile& t, int half) const {
    if constexpr (!C::Bias) return 0.f;
    const int own = first_column(t) + warp_in_group() * kWarpColumns + (lane_id() >> 2) + (kPairs ? 0 : 8 * half);
    const int64_t at = int64_t(t.expert) * p.bias_ld + own + (kPairs ? half * p.N : 0);
    return own < p.N ? float(static_cast<const T*>(p.bias)[at]) : 0.f;
  }

  CUTE_DEVICE void row_tile(const Tile& t) {
    float acc[C::BM / 2];
    const float add[2] = {bias(t, 0), bias(t, 1)};
    multiply(typename C::Widths{}, t, acc);
    CUTE_UNROLL
    for (int s = 0; s < C::BM / kSheetRows; ++s) {
      if (s * kSheetRows >= t.rows) break;
      // of eights j of the sheet's rows and column half r
      auto value = [&](int j, int r, int i) {
        const float x = acc[16 * s + 4 * j + 2 * r + i];
        if constexpr (C::Bias) return x + add[r];
        else return x;
      };
      auto plain = [&](int j, int r) { return pack<T>(value(j, r, 0), value(j, r, 1)); };
      const int column = first_column(t);
      if constexpr (C::Kind == Epilogue::store) sheet(t, s, p.out, p.out_ld, kOutMap, column, plain);
      else if constexpr (kPairs) {
        if constexpr (C::StoreH) {
          sheet(t, s, p.out, p.out_ld, kOutMap, column, [&](int j, int) { return plain(j, 0); });
          sheet(t, s, p.out, p.out_ld, kOutMap, p.N + column, [&](int j, int) { return plain(j, 1); });
        }
        sheet(t, s, p.act, p.act_ld, kActMap, column, [&](int j, int) {
          return pack<T>(glu<C::Activation>(value(j, 0, 0), value(j, 1, 0), p.act_params),
                         glu<C::Activation>(value(j, 0, 1), value(j, 1, 1), p.act_params));
        });
      } else {
        if constexpr (C::StoreH) sheet(t, s, p.out, p.out_ld, kOutMap, column, plain);
        sheet(t, s, p.act, p.act_ld, kActMap, column, [&](int j, int r) {
          float unused;
          return pack<T>(activate<C::Activation, false>(value(j, r, 0), unused), activate<C::Activation, false>(value(j, r, 1), unused));
        });
      }
    }
  }

  // A sheet: rows 32 s .. + 32 of the tile, columns `column` .. + kColumns of a result. `words(j, r)` packs two rows of eight j, column
  // half r. One barrier a sheet: behind it all have written this one, and the next one's place is free.
  template <class Words>
  CUTE_DEVICE void sheet(const Tile& t, int s, const void* result, int ld, Map map, int column, Words words) {
    uint8_t* base = sm.stage[4 * group] + turn * kSheetBytes;
    CUTE_UNROLL
    for (int r = 0; r < kWarpColumns / 8; ++r) {
      const int piece = warp_in_group() * (kWarpColumns / 8) + r;
      SM90_U16x8_STSM_T::copy(words(0, r), words(1, r), words(2, r), words(3, r), *reinterpret_cast<uint128_t*>(at(base, lane_id(), piece)));
    }
    cutlass::arch::fence_view_async_shared();
    if (sends()) tma_store_wait<kSheets - 2>();
    cutlass::arch::NamedBarrier::sync(128, kStageBarrier + group);
    const int row = s * kSheetRows;
    if (row + kSheetRows <= t.rows && first_column(t) + kColumns <= p.N) {
      if (sends()) SM90_TMA_STORE_2D::copy(maps + map, base, column, t.row0 + row);
    } else {
      T* first = static_cast<T*>(const_cast<void*>(result)) + (int64_t(t.row0) + row) * ld + column;
      each_piece(min(t.rows - row, kSheetRows), t, [&](int r, int piece) {
        *reinterpret_cast<uint4*>(first + int64_t(r) * ld + piece * 8) = *reinterpret_cast<const uint4*>(at(base, r, piece));
      });
    }
    if (sends()) tma_store_arrive();  // a group a sheet, an empty one too: `wait` counts them
    turn = turn + 1 == kSheets ? 0 : turn + 1;
  }
  // Piece of 16 bytes of a sheet's row, as the copy engine swizzles rows of 64 or 128 bytes.
  static CUTE_DEVICE uint8_t* at(uint8_t* base, int row, int piece) {
    return base + row * kRowBytes + ((piece ^ ((kPieces == 8 ? row : row >> 1) & (kPieces - 1))) << 4);
  }
  // Of `rows` rows, the pieces of the warpgroup's columns that exist, a thread each.
  template <class Each>
  CUTE_DEVICE void each_piece(int rows, const Tile& t, Each each) const {
    const int piece = thread() % kPieces;
    if (first_column(t) + piece * 8 >= p.N) return;
    for (int r = thread() / kPieces; r < rows; r += 128 / kPieces) each(r, piece);
  }

  CUTE_DEVICE void zero_tile(const Tile& t) {
    auto clear = [&](void* result, int ld, int column) {
      T* first = static_cast<T*>(result) + int64_t(t.row0) * ld + column;
      each_piece(t.rows, t, [&](int r, int piece) { *reinterpret_cast<uint4*>(first + int64_t(r) * ld + piece * 8) = uint4{}; });
    };
    const int column = first_column(t);
    if (C::Kind == Epilogue::store || C::StoreH) {
      clear(p.out, p.out_ld, column);
      if (kPairs) clear(p.out, p.out_ld, p.N + column);
    }
    if (C::Kind == Epilogue::activate) clear(p.act, p.act_ld, column);
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (t.kind == kRowTile) row_tile(t);
      else zero_tile(t);
    }
    if (sends()) tma_store_wait<0>();  // shared memory lasts as long as it is read
  }
};

}  // namespace hexa::sm90
