// Row tiles: accumulators -> (bias, activation) -> memory.
#pragma once
#include <hexa_fx/epilogue/chunk_sm90.cuh>

namespace hexa::sm90 {

template <class C>
struct RowEpilogue {
  using T = typename C::T;
  using F = typename C::F;
  static constexpr int kLine = C::Operand::kLine;  // columns of a chunk
  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  const Tile& t;
  Outbox<C>& box;

  CUTE_DEVICE Rows<T> rows(const void* base, int ld, int row, Map map) const {
    T* first = static_cast<T*>(const_cast<void*>(base));
    return {first + (int64_t(t.row0) + row) * ld, ld, t.rows - row, maps + map, 0, t.row0 + row};
  }
  CUTE_DEVICE float2 bias2(const void* bias, int64_t at, bool inside) const {
    return inside ? unpack<T>(__ldg(reinterpret_cast<const uint32_t*>(static_cast<const T*>(bias) + at))) : float2{0.f, 0.f};
  }

  // A chunk of values; see Chunk::put.
  template <bool Full, class Value>
  CUTE_DEVICE void chunk(const Rows<T>& out, int column, int columns, Value value) const {
    if (!Full && column >= columns) return;
    const Chunk s = box.next();
    s.put(value);
    out.template store<Full>(s, column, columns, Outbox<C>::sends());
  }

  // A pair of values (+ bias), columns `first` .. + kLine of a `columns` wide weight or half of it.
  CUTE_DEVICE float2 pair(const F (&x)[32], int j, int r, const void* bias, int64_t at, int first, int columns) const {
    const int i = 2 * r + 4 * j, n = first + j * 8 + (lane_id() & 3) * 2;
    if constexpr (!C::Bias) return {x[i], x[i + 1]};
    const float2 b = bias2(bias, int64_t(t.expert) * p.bias_ld + at + n, n < columns);
    return {x[i] + b.x, x[i + 1] + b.y};
  }

  // Chunk of the plain result: columns `first` .. + kLine.
  template <bool Full>
  CUTE_DEVICE void plain(const F (&x)[32], const Rows<T>& out, int first, int columns) const {
    chunk<Full>(out, first, columns, [&](int j, int r) {
      const float2 v = pair(x, j, r, p.bias, 0, first, columns);
      return pack<T>(v.x, v.y);
    });
  }

  template <bool Full>
  CUTE_DEVICE void ungated(const F (&x)[32], const Rows<T>& out, const Rows<T>& act, int first) const {
    if constexpr (C::StoreH) plain<Full>(x, out, first, p.N);
    chunk<Full>(act, first, p.N, [&](int j, int r) {
      const float2 v = pair(x, j, r, p.bias, 0, first, p.N);
      float unused;
      return pack<T>(activate<C::Activation, false>(v.x, unused), activate<C::Activation, false>(v.y, unused));
    });
  }

  // Gate columns in the tile's left half, up columns in its right half.
  template <bool Full>
  CUTE_DEVICE void gated(const F (&xg)[32], const F (&xu)[32], const Rows<T>& out, const Rows<T>& act, int first) const {
    const void* up_bias = C::SplitWeight ? p.bias_up : p.bias;
    const int64_t up_at = C::SplitWeight ? 0 : p.N;
    auto gate = [&](int j, int r) { return pair(xg, j, r, p.bias, 0, first, p.N); };
    auto up = [&](int j, int r) { return pair(xu, j, r, up_bias, up_at, first, p.N); };
    if constexpr (C::StoreH) {
      const Rows<T> out_up = out.right(p.N);
      chunk<Full>(out, first, p.N, [&](int j, int r) {
        const float2 g = gate(j, r);
        return pack<T>(g.x, g.y);
      });
      chunk<Full>(out_up, first, p.N, [&](int j, int r) {
        const float2 u = up(j, r);
        return pack<T>(u.x, u.y);
      });
    }
    chunk<Full>(act, first, p.N, [&](int j, int r) {
      const float2 g = gate(j, r), u = up(j, r);
      return pack<T>(glu<C::Activation>(g.x, u.x, p.act_params), glu<C::Activation>(g.y, u.y, p.act_params));
    });
  }

  // Two chunks whose even columns are gate and odd ones up. Lane pairs trade groups so that each packs two neighbouring results.
  template <bool Full>
  CUTE_DEVICE void interleaved(const F (&x0)[32], const F (&x1)[32], const Rows<T>& out, const Rows<T>& act, int first) const {
    const int l = lane_id(), odd = l & 1, columns = 2 * p.N;
    if (!Full && 2 * first >= columns) return;
    if constexpr (C::StoreH) {
      plain<Full>(x0, out, 2 * first, columns);
      plain<Full>(x1, out, 2 * first + kLine, columns);
    }
    const Chunk s = box.next();
    CUTE_UNROLL
    for (int j = 0; j < 16; j += 2) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float a[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float2 x = pair(j < 8 ? x0 : x1, (j + i) % 8, r, p.bias, 0, 2 * first + j / 8 * kLine, columns);
          a[i] = glu<C::Activation>(x.x, x.y, p.act_params);
        }
        const float theirs = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 1);
        *s.pair((l >> 2) + 8 * r, j / 2, odd * 2 + ((l & 3) >> 1)) = odd ? pack<T>(theirs, a[1]) : pack<T>(a[0], theirs);
      }
    }
    act.template store<Full>(s, first, p.N, Outbox<C>::sends());
  }

  // All of a warp's rows: block m starts at row `block_row(m)` of the tile.
  template <class Acc, class BlockRow>
  CUTE_DEVICE void run(const Acc& acc, BlockRow block_row) const {
    constexpr int kBlocks = C::Blocks, kChunks = C::BN / kLine;
    constexpr bool kPairs = C::Kind == Epilogue::activate && C::GluMode != Glu::none;
    constexpr int kUnits = kPairs ? kChunks / 2 : kChunks;  // of a block
    static_assert(!kPairs || kBlocks == 1 || kUnits == 1, "units of two chunks lie a fixed distance apart");
    constexpr int kStep = !kPairs ? 1 : (kBlocks > 1 || C::GluMode == Glu::interleaved ? 2 : 1);
    constexpr int kSecond = !kPairs ? 0 : (C::GluMode == Glu::interleaved ? 1 : kUnits);
    auto all = [&](auto full) {
      constexpr bool kFull = decltype(full)::value;
      Values<kBlocks * kChunks> v(acc);
      CUTE_UNROLL
      for (int i = 0; i < kBlocks * kUnits; ++i) {
        const int row = block_row(i / kUnits), first = t.n0 + (i % kUnits) * kLine;
        if (kFull || row < t.rows) {
          const Rows<T> out = rows(p.out, p.out_ld, row, kOutMap), act = rows(p.act, p.act_ld, row, kActMap);
          if constexpr (C::Kind == Epilogue::store) plain<kFull>(v.x[0], out, first, p.N);
          else if constexpr (C::GluMode == Glu::none) ungated<kFull>(v.x[0], out, act, first);
          else if constexpr (C::GluMode == Glu::interleaved) interleaved<kFull>(v.x[0], v.x[1], out, act, first);
          else gated<kFull>(v.x[0], v.x[kSecond], out, act, first);
        }
        v.template advance<kStep>();
      }
    };
    if (block_row(kBlocks - 1) + 16 <= t.rows && t.n0 + C::RowColumns <= p.N) all(true_type{});
    else all(false_type{});
  }

  CUTE_DEVICE void zeros(int row) const {
    const int width = C::HColumns * p.N;
    box.template wait<0>();
    const Chunk s = box.at(0);
    for (int i = lane_id(); i < kChunkBytes / kPieceBytes; i += 32) reinterpret_cast<uint4*>(s.base)[i] = uint4{};
    __syncwarp();
    if (C::Kind == Epilogue::store || C::StoreH) {
      const Rows<T> out = rows(p.out, p.out_ld, row, kOutMap);
      for (int f = 0; f < C::RowColumns * C::HColumns; f += kLine) out.direct(s, t.n0 * C::HColumns + f, width);
    }
    if constexpr (C::Kind != Epilogue::store) {
      const Rows<T> act = rows(p.act, p.act_ld, row, kActMap);
      for (int f = 0; f < C::RowColumns; f += kLine) act.direct(s, t.n0 + f, p.N);
    }
    cutlass::arch::fence_view_async_shared();
    if constexpr (C::Kind == Epilogue::activate_backward) {
      if (p.row_dot && lane_id() < 16 && row + lane_id() < t.rows)
        p.row_dot[int64_t(t.n_tile) * p.bias_ld + __ldg(p.v + t.row0 + row + lane_id())] = 0.f;
    }
  }
};

}  // namespace hexa::sm90
