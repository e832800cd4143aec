// Stands for templates/include/hexa_fx/ptx/sm80.cuh. Copies arrive when somebody waits for them, and not before.
#pragma once
#include <hexa_fx/types/element.cuh>

namespace hexa {

inline unsigned shared_address(const void* p) { return unsigned(static_cast<const unsigned char*>(p) - shared); }
inline void copy_async16(unsigned to, const void* from, int bytes) { emulator::self().copies.back().push_back({to, from, bytes}); }
inline void copy_async16_once(unsigned to, const void* from, int bytes) { copy_async16(to, from, bytes); }
inline void commit_copies() { emulator::self().copies.emplace_back(); }
template <int kPending> void wait_for_copies() {
  auto& groups = emulator::self().copies;  // the last one is open
  for (; groups.size() > kPending + 1; groups.pop_front())
    for (const emulator::Copy& c : groups.front()) {
      std::memset(shared + c.to, 0, 16);
      std::memcpy(shared + c.to, c.from, c.bytes);
    }
}

// Lane 8 i + r has the address of row r of matrix i.
inline void load_rows_of(unsigned (&r)[4], unsigned address, bool transposed) {
  const auto& all = emulator::meet(&address, 1);
  const int lane = int(threadIdx.x % 32);
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? lane % 4 * 2 + e : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e;
      std::memcpy(&pair[e], shared + all[8 * i + row][0] + 2 * column, 2);
    }
    std::memcpy(&r[i], pair, 4);
  }
}
inline void load_matrices(unsigned (&r)[4], unsigned address) { load_rows_of(r, address, false); }
inline void load_matrices_transposed(unsigned (&r)[4], unsigned address) { load_rows_of(r, address, true); }

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
