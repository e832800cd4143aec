// Where an operand's stages lie in shared memory: X rows (or columns) by BK deep, free of bank conflicts.
//
// `at` is an element of the first stage; kStage elements further is the next one. Lines that are a multiple of kPeriod apart lie
// alike: a line further is kPitch elements further. Addresses are so made once, and the main loop adds constants to them.
#pragma once

namespace hexa {

// For ldmatrix: lines of up to 128 bytes, eight of them together, whose 16-byte chunks are exchanged by exclusive or with the line's
// number. kAlongK: lines run along k.
template <class T, bool kAlongK, int X, int BK, int kStages>
struct Swizzled {
  static constexpr int kVec = 16 / int(sizeof(T)), kLine = 128 / int(sizeof(T));
  static constexpr int kPitch = kAlongK ? BK : X, kPeriod = 8, kWidth = kPitch < kLine ? kPitch : kLine;
  static constexpr int kExchanged = kWidth == kLine ? 7 : kWidth * 2 == kLine ? 3 : 1;
  static constexpr int kStage = X * BK, kSize = kStage * kStages;

  static __device__ int at(int x, int k) {
    const int line = kAlongK ? x : k, column = kAlongK ? k : x;
    const int exchange = (line % 8 * kWidth / kLine & kExchanged) * kVec;
    const int block = line / 8 * (8 * kPitch) + column / kWidth * (8 * kWidth);
    return block + line % 8 * kWidth + ((column % kWidth) ^ exchange);
  }
};

// For plain loads of single elements: lines are padded by 16 bytes.
template <class T, bool kAlongK, int X, int BK, int kStages>
struct Padded {
  static constexpr int kVec = 16 / int(sizeof(T)), kPitch = (kAlongK ? BK : X) + kVec, kPeriod = 1, kLines = kAlongK ? X : BK;
  static constexpr int kStage = kLines * kPitch, kSize = kStages * kStage - kVec;

  static __device__ int at(int x, int k) { return (kAlongK ? x : k) * kPitch + (kAlongK ? k : x); }
};

// Where a thread puts every kStep-th line of a stage, in bytes.
template <class T, class Layout, int kStep>
struct Places {
  static constexpr int kDistinct = kStep >= Layout::kPeriod ? 1 : Layout::kPeriod / kStep, kSize = sizeof(T);
  int first[kDistinct];

  template <class At> __device__ explicit Places(At at) {
#pragma unroll
    for (int d = 0; d < kDistinct; ++d) first[d] = at(d * kStep) * kSize;
  }
  __device__ int operator()(int i, int stage) const {
    return first[i % kDistinct] + i / kDistinct * (kDistinct * kStep * Layout::kPitch * kSize) + stage * (Layout::kStage * kSize);
  }
};

}  // namespace hexa
