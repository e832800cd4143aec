// esmm_act_backward's row tiles: the gradient of the activation in the epilogue.
#pragma once
#include <cute/arch/cluster_sm90.hpp>

#include <hexa_fx/epilogue/row_sm90.cuh>

namespace hexa::sm90 {

// da -> dh = act'(h) (w da), scaled activation w a, and <da, a> a row. The copy engine brings a warp's chunks of h into two buffers
// in turn, the first while the main loop runs; dh takes the place of h there and leaves from it. `Borrow`: the second buffer, and
// that of a, lie in a stage of the pipeline, which the tile takes behind its last step and gives back in the next tile. So there are
// as many stages as elsewhere.
template <class C>
struct GradEpilogue : RowEpilogue<C> {
  using T = typename C::T;
  static constexpr bool kMixed = C::GluMode == Glu::interleaved;
  static constexpr int kParts = C::HColumns;                                // matrices of h a chunk: 1, or gate and up
  static constexpr int kLine = C::Operand::kLine, kChunks = C::BN / kLine;  // of one block
  static constexpr int kBlocks = C::Blocks;
  static_assert(C::Kind != Epilogue::activate_backward || Outbox<C>::kChunks >= (C::Borrow ? kParts : 2 * kParts + 1),
                "two buffers of h and one of a");
  struct Lanes {        // what a lane knows of its two rows of each block
    int slot[kBlocks];  // of the one that it sums up <da, a> for; -1: no such row
    float weight[kBlocks][2];
  };
  int warp;  // consumer warp, 0..7
  Lanes& of;
  int stage = 0;  // Borrow: the tile's stage behind its last step

  CUTE_DEVICE int block_row(int m) const { return (C::PingPong ? m * 64 : m * 128 + (warp >> 2) * 64) + (warp & 3) * 16; }
  // Chunks of a warpgroup lie as in the outbox, wherever they are.
  CUTE_DEVICE Chunk buffer(int index, int part) const {
    const int own = part * (4 * kChunkBytes) + (warp & 3) * kChunkBytes;
    if (C::Borrow && (index & 1)) return {this->sm.b[stage] + (warp >> 2) * (kParts * 4 * kChunkBytes) + own};
    return {this->sm.staging[warp & 4] + (C::Borrow ? 0 : (index & 1) * (kParts * 4 * kChunkBytes)) + own};
  }
  CUTE_DEVICE Chunk scaled_buffer() const {
    if constexpr (C::Borrow) return {this->sm.a[stage] + warp * kChunkBytes};
    else return buffer(0, 2 * kParts);
  }
  CUTE_DEVICE uint64_t* fetched(int index) const { return &this->sm.fetched[warp][index & 1]; }

  CUTE_DEVICE int h_column(int part, int q) const {
    const int a = this->t.n0 + q * kLine;
    return kMixed ? 2 * a + part * kLine : a + part * this->p.N;
  }
  CUTE_DEVICE int h_limit(int part) const { return kMixed ? 2 * this->p.N : (part + 1) * this->p.N; }
  CUTE_DEVICE bool exists(int index) const {
    const int m = index / kChunks, q = index % kChunks;
    return m < kBlocks && block_row(m) < this->t.rows && this->t.n0 + q * kLine < this->p.N;
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
      SM90_TMA_LOAD_2D::copy(this->maps + kHMap, fetched(index), kEvictNormal, buffer(index, i).base, h_column(i, q),
                             this->t.row0 + block_row(m));
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
        if (kMixed) {
          const float s = g.y;
          g.y = u.x;
          u.x = s;
        }
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
  CUTE_DEVICE float chunk(int index, const typename C::F (&x)[32], const float (&w)[2], uint32_t& phase) const {
    const int q = index % kChunks, row = block_row(index / kChunks), column = this->t.n0 + q * kLine;
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
    const Rows<T> out = this->rows(this->p.out, this->p.out_ld, row, kOutMap),
                  act = this->rows(this->p.act, this->p.act_ld, row, kActMap);
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
      const Chunk again = buffer(index, 0);
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
#pragma unroll(Full ? kBlocks * kChunks : 1)
    for (int index = 0; index < kBlocks * kChunks; ++index) {
      const int m = kBlocks == 1 ? 0 : index / kChunks, q = index % kChunks;
      if (!Full && block_row(m) >= this->t.rows) break;
      if (q == 0) dot = 0.f;
      if (Full || exists(index)) dot += chunk<Full>(index, v.x[0], m == 0 ? of.weight[0] : of.weight[kBlocks - 1], phase);
      else refill<false>(index);
      if (q == kChunks - 1) {
        dot += __shfl_xor_sync(~0u, dot, 2);
        const int slot = m == 0 ? of.slot[0] : of.slot[kBlocks - 1];
        if (p.row_dot && (lane_id() & 3) < 2 && slot >= 0) p.row_dot[int64_t(this->t.n0 / C::RowColumns) * p.bias_ld + slot] = dot;
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

}  // namespace hexa::sm90
