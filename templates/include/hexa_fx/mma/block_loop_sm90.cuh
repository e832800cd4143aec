// Consumer main loop of FP8 block compute: parts of a tile are multiplied 128 of the contraction at a time, and added up in float32 by
// their scales. The tensor cores' own sums of eight-bit products have 14 bits, so they go no further than that.
#pragma once
#include <hexa_fx/kernels/config_fp8_sm90.cuh>
#include <hexa_fx/ptx/sm90.cuh>

namespace hexa::sm90 {

// Accumulator map of each part: chunk_sm90.cuh's; element 4 j + 2 r + i is of 8-column group j, row half r.
template <class C>
struct BlockLoop {
  BlockSmem<C>& sm;
  const int group;  // consumer warpgroup, 0 or 1
  const int row;    // the lane's first, of the tile
  float total[kParts][64];

  CUTE_DEVICE BlockLoop(BlockSmem<C>& sm, int group)
      : sm(sm), group(group), row(opaque(uint32_t(group * 64 + warp_in_group() * 16 + (lane_id() >> 2)))) {
    CUTE_UNROLL
    for (int i = 0; i < kParts * 64; ++i) total[i / 64][i % 64] = 0.f;
  }

  // The steps of a tile, at least one. All that a step's products wait for is worked out behind those of the step before: what lies
  // between the last sum and the next product keeps the tensor cores waiting.
  CUTE_DEVICE void run(Pipe& pipe, int k_tiles) {
    Step now(sm, group, pipe.index);
    Barrier::wait(&sm.full[pipe.index], pipe.phase);
    multiply(now);
#pragma unroll 1
    for (int k = 1; k < k_tiles; ++k) {
      pipe.template next<C::Stages>();
      const Step next(sm, group, pipe.index);
      const bool landed = Barrier::test_wait(&sm.full[pipe.index], pipe.phase, true);
      add_part(now, kParts - 1);
      if (!landed) Barrier::wait(&sm.full[pipe.index], pipe.phase);
      multiply(next);
      now = next;
    }
    add_part(now, kParts - 1);
    pipe.template next<C::Stages>();
  }

  // The same for a warpgroup without rows: stages only pass by.
  CUTE_DEVICE void skip(Pipe& pipe, int k_tiles) {
    for (int k = 0; k < k_tiles; ++k) {
      Barrier::wait(&sm.full[pipe.index], pipe.phase);
      release_scales(sm, pipe.index);
      pipe.template next<C::Stages>();
    }
  }

 private:
  float part[64];                  // of the products that are on their way
  float of_row[2], by[kParts][2];  // scales of the step: of rows; of rows and a part's columns

  // A stage, and where its operands lie. In uniform registers, which wgmma reads: moving them there takes longer than all else.
  struct Step {
    int stage;
    uint32_t a, b;
    CUTE_DEVICE Step(BlockSmem<C>& sm, int group, int stage)
        : stage(stage),
          a(uniform(operand_at(cast_smem_ptr_to_uint(sm.a[0]) + group * (64 * kLineBytes)) +
                    stage * operand_offset(Smem<C>::ABytes))),
          b(uniform(operand_at(cast_smem_ptr_to_uint(sm.b[0])) + stage * operand_offset(Smem<C>::BBytes))) {}
  };

  static CUTE_DEVICE void fence(float (&d)[64]) {
    CUTE_UNROLL
    for (int i = 0; i < 64; ++i) warpgroup_fence_operand(d[i]);
  }

  // Starts the products of a step. Its last part is left to add up.
  CUTE_DEVICE void multiply(const Step& s) {
    constexpr int kStep = E4m3::bytes(E4m3::kInner), kSteps = C::BK / E4m3::kInner;
    of_row[0] = sm.row_scale[s.stage][row], of_row[1] = sm.row_scale[s.stage][row + 8];
    if constexpr (C::PartScales) {  // of both parts here, so that nobody waits for them behind the products
      CUTE_UNROLL
      for (int i = 0; i < kParts * 2; ++i)
        by[i / 2][i % 2] = settled(of_row[i % 2] * sm.column_scale[s.stage][i / 2 * (C::RowOp ? 1 : kPart)]);
    }
    CUTE_UNROLL
    for (int h = 0; h < kParts; ++h) {
      if (h > 0) add_part(s, h - 1);
      fence(part);
      warpgroup_arrive();
      CUTE_UNROLL
      for (int kk = 0; kk < kSteps; ++kk) {
        const uint32_t a = s.a + operand_offset(kk * kStep), b = s.b + operand_offset(h * (kPart * kLineBytes) + kk * kStep);
        wgmma_e4m3(swizzled_operand_at(a), swizzled_operand_at(b), part, kk > 0);
      }
      warpgroup_commit_batch();
    }
  }

  // Adds up part h, whose products are the last to have begun.
  CUTE_DEVICE void add_part(const Step& s, int h) {
    if constexpr (!C::PartScales) {
      Columns columns(sm.column_scale[s.stage] + h * kPart);
      warpgroup_wait<0>();
      fence(part);
      add_by_columns(part, total[h], of_row, columns);
      if (h == kParts - 1) release_scales(sm, s.stage);
    } else {
      warpgroup_wait<0>();
      fence(part);
      if (h == kParts - 1) release_scales(sm, s.stage);
      add(part, total[h], by[h]);
    }
  }

  // Gives a stage back. All lanes have read scales in it, and each says so for itself: compute-sanitizer's racecheck follows no lane
  // that arrives for others behind a barrier. The other CTA only writes what wgmma reads, and one lane of each warp tells it.
  static CUTE_DEVICE void release_scales(BlockSmem<C>& sm, int stage) {
    Barrier::arrive(&sm.empty[stage]);
    if constexpr (C::Cluster > 1) {
      __syncwarp();
      if (lane_id() == 0) Barrier::arrive(&sm.empty[stage], block_rank_in_cluster() ^ 1, 1);
    }
  }
  // The same number, worked out here and not where it is used.
  static CUTE_DEVICE float settled(float x) {
    asm volatile("" : "+f"(x));
    return x;
  }
  static CUTE_DEVICE void add(const float (&part)[64], float (&sum)[64], const float (&by)[2]) {
    CUTE_UNROLL
    for (int i = 0; i < 64; ++i) sum[i] = fmaf(part[i], by[(i >> 1) & 1], sum[i]);
  }
  // Scales of columns that are asked for ahead: a few, for all registers are taken.
  static constexpr int kAhead = 3;
  struct Columns {
    uint32_t from;
    float2 next[kAhead];
    CUTE_DEVICE explicit Columns(const float* columns) : from(cast_smem_ptr_to_uint(columns) + (lane_id() & 3) * 8) {
      CUTE_UNROLL
      for (int j = 0; j < kAhead; ++j) next[j] = ask(j);
    }
    CUTE_DEVICE float2 ask(int j) const {
      float2 x;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from + j * 32));
      return x;
    }
  };
  static CUTE_DEVICE void add_by_columns(const float (&part)[64], float (&sum)[64], const float (&by)[2], Columns& columns) {
    CUTE_UNROLL
    for (int j = 0; j < 16; ++j) {
      const float2 c = columns.next[j % kAhead];
      if (j + kAhead < 16) columns.next[j % kAhead] = columns.ask(j + kAhead);
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * j + i;
        sum[at] = fmaf(part[at], by[i >> 1] * (i & 1 ? c.y : c.x), sum[at]);
      }
    }
  }
};

}  // namespace hexa::sm90
