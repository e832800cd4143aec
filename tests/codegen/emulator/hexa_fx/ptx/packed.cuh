// Stands for templates/include/hexa_fx/ptx/packed.cuh.
#pragma once
#include <hexa_fx/types/element.cuh>

namespace hexa {

inline void copy_async4(void* to, const void* from) { std::memcpy(to, from, 4); }
inline void commit_copies() {}
template <int kPending> void wait_for_copies() {}
inline void stream16(uint4& r, const void* from, bool wanted) {
  if (wanted) std::memcpy(&r, from, 16);
}
template <int kBytes> void stream_number(unsigned& r, const void* from, bool wanted) {
  if (!wanted) return;
  r = 0;
  std::memcpy(&r, from, kBytes);
}
inline unsigned byte_times_256(unsigned word, int i, unsigned low) { return (word >> 8 * i & 255) * 256 + low; }

template <class T> float half_of(unsigned pair, int i) {
  T x;
  const uint16_t bits = uint16_t(pair >> 16 * i);
  std::memcpy(&x, &bits, 2);
  return widen(x);
}
template <class T> unsigned pair_of(float low, float high) {
  const T x[2] = {narrow<T>(low), narrow<T>(high)};
  unsigned pair;
  std::memcpy(&pair, x, 4);
  return pair;
}

template <class T> struct Pair {
  static unsigned both(float x) { return pair_of<T>(x, x); }
  static unsigned multiply(unsigned a, unsigned b) {
    return pair_of<T>(half_of<T>(a, 0) * half_of<T>(b, 0), half_of<T>(a, 1) * half_of<T>(b, 1));
  }
};

// mma.sync.m16n8k16, by the tables of the PTX manual.
template <class T> struct TensorCore {
  static void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const unsigned mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const auto& all = emulator::meet(mine, 6);
    const int lane = int(threadIdx.x % 32);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) {
        const unsigned from_a = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        const unsigned from_b = all[column * 4 + k % 8 / 2][4 + k / 8];
        d[i] += half_of<T>(from_a, k % 2) * half_of<T>(from_b, k % 2);
      }
    }
  }
};

}  // namespace hexa
