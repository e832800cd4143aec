// Epilogues: accumulators -> (bias, activation, its gradient) -> memory. A warp writes chunks of 16 rows x 64 columns to its own
// shared memory, from where the copy engine stores them while the warp goes on. Chunks with rows or columns that must not be
// written go out by predicated 16-byte stores.
//
// Accumulator map: lane l holds, of 8-column group j and row half r, row l / 4 + 8 r and columns 8 j + 2 (l % 4) + {0, 1}.
#pragma once
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include <hexa_fx/mma/main_loop_sm90.cuh>

namespace hexa::sm90 {

template <class T>
CUTE_DEVICE uint32_t pack(float lo, float hi) {
  uint32_t r;
  if constexpr (is_same_v<T, cutlass::bfloat16_t>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <class T>
CUTE_DEVICE float2 unpack(uint32_t two) {
  if constexpr (is_same_v<T, cutlass::bfloat16_t>) return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
  else return __half22float2(*reinterpret_cast<const __half2*>(&two));
}

// One 16 x 64 chunk in shared memory: rows of 128 bytes, 16-byte pieces XORed by row, as the copy engine swizzles.
struct Stage {
  uint8_t* base;
  CUTE_DEVICE uint32_t* pair(int row, int group, int word) const {
    return reinterpret_cast<uint32_t*>(base + row * 128 + (((group ^ row) & 7) << 4) + word * 4);
  }
  CUTE_DEVICE uint4* piece(int row, int c) const { return reinterpret_cast<uint4*>(base + row * 128 + (((c ^ row) & 7) << 4)); }
  // A chunk of floats has half the columns: 16 rows x 32.
  CUTE_DEVICE float2* floats(int row, int pair) const {
    return reinterpret_cast<float2*>(base + row * 128 + (((pair >> 1) ^ (row & 7)) << 4) + (pair & 1) * 8);
  }
  // The same turned round: 32 rows x 16, rows of 64 bytes.
  CUTE_DEVICE float* turned(int row, int column) const {
    return reinterpret_cast<float*>(base + row * 64 + (((column >> 2) ^ (row >> 1 & 3)) << 4) + (column & 3) * 4);
  }
  // Where a lane points ldmatrix and stmatrix for groups j and j + 1 (j even): four 8 x 8 matrices, row halves first.
  CUTE_DEVICE uint128_t& matrices(int j) const {
    const int l = lane_id(), z = l >> 3, row = (l & 7) + 8 * (z & 1);
    return *reinterpret_cast<uint128_t*>(base + row * 128 + ((((z >> 1) ^ (l & 7)) ^ j) << 4));
  }
  // 8-column groups 2 i and 2 i + 1: words by group and row half.
  CUTE_DEVICE void put(int i, const uint32_t (&x)[2][2]) const {
    SM90_U32x4_STSM_N::copy(x[0][0], x[0][1], x[1][0], x[1][1], matrices(2 * i));
  }
  // `value(j, r)` packs the pair of 8-column group j and row half r.
  template <class Value>
  CUTE_DEVICE void put(Value value) const {
    CUTE_UNROLL
    for (int j = 0; j < 8; j += 2)
      SM90_U32x4_STSM_N::copy(value(j, 0), value(j, 1), value(j + 1, 0), value(j + 1, 1), matrices(j));
  }
};

// A consumer warp's chunks. Chunk i of the four warps of a warpgroup lie one after another: 64 rows.
template <class C>
struct Outbox {
  static constexpr int kChunks = C::StageBytes / kChunkBytes;
  uint8_t* base;
  int turn = 0;
  CUTE_DEVICE Outbox(Smem<C>& sm, int group) : base(sm.stage[4 * group] + warp_in_group() * kChunkBytes) {}
  CUTE_DEVICE Stage at(int i) const { return {base + i * (4 * kChunkBytes)}; }
  // The lane that starts copies: the same for all of a kernel's, for bulk groups are a lane's own. See Copier.
  static CUTE_DEVICE bool sends() { return C::WeightOp && C::GatherWeight ? cute::elect_one_sync() : lane_id() == 0; }
  // Waits until the copy engine has read all but the newest `Pending` chunks (one bulk group each).
  template <int Pending>
  CUTE_DEVICE void wait() const {
    tma_store_wait<Pending>();  // lanes without groups pass
    __syncwarp();
  }
  CUTE_DEVICE Stage next() {
    wait<kChunks - 1>();
    const Stage stage = at(turn);
    turn = turn + 1 == kChunks ? 0 : turn + 1;
    return stage;
  }
};

// Where a warp's 16 rows of a result lie.
template <class T>
struct Rows {
  T* base;       // row 0 of the chunk
  int64_t ld;
  int valid;     // rows of the 16 that exist
  const TmaDescriptor* map;
  int x, y;      // of base, in the map

  CUTE_DEVICE Rows right(int columns) const { return {base + columns, ld, valid, map, x + columns, y}; }
  // Columns `column` .. + 64 of `columns`; `Full`: all of them, and all rows, exist. Every lane has written the chunk; one `sends` it,
  // as a bulk group.
  template <bool Full>
  CUTE_DEVICE void store(const Stage& stage, int column, int columns, bool sends) const {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if constexpr (!Full) direct(stage, column, columns);
    else if (sends) send(stage, column);
    if (sends) tma_store_arrive();
  }
  CUTE_DEVICE void send(const Stage& stage, int column) const { SM90_TMA_STORE_2D::copy(map, stage.base, x + column, y); }
  CUTE_DEVICE void direct(const Stage& stage, int column, int columns) const {
    const int c = lane_id() & 7, n = column + c * 8;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = (lane_id() >> 3) + 4 * i;
      const uint4 d = *stage.piece(r, c);
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
    for (int i = 0; i + By < Chunks; ++i)
      CUTE_UNROLL
      for (int j = 0; j < 32; ++j) x[i][j] = x[i + By][j];
  }
};

template <class C>
struct RowEpilogue {
  using T = typename C::T;
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

  // A chunk of values; see Stage::put.
  template <bool Full, class Value>
  CUTE_DEVICE void chunk(const Rows<T>& out, int column, int columns, Value value) const {
    if (!Full && column >= columns) return;
    const Stage s = box.next();
    s.put(value);
    out.template store<Full>(s, column, columns, Outbox<C>::sends());
  }

  // A pair of values (+ bias), columns `first` .. + 64 of a `columns` wide weight or half of it.
  CUTE_DEVICE float2 pair(const float (&x)[32], int j, int r, const void* bias, int64_t at, int first, int columns) const {
    const int i = 2 * r + 4 * j, n = first + j * 8 + (lane_id() & 3) * 2;
    if constexpr (!C::Bias) return {x[i], x[i + 1]};
    const float2 b = bias2(bias, int64_t(t.expert) * p.bias_ld + at + n, n < columns);
    return {x[i] + b.x, x[i + 1] + b.y};
  }

  // Chunk of the plain result: columns `first` .. + 64.
  template <bool Full>
  CUTE_DEVICE void plain(const float (&x)[32], const Rows<T>& out, int first, int columns) const {
    chunk<Full>(out, first, columns, [&](int j, int r) {
      const float2 v = pair(x, j, r, p.bias, 0, first, columns);
      return pack<T>(v.x, v.y);
    });
  }

  template <bool Full>
  CUTE_DEVICE void ungated(const float (&x)[32], const Rows<T>& out, const Rows<T>& act, int first) const {
    if constexpr (C::StoreH) plain<Full>(x, out, first, p.N);
    chunk<Full>(act, first, p.N, [&](int j, int r) {
      const float2 v = pair(x, j, r, p.bias, 0, first, p.N);
      float unused;
      return pack<T>(activate<C::Activation, false>(v.x, unused), activate<C::Activation, false>(v.y, unused));
    });
  }

  // Gate columns in the tile's left half, up columns in its right half.
  template <bool Full>
  CUTE_DEVICE void gated(const float (&xg)[32], const float (&xu)[32], const Rows<T>& out, const Rows<T>& act, int first) const {
    const void* up_bias = C::SplitWeight ? p.bias_up : p.bias;
    const int64_t up_at = C::SplitWeight ? 0 : p.N;
    auto gate = [&](int j, int r) { return pair(xg, j, r, p.bias, 0, first, p.N); };
    auto up = [&](int j, int r) { return pair(xu, j, r, up_bias, up_at, first, p.N); };
    if constexpr (C::StoreH) {
      const Rows<T> out_up = out.right(p.N);
      chunk<Full>(out, first, p.N, [&](int j, int r) { const float2 g = gate(j, r); return pack<T>(g.x, g.y); });
      chunk<Full>(out_up, first, p.N, [&](int j, int r) { const float2 u = up(j, r); return pack<T>(u.x, u.y); });
    }
    chunk<Full>(act, first, p.N, [&](int j, int r) {
      const float2 g = gate(j, r), u = up(j, r);
      return pack<T>(glu<C::Activation>(g.x, u.x, p.act_params), glu<C::Activation>(g.y, u.y, p.act_params));
    });
  }

  // Two chunks whose even columns are gate and odd ones up. Lane pairs trade groups so that each packs two neighbouring results.
  template <bool Full>
  CUTE_DEVICE void interleaved(const float (&x0)[32], const float (&x1)[32], const Rows<T>& out, const Rows<T>& act, int first) const {
    const int l = lane_id(), odd = l & 1, columns = 2 * p.N;
    if (!Full && 2 * first >= columns) return;
    if constexpr (C::StoreH) {
      plain<Full>(x0, out, 2 * first, columns);
      plain<Full>(x1, out, 2 * first + 64, columns);
    }
    const Stage s = box.next();
    CUTE_UNROLL
    for (int j = 0; j < 16; j += 2) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float a[2];
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const float2 x = pair(j < 8 ? x0 : x1, (j + i) % 8, r, p.bias, 0, 2 * first + j / 8 * 64, columns);
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
    constexpr int kBlocks = decltype(size<1>(acc))::value, kChunks = C::BN / 64;
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
        const int row = block_row(i / kUnits), first = t.n0 + (i % kUnits) * 64;
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
    const Stage s = box.at(0);
    for (int i = lane_id(); i < kChunkBytes / 16; i += 32) reinterpret_cast<uint4*>(s.base)[i] = uint4{};
    __syncwarp();
    if (C::Kind == Epilogue::store || C::StoreH) {
      const Rows<T> out = rows(p.out, p.out_ld, row, kOutMap);
      for (int f = 0; f < C::RowColumns * C::HColumns; f += 64) out.direct(s, t.n0 * C::HColumns + f, width);
    }
    if constexpr (C::Kind != Epilogue::store) {
      const Rows<T> act = rows(p.act, p.act_ld, row, kActMap);
      for (int f = 0; f < C::RowColumns; f += 64) act.direct(s, t.n0 + f, p.N);
    }
    cutlass::arch::fence_view_async_shared();
    if constexpr (C::Kind == Epilogue::activate_backward) {
      if (p.row_dot && lane_id() < 16 && row + lane_id() < t.rows)
        p.row_dot[int64_t(t.n_tile) * p.n + __ldg(p.v + t.row0 + row + lane_id())] = 0.f;
    }
  }
};

// da -> dh = act'(h) (w da), scaled activation w a, and <da, a> a row. The copy engine brings a warp's chunks of h into two buffers
// in turn, the first while the main loop runs; dh takes the place of h there and leaves from it. `Borrow`: the second buffer, and
// that of a, lie in a stage of the pipeline, which the tile takes behind its last step and gives back in the next tile. So there are
// as many stages as elsewhere.
template <class C>
struct GradEpilogue : RowEpilogue<C> {
  using T = typename C::T;
  static constexpr bool kMixed = C::GluMode == Glu::interleaved;
  static constexpr int kParts = C::HColumns;  // matrices of h a chunk: 1, or gate and up
  static constexpr int kChunks = C::BN / 64;  // of one 64-row block
  static constexpr int kBlocks = C::PingPong ? C::BM / 64 : C::BM / 128;
  static_assert(C::Kind != Epilogue::activate_backward || Outbox<C>::kChunks >= (C::Borrow ? kParts : 2 * kParts + 1), "two buffers of h and one of a");
  struct Lanes {  // what a lane knows of its two rows of each block
    int slot[kBlocks];  // of the one that it sums up <da, a> for; -1: no such row
    float weight[kBlocks][2];
  };
  int warp;       // consumer warp, 0..7
  Lanes& of;
  int stage = 0;  // Borrow: the tile's stage behind its last step

  CUTE_DEVICE int block_row(int m) const { return (C::PingPong ? m * 64 : m * 128 + (warp >> 2) * 64) + (warp & 3) * 16; }
  // Chunks of a warpgroup lie as in the outbox, wherever they are.
  CUTE_DEVICE Stage buffer(int index, int part) const {
    const int own = part * (4 * kChunkBytes) + (warp & 3) * kChunkBytes;
    if (C::Borrow && (index & 1)) return {this->sm.b[stage] + (warp >> 2) * (kParts * 4 * kChunkBytes) + own};
    return {this->sm.stage[warp & 4] + (C::Borrow ? 0 : (index & 1) * (kParts * 4 * kChunkBytes)) + own};
  }
  CUTE_DEVICE Stage scaled_buffer() const {
    if constexpr (C::Borrow) return {this->sm.a[stage] + warp * kChunkBytes};
    else return buffer(0, 2 * kParts);
  }
  CUTE_DEVICE uint64_t* fetched(int index) const { return &this->sm.fetched[warp][index & 1]; }

  CUTE_DEVICE int h_column(int part, int q) const {
    const int a = this->t.n0 + q * 64;
    return kMixed ? 2 * a + part * 64 : a + part * this->p.N;
  }
  CUTE_DEVICE int h_limit(int part) const { return kMixed ? 2 * this->p.N : (part + 1) * this->p.N; }
  CUTE_DEVICE bool exists(int index) const {
    const int m = index / kChunks, q = index % kChunks;
    return m < kBlocks && block_row(m) < this->t.rows && this->t.n0 + q * 64 < this->p.N;
  }
  // Starts copying chunk `index`, if it exists, into buffers that the copy engine no longer reads. One lane. Rows past the expert's
  // and gate columns past the last are read too; nothing that comes of them is stored.
  template <bool Full = false>
  CUTE_DEVICE void fetch(int index) const {
    if (Full ? index >= kBlocks * kChunks : !exists(index)) return;
    const int m = index / kChunks, q = index % kChunks;
    TxBarrier::arrive_and_expect_tx(fetched(index), kParts * kChunkBytes);
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i)
      SM90_TMA_LOAD_2D::copy(this->maps + kHMap, fetched(index), kEvictNormal, buffer(index, i).base, h_column(i, q), this->t.row0 + block_row(m));
  }

  // Slots are asked for before the main loop and their weights in its first step, so that nobody waits for them. Odd lanes ask for
  // and sum up the second of the two rows.
  CUTE_DEVICE void ask_slots() const {
    CUTE_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      const int at = block_row(m) + (lane_id() >> 2) + 8 * (lane_id() & 1);
      of.slot[m] = at < this->t.rows ? __ldg(this->p.v + this->t.row0 + at) : -1;
    }
  }
  // In the first step: also the first two chunks, when the buffers have been read.
  CUTE_DEVICE void begin() const {
    if (cute::elect_one_sync()) {
      tma_store_wait<0>();
      fetch(0);
      if constexpr (!C::Borrow) fetch(1);
    }
    __syncwarp();
    const float* scale = this->p.slot_scale;
    CUTE_UNROLL
    for (int m = 0; m < kBlocks; ++m) {
      const float mine = scale && of.slot[m] >= 0 ? __ldg(scale + of.slot[m]) : 1.f;
      const float theirs = __shfl_xor_sync(~0u, mine, 1);
      of.weight[m][0] = lane_id() & 1 ? theirs : mine;
      of.weight[m][1] = lane_id() & 1 ? mine : theirs;
    }
  }

  // A lane's pair of columns.
  struct Pair {
    uint32_t h[kParts];  // one, or gate and up (interleaved: as they lie)
    float2 shared;       // see shared_part

    CUTE_DEVICE void ask(const ActParams& ap) {
      const float2 x = unpack<T>(h[0]);
      if constexpr (C::GluMode == Glu::none) shared = {shared_part<C::Activation>(x.x), shared_part<C::Activation>(x.y)};
      else shared = {glu_shared_part<C::Activation>(x.x, ap), glu_shared_part<C::Activation>(kMixed ? unpack<T>(h[1]).x : x.y, ap)};
    }
    // h becomes dh, a the activation.
    CUTE_DEVICE void grad(float d0, float d1, float w, const ActParams& ap, float2& a) {
      const float w0 = w * d0, w1 = w * d1;
      if constexpr (C::GluMode == Glu::none) {
        const float2 x = unpack<T>(h[0]);
        float s0, s1;
        a = {activate<C::Activation, true>(x.x, shared.x, s0), activate<C::Activation, true>(x.y, shared.y, s1)};
        h[0] = pack<T>(w0 * s0, w1 * s1);
      } else {
        float2 g = unpack<T>(h[0]), u = unpack<T>(h[1]), dg, du;
        if (kMixed) { const float s = g.y; g.y = u.x; u.x = s; }
        a.x = glu_slopes<C::Activation>(g.x, u.x, shared.x, ap, dg.x, du.x);
        a.y = glu_slopes<C::Activation>(g.y, u.y, shared.y, ap, dg.y, du.y);
        h[0] = kMixed ? pack<T>(w0 * dg.x, w0 * du.x) : pack<T>(w0 * dg.x, w1 * dg.y);
        h[1] = kMixed ? pack<T>(w1 * dg.y, w1 * du.y) : pack<T>(w0 * du.x, w1 * du.y);
      }
    }
  };
  // A quarter of a chunk: two neighbouring 8-column groups, both row halves of each.
  using Quarter = Pair[2][2];

  // Interleaved: where the two columns, gate and up each, lie that a lane has of 8-column group j and row half r.
  CUTE_DEVICE uint2* pair_of_h(int index, int r, int j) const {
    const int l = lane_id();
    return reinterpret_cast<uint2*>(buffer(index, j >> 2).pair((l >> 2) + 8 * r, 2 * (j & 3) + ((l & 3) >> 1), 2 * (l & 1)));
  }
  // Quarter i of chunk `index`, from its buffers; its slow part begins.
  CUTE_DEVICE void read(int index, int i, Quarter& at) const {
    CUTE_UNROLL
    for (int k = 0; k < (kMixed ? 4 : kParts); ++k) {
      if constexpr (kMixed) {
        const uint2 two = *pair_of_h(index, k & 1, 2 * i + (k >> 1));
        at[k >> 1][k & 1].h[0] = two.x;
        at[k >> 1][k & 1].h[1] = two.y;
      } else SM75_U32x4_LDSM_N::copy(buffer(index, k).matrices(2 * i), at[0][0].h[k], at[0][1].h[k], at[1][0].h[k], at[1][1].h[k]);
    }
    CUTE_UNROLL
    for (int k = 0; k < 4; ++k) at[k >> 1][k & 1].ask(this->p.act_params);
  }
  CUTE_DEVICE void write(int index, int i, const Quarter& at) const {
    CUTE_UNROLL
    for (int k = 0; k < (kMixed ? 4 : kParts); ++k) {
      if constexpr (kMixed) *pair_of_h(index, k & 1, 2 * i + (k >> 1)) = {at[k >> 1][k & 1].h[0], at[k >> 1][k & 1].h[1]};
      else SM90_U32x4_STSM_N::copy(at[0][0].h[k], at[0][1].h[k], at[1][0].h[k], at[1][1].h[k], buffer(index, k).matrices(2 * i));
    }
  }

  // In the middle of chunk `index`: by now the chunk before it has left, and its buffers take the chunk after it.
  template <bool Full>
  CUTE_DEVICE void refill(int index) const {
    if (Full && index == 0) return;
    if (cute::elect_one_sync()) {
      tma_store_wait<0>();
      if (index > 0) fetch<Full>(index + 1);
    }
    __syncwarp();
  }

  // Chunk `index`; x are its accumulators. `Full`: all of its rows and columns exist. Each quarter is read, and its slow part begun,
  // before the one ahead of it is worked on, so that their instructions mix. Returns <da, a> of the columns of two lanes.
  template <bool Full>
  CUTE_DEVICE float chunk(int index, const float (&x)[32], const float (&w)[2], uint32_t& phase) const {
    const int q = index % kChunks, row = block_row(index / kChunks), column = this->t.n0 + q * 64;
    Barrier::wait(fetched(index), (phase >> (index & 1)) & 1);
    phase ^= 1u << (index & 1);
    uint32_t scaled[4][2][2];
    float dot[2] = {0.f, 0.f};
    Quarter h[2];
    read(index, 0, h[0]);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i < 3) read(index, i + 1, h[(i + 1) & 1]);
      CUTE_UNROLL
      for (int k = 0; k < 4; ++k) {
        const int j = k >> 1, r = k & 1, at = 2 * r + 4 * (2 * i + j);
        float2 a;
        h[i & 1][j][r].grad(x[at], x[at + 1], w[r], this->p.act_params, a);
        dot[r] = fmaf(x[at + 1], a.y, fmaf(x[at], a.x, dot[r]));
        scaled[i][j][r] = pack<T>(w[r] * a.x, w[r] * a.y);
      }
      write(index, i, h[i & 1]);
      if (i == 1) refill<Full>(index);
      if (Full && i == 1) scaled_buffer().put(0, scaled[0]);
      if (Full && i >= 1) scaled_buffer().put(i, scaled[i]);
    }
    // Here, not at the tile's end: the compiler would put off the sums, too, and keep all that they add up.
    const bool odd = lane_id() & 1;
    const float sum = (odd ? dot[1] : dot[0]) + __shfl_xor_sync(~0u, odd ? dot[0] : dot[1], 1);
    const Rows<T> out = this->rows(this->p.out, this->p.out_ld, row, kOutMap), act = this->rows(this->p.act, this->p.act_ld, row, kActMap);
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if constexpr (Full) {
      if (cute::elect_one_sync()) {
        CUTE_UNROLL
        for (int i = 0; i < kParts; ++i) out.send(buffer(index, i), h_column(i, q));
        act.send(scaled_buffer(), column);
        tma_store_arrive();
      }
    } else {  // every lane reads, but one gives a stage back, which racecheck does not follow: a leaves from a buffer of h, too
      CUTE_UNROLL
      for (int i = 0; i < kParts; ++i) out.direct(buffer(index, i), h_column(i, q), h_limit(i));
      __syncwarp();
      const Stage again = buffer(index, 0);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) again.put(i, scaled[i]);
      __syncwarp();
      act.direct(again, column, this->p.N);
      cutlass::arch::fence_view_async_shared();
    }
    return sum;
  }

  template <bool Full, class Acc>
  CUTE_DEVICE void chunks(const Acc& acc, uint32_t& phase) const {
    const GroupedParams& p = this->p;
    Values<kBlocks * kChunks> v(acc);
    float dot = 0.f;
#pragma unroll (Full ? kBlocks * kChunks : 1)
    for (int index = 0; index < kBlocks * kChunks; ++index) {
      const int m = kBlocks == 1 ? 0 : index / kChunks, q = index % kChunks;
      if (!Full && block_row(m) >= this->t.rows) break;
      if (q == 0) dot = 0.f;
      if (Full || exists(index)) dot += chunk<Full>(index, v.x[0], m == 0 ? of.weight[0] : of.weight[kBlocks - 1], phase);
      else refill<false>(index);
      if (q == kChunks - 1) {
        dot += __shfl_xor_sync(~0u, dot, 2);
        const int slot = m == 0 ? of.slot[0] : of.slot[kBlocks - 1];
        if (p.row_dot && (lane_id() & 3) < 2 && slot >= 0) p.row_dot[int64_t(this->t.n0 / C::RowColumns) * p.n + slot] = dot;
      }
      v.template advance<1>();
    }
  }

  // `behind` the last step of the main loop lies the stage that the tile may use. `phase` of the two barriers: bits 0 and 1.
  template <class Acc>
  CUTE_DEVICE void run(const Acc& acc, const Pipe& behind, uint32_t& phase) const {
    Tile here = this->t;
    here.row0 = uniform(here.row0);
    here.n0 = uniform(here.n0);
    const GradEpilogue e{{this->sm, this->p, this->maps, here, this->box}, uniform(warp), of, uniform(behind.index)};
    if constexpr (C::Borrow) {
      Barrier::wait(&this->sm.full[behind.index], behind.phase);
      if (cute::elect_one_sync()) e.fetch(1);
      __syncwarp();
    }
    if (block_row(kBlocks - 1) + 16 <= this->t.rows && this->t.n0 + C::RowColumns <= this->p.N) e.template chunks<true>(acc, phase);
    else e.template chunks<false>(acc, phase);
  }
};

// The copy engine drops what lies outside of dW.
template <class C>
struct WeightEpilogue {
  using T = typename C::T;
  Smem<C>& sm;
  const GroupedParams& p;
  const TmaDescriptor* maps;
  const Tile& t;
  Outbox<C>& box;
  int warp, group;

  // rows m0 + row .. + 16 of dW[e]
  template <class Acc>
  CUTE_DEVICE void plain(const Acc& acc, int m, int row) const {
    CUTE_UNROLL
    for (int q = 0; q < C::BN / 64; ++q) {
      if (t.n0 + q * 64 >= p.C) break;
      const Stage s = box.next();
      s.put([&](int j, int r) {
        const int at = 2 * r + 4 * (8 * q + j);
        return pack<T>(acc(at, m, 0), acc(at + 1, m, 0));
      });
      send(s, t.n0 + q * 64, t.m0 + row);
    }
  }
  CUTE_DEVICE void send(const Stage& s, int x, int y) const {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (Outbox<C>::sends()) {
      SM90_TMA_STORE_3D::copy(maps + kGradMap, s.base, x, y, t.expert);
      tma_store_arrive();
    }
  }

  // dW[e] is (C, R): the warpgroup turns 64 x 64 blocks round in its four warps' chunks.
  template <class Acc>
  CUTE_DEVICE void transposed(const Acc& acc, int m, int row64) const {
    constexpr int kChunks = Outbox<C>::kChunks;
    const int l = lane_id(), w = warp_in_group();
    CUTE_UNROLL
    for (int q = 0; q < C::BN / 64; ++q) {
      if (t.n0 + q * 64 >= p.C) break;
      if (q == 0) box.template wait<0>();
      else box.template wait<kChunks - 1>();
      if (q == 0 || q >= kChunks) cutlass::arch::NamedBarrier::sync(128, kStageBarrier + group);
      uint8_t* s = sm.stage[4 * group] + (q % kChunks) * (4 * kChunkBytes);
      CUTE_UNROLL
      for (int j = 0; j < 8; j += 2) {
        uint32_t x[4];  // (group j, rows 0-7), (j, 8-15), (j + 1, 0-7), (j + 1, 8-15)
        CUTE_UNROLL
        for (int z = 0; z < 4; ++z) {
          const int at = 2 * (z & 1) + 4 * (8 * q + j + (z >> 1));
          x[z] = pack<T>(acc(at, m, 0), acc(at + 1, m, 0));
        }
        const int z = l >> 3, n = (j + (z >> 1)) * 8 + (l & 7), c = 2 * w + (z & 1);
        SM90_U16x8_STSM_T::copy(x[0], x[1], x[2], x[3], *reinterpret_cast<uint128_t*>(s + n * 128 + (((c ^ n) & 7) << 4)));
      }
      cutlass::arch::fence_view_async_shared();
      cutlass::arch::NamedBarrier::sync(128, kStageBarrier + group);
      send(box.at(q % kChunks), t.m0 + row64, t.n0 + q * 64 + w * 16);
      box.turn = (q + 1) % kChunks;
    }
  }

  // Adds rows m0 + row .. + 16 of dW[e] to the floats that are there. The copy engine does it, each number once: 32 columns at a time.
  template <class Acc>
  CUTE_DEVICE void add(const Acc& acc, int m, int row) const {
    CUTE_UNROLL
    for (int q = 0; q < C::BN / 32; ++q) {
      if (t.n0 + q * 32 >= p.C) break;
      const Stage s = box.next();
      auto value = [&](int j, int r, int i) { return acc(2 * r + 4 * (4 * q + j) + i, m, 0); };
      if constexpr (C::TransposeWeight) put_turned(s, value);
      else put_floats(s, value);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (Outbox<C>::sends()) {
        const int x = t.n0 + q * 32, y = t.m0 + row;
        SM90_TMA_REDUCE_ADD_3D::copy(maps + kGradMap, s.base, C::TransposeWeight ? y : x, C::TransposeWeight ? x : y, t.expert);
        tma_store_arrive();
      }
    }
  }
  // `value(j, r, i)`: of 8-column group j, row half r, the pair's first or second. Lanes take turns so that no two of a bank meet:
  // rows next to each other write groups that are two apart, lanes next to each other the other one of their pair.
  template <class Value>
  CUTE_DEVICE void put_floats(const Stage& s, Value value) const {
    const int l = lane_id(), row = l >> 2;
    const bool odd = row & 1;
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float x = odd ? value(j ^ 2, r, 0) : value(j, r, 0), y = odd ? value(j ^ 2, r, 1) : value(j, r, 1);
        *s.floats(row + 8 * r, 4 * (odd ? j ^ 2 : j) + (l & 3)) = {x, y};
      }
    }
  }
  template <class Value>
  CUTE_DEVICE void put_turned(const Stage& s, Value value) const {
    const int l = lane_id(), odd = l & 1;
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i)
          *s.turned(8 * j + 2 * (l & 3) + (i ^ odd), (l >> 2) + 8 * r) = odd ? value(j, r, i ^ 1) : value(j, r, i);
      }
    }
  }

  CUTE_DEVICE void column_sum(const ColumnSum<C>& sum) const {
    using S = ColumnSum<C>;
    const int w = C::PingPong ? warp_in_group() : warp, l = lane_id();
    auto sums = [&](int of) { return reinterpret_cast<float2*>(sm.stage[of & 4] + (of & 3) * kChunkBytes); };
    float2* mine = sums(warp);
    box.template wait<0>();
    mine[l] = {sum.x, sum.y};
    cutlass::arch::NamedBarrier::sync(C::PingPong ? 128 : 256, kSumBarrier + (C::PingPong ? group : 0));
    if (w % S::kParts == 0) {
      float2 total = mine[l];
      CUTE_UNROLL
      for (int i = 1; i < S::kParts; ++i) {
        const float2 other = sums(warp + i)[l];
        total.x += other.x;
        total.y += other.y;
      }
      const int n = t.n0 + (w / S::kParts) * 64 + 2 * l;
      if constexpr (C::AddGrad) {
        float2* at = reinterpret_cast<float2*>(static_cast<float*>(p.db) + int64_t(t.expert) * p.C + n);
        if (n < p.C) *at = {at->x + total.x, at->y + total.y};
      } else {
        if (n < p.C) *reinterpret_cast<uint32_t*>(static_cast<T*>(p.db) + int64_t(t.expert) * p.C + n) = pack<T>(total.x, total.y);
      }
    }
    cutlass::arch::NamedBarrier::sync(C::PingPong ? 128 : 256, kSumBarrier + (C::PingPong ? group : 0));
  }
};

}  // namespace hexa::sm90
