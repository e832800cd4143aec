// What a consumer warpgroup does with one swapped tile. See mma/swapped_sm90.cuh.
//
// Accumulator map: lane l holds, of rows 8 j .. + 8 of the tile and column half r, column l / 4 + 8 r of its warp's sixteen, and
// rows 8 j + 2 (l % 4) + {0, 1}. With a gate, the copy engine brings eight gate and eight up columns by turns, so that both of a
// pair are one lane's.
#pragma once
#include <hexa_fx/epilogue/sheet_sm90.cuh>
#include <hexa_fx/mma/swapped_sm90.cuh>
#include <hexa_fx/ptx/sm90.cuh>
#include <hexa_fx/scheduler/ring_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct SwappedConsumer {
  using T = typename C::T;
  static constexpr bool kPairs = C::GluMode != Glu::none;
  static_assert(C::BN == 128 && C::BM % Sheets<C>::kRows == 0);

  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  int group;  // consumer warpgroup, 0 or 1
  Pipe pipe;
  Sheets<C> sheets;

  CUTE_DEVICE SwappedConsumer(Smem<C>& sm, const GroupedParams& p, const TmaDescriptor* maps, int group)
      : sm(sm), p(p), maps(maps), group(group), sheets{sm, p, maps, group} {}

  // The lane's bias of columns `column` and, a pair's up or 8 further on.
  CUTE_DEVICE float bias(const Tile& t, int half) const {
    if constexpr (!C::Bias) return 0.f;
    const int own = sheets.first_column(t) + warp_in_group() * Sheets<C>::kWarpColumns + (lane_id() >> 2) + (kPairs ? 0 : 8 * half);
    const int64_t at = int64_t(t.expert) * p.bias_ld + own + (kPairs ? half * p.N : 0);
    return own < p.N ? float(static_cast<const T*>(p.bias)[at]) : 0.f;
  }

  CUTE_DEVICE void row_tile(const Tile& t) {
    float acc[C::BM / 2];
    const float add[2] = {bias(t, 0), bias(t, 1)};
    SwappedLoop<C>{sm, group, low_rank_steps<C>(p)}.run(typename C::Widths{}, pipe, t, acc);
    CUTE_UNROLL
    for (int s = 0; s < C::BM / Sheets<C>::kRows; ++s) {
      if (s * Sheets<C>::kRows >= t.rows) break;
      // of eights j of the sheet's rows and column half r
      auto value = [&](int j, int r, int i) {
        const float x = acc[16 * s + 4 * j + 2 * r + i];
        if constexpr (C::Bias) return x + add[r];
        else return x;
      };
      auto plain = [&](int j, int r) { return pack<T>(value(j, r, 0), value(j, r, 1)); };
      const int column = sheets.first_column(t);
      if constexpr (C::Kind == Epilogue::store) sheets.put(t, s, p.out, p.out_ld, kOutMap, column, plain);
      else if constexpr (kPairs) {
        if constexpr (C::StoreH) {
          sheets.put(t, s, p.out, p.out_ld, kOutMap, column, [&](int j, int) { return plain(j, 0); });
          sheets.put(t, s, p.out, p.out_ld, kOutMap, p.N + column, [&](int j, int) { return plain(j, 1); });
        }
        sheets.put(t, s, p.act, p.act_ld, kActMap, column, [&](int j, int) {
          return pack<T>(glu<C::Activation>(value(j, 0, 0), value(j, 1, 0), p.act_params),
                         glu<C::Activation>(value(j, 0, 1), value(j, 1, 1), p.act_params));
        });
      } else {
        if constexpr (C::StoreH) sheets.put(t, s, p.out, p.out_ld, kOutMap, column, plain);
        sheets.put(t, s, p.act, p.act_ld, kActMap, column, [&](int j, int r) {
          float unused;
          return pack<T>(activate<C::Activation, false>(value(j, r, 0), unused),
                         activate<C::Activation, false>(value(j, r, 1), unused));
        });
      }
    }
  }

  CUTE_DEVICE void zero_tile(const Tile& t) const {
    const int column = sheets.first_column(t);
    if (C::Kind == Epilogue::store || C::StoreH) {
      sheets.clear(t, p.out, p.out_ld, column);
      if (kPairs) sheets.clear(t, p.out, p.out_ld, p.N + column);
    }
    if (C::Kind == Epilogue::activate) sheets.clear(t, p.act, p.act_ld, column);
  }

  CUTE_DEVICE void run() {
    TileReader<C> reader;
    while (true) {
      const Tile t = reader.next(sm);
      if (t.kind == kEnd) break;
      if (t.kind == kRowTile) row_tile(t);
      else zero_tile(t);
    }
    if (sheets.sends()) tma_store_wait<0>();  // shared memory lasts as long as it is read
  }
};

}  // namespace hexa::sm90
