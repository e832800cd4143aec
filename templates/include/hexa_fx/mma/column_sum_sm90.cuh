// Sums of columns of Q (ESS) from the tiles in shared memory.
#pragma once
#include <hexa_fx/kernels/smem_sm90.cuh>
#include <hexa_fx/ptx/convert_sm90.cuh>

namespace hexa::sm90 {

// A lane owns two neighbouring columns.
template <class C>
struct ColumnSum {
  static constexpr int kBlocks = C::BN / C::Operand::kLine;
  static constexpr int kRows = C::BK * kBlocks / kConsumerWarps;  // rows a warp adds up of its block
  static constexpr int kParts = C::BK / kRows;                    // warps that share a block
  float x = 0.f, y = 0.f;

  // Adds the first `rows` rows of a stage, which one lane of each warp may give back after it. __syncwarp would order that, but
  // compute-sanitizer's racecheck follows only the barrier.
  CUTE_DEVICE void add(const Smem<C>& sm, int stage, int warp, int group, int rows = C::BK) {
    const uint8_t* block = sm.b[stage] + (warp / kParts) * (C::BK * kLineBytes);
    const int lane = lane_id(), first = (warp % kParts) * kRows;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int r = first + i;
      if (r >= rows) break;
      const uint32_t two =
          *reinterpret_cast<const uint32_t*>(block + r * kLineBytes + (swizzled_by_lane(r, lane >> 2) << 4) + (lane & 3) * 4);
      x += low<typename C::T>(two);
      y += high<typename C::T>(two);
    }
    NamedBarrier::sync(128, kTailBarrier + group);
  }
};

}  // namespace hexa::sm90
