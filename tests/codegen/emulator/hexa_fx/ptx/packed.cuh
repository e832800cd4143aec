// Stands for templates/include/hexa_fx/ptx/packed.cuh.
#pragma once
#include <hexa_fx/ptx/sm80.cuh>

namespace hexa {

inline void copy_async4(void* to, const void* from) { std::memcpy(to, from, 4); }
inline void stream16(uint4& r, const void* from, bool wanted) {
  if (wanted) std::memcpy(&r, from, 16);
}
template <int kBytes> void stream_number(unsigned& r, const void* from, bool wanted) {
  if (!wanted) return;
  r = 0;
  std::memcpy(&r, from, kBytes);
}
inline unsigned byte_times_256(unsigned word, int i, unsigned low) { return (word >> 8 * i & 255) * 256 + low; }

template <class T> struct Pair {
  static unsigned both(float x) { return pair_of<T>(x, x); }
  static unsigned multiply(unsigned a, unsigned b) {
    return pair_of<T>(half_of<T>(a, 0) * half_of<T>(b, 0), half_of<T>(a, 1) * half_of<T>(b, 1));
  }
};

}  // namespace hexa
