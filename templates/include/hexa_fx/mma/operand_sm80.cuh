// How a warp reads an operand of the tensor cores from shared memory.
#pragma once
#include <hexa_fx/ptx/sm80.cuh>

namespace hexa {

// Where a lane reads an operand, in bytes: for each step along k, kDepth deep, and each group of lines, kStride lines after the last.
// Addresses of one lane that differ by more than a constant are made once.
template <class T, class Layout, bool kAlongK, int kGroups, int kStride, int kSteps, int kDepth>
struct Reads {
  static constexpr int kWidth = Layout::kWidth, kSize = sizeof(T), kRepeat = kStride < kWidth ? kWidth / kStride : 1;
  static constexpr int kDistinct = kAlongK ? kSteps : kRepeat < kGroups ? kRepeat : kGroups;
  static_assert((kAlongK ? kStride : kDepth) % Layout::kPeriod == 0, "lines that lie alike");
  int first[kDistinct];

  // x, k: where the lane reads in the first group and step.
  __device__ void set(int x, int k) {
#pragma unroll
    for (int d = 0; d < kDistinct; ++d)
      first[d] = kSize * (kAlongK ? Layout::at(x, k + d * kDepth) : Layout::at(x + d * kStride, k));
  }
  __device__ int operator()(int group, int step, int stage) const {
    const int lines = kAlongK ? group * kStride : step * kDepth;
    const int blocks = kAlongK ? 0 : group / kDistinct * (kDistinct * kStride / kWidth);
    return first[kAlongK ? step : group % kDistinct] +
           kSize * (lines * Layout::kPitch + blocks * (8 * kWidth) + stage * Layout::kStage);
  }
};

// Four registers for each step and group: 8 lines by 16 bytes of k each. Bit kLineBit of a register's number is which half of the lines
// it has, kGap lines further; the other bit is which half of k. ldmatrix reads all four at once; where lines of 32-bit elements run
// across k, each is read by itself.
template <class T, class Layout, bool kAlongK, int kGroups, int kStride, int kGap, int kLineBit, int kSteps>
struct Operand {
  static constexpr int kVec = 16 / int(sizeof(T));
  static constexpr bool kSingle = !kAlongK && sizeof(T) == 4;
  using Where = Reads<T, Layout, kAlongK, kGroups, kStride, kSteps, 2 * kVec>;
  const T* shared;
  Where where[kSingle ? 4 : 1];

  // x: the warp's first line.
  __device__ Operand(const T* shared_, int x, int lane) : shared(shared_) {
#pragma unroll
    for (int v = 0; v < (kSingle ? 4 : 1); ++v) {
      const int part = kSingle ? v : lane / 8;
      const int line = x + (part >> kLineBit & 1) * kGap, k = (part >> (1 - kLineBit) & 1) * kVec;
      if constexpr (kSingle) where[v].set(line + lane / 4, k + lane % 4);
      else if constexpr (kAlongK) where[v].set(line + lane % 8, k);
      else where[v].set(line, k + lane % 8);
    }
  }

  __device__ void load(unsigned (&r)[4], int group, int step, int stage) const {
    if constexpr (kSingle) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const char* from = reinterpret_cast<const char*>(shared) + where[v](group, step, stage);
        r[v] = *reinterpret_cast<const unsigned*>(from);
      }
    } else {
      const unsigned address = shared_address(shared) + where[0](group, step, stage);
      if constexpr (kAlongK) load_matrices(r, address);
      else load_matrices_transposed(r, address);
    }
  }
};

}  // namespace hexa
