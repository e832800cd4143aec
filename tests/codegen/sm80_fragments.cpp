// Host program for test_fragments_sm80.py: what the lanes of a warp read from shared memory, without a GPU. ldmatrix is played by
// `matrices`; memory holds the number of each element, so that a register says which one it got.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
static unsigned last_address;
static const char* memory;
namespace hexa {
inline unsigned shared_address(const void* p) { return unsigned(static_cast<const char*>(p) - memory); }
inline void load_matrices(unsigned (&)[4], unsigned address) { last_address = address; }
inline void load_matrices_transposed(unsigned (&)[4], unsigned address) { last_address = address; }
}  // namespace hexa
#include <hexa_fx/load/layouts_sm80.cuh>
#include <hexa_fx/mma/operand_sm80.cuh>

template <class T> static T element(unsigned address) {
  T x;
  std::memcpy(&x, memory + address, sizeof(T));
  return x;
}

// Registers of all lanes, as elements: [lane][register][element of it].
template <class T, class Operand>
static void read(const T* shared, int x, int group, int step, int stage, bool transposed, T (&out)[32][4][4 / sizeof(T)]) {
  unsigned addresses[32], r[32][4];
  for (int lane = 0; lane < 32; ++lane) {
    const Operand operand(shared, x, lane);
    operand.load(r[lane], group, step, stage);
    addresses[lane] = last_address;
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int v = 0; v < 4; ++v)
      for (int e = 0; e < int(4 / sizeof(T)); ++e) {
        if (Operand::kSingle) std::memcpy(&out[lane][v][e], &r[lane][v], sizeof(T));
        else if (transposed) out[lane][v][e] = element<T>(addresses[8 * v + lane % 4 * 2 + e] + lane / 4 * sizeof(T));
        else out[lane][v][e] = element<T>(addresses[8 * v + lane / 4] + lane % 4 * 4 + e * sizeof(T));
      }
}

// Every kStep-th line from any first one on, as loaders put them.
template <class T, class Layout, bool kAlongK, int BK, int kStep>
static int lines() {
  int wrong = 0;
  for (int first = 0; first < kStep; ++first) {
    const auto at = [&](int line) { return kAlongK ? Layout::at(first + line, 8) : Layout::at(8, first + line); };
    const hexa::Places<T, Layout, kStep> places(at);
    for (int i = 0; i * kStep < BK; ++i) wrong += places(i, 1) != int(sizeof(T)) * (at(i * kStep) + Layout::kStage);
  }
  return wrong;
}

// kIsA: registers are (lines g, g + 8) x (halves of k), else (halves of k) x (column groups).
template <class T, bool kIsA, bool kAlongK, int X, int BK, int kWarps, int kStages = 3>
static int check() {
  using Layout = hexa::Swizzled<T, kAlongK, X, BK, kStages>;
  constexpr int kPacked = 4 / sizeof(T), kDepth = 32 / sizeof(T), kHalf = kDepth / 2, kSteps = BK / kDepth;
  constexpr int kAcross = 8 * kWarps, kStride = 16 * kWarps, kGroups = X / kStride, kGap = kIsA ? 8 : kAcross;
  using Operand = hexa::Operand<T, Layout, kAlongK, kGroups, kStride, kGap, kIsA ? 0 : 1, kSteps>;
  std::vector<T> shared(Layout::kSize, T(-1));
  memory = reinterpret_cast<const char*>(shared.data());
  int wrong = 0;
  for (int stage = 0; stage < kStages; ++stage)
    for (int x = 0; x < X; ++x)
      for (int k = 0; k < BK; ++k) {
        T& there = shared[Layout::at(x, k) + stage * Layout::kStage];
        wrong += there != T(-1);  // two elements in one place
        there = T((stage * X + x) * BK + k);
      }
  for (int stage = 0; stage < kStages; ++stage)
    for (int warp = 0; warp < kWarps; ++warp)
      for (int group = 0; group < kGroups; ++group)
        for (int step = 0; step < kSteps; ++step) {
          T out[32][4][kPacked];
          const int first = warp * (kIsA ? 16 : 8);
          read<T, Operand>(shared.data(), first, group, step, stage, !kAlongK, out);
          for (int lane = 0; lane < 32; ++lane)
            for (int v = 0; v < 4; ++v)
              for (int e = 0; e < kPacked; ++e) {
                const int line_half = kIsA ? v % 2 : v / 2, k_half = kIsA ? v / 2 : v % 2;
                const int x = first + group * kStride + line_half * kGap + lane / 4;
                const int k = step * kDepth + k_half * kHalf + lane % 4 * kPacked + e;
                wrong += out[lane][v][e] != T((stage * X + x) * BK + k);
              }
        }
  wrong += lines<T, Layout, kAlongK, BK, 4>() + lines<T, Layout, kAlongK, BK, 8>() + lines<T, Layout, kAlongK, BK, 16>();
  std::printf("%d bytes, %c, %s k, %d x %d, %d warps: %d wrong\n", int(sizeof(T)), kIsA ? 'A' : 'B', kAlongK ? "along" : "across", X, BK,
              kWarps, wrong);
  return wrong;
}

template <class T, bool kIsA, bool kAlongK, int BK> static int sizes() {
  return check<T, kIsA, kAlongK, 32, BK, 1>() + check<T, kIsA, kAlongK, 64, BK, 1>() + check<T, kIsA, kAlongK, 64, BK, 2>() +
         check<T, kIsA, kAlongK, 64, BK, 4>() + check<T, kIsA, kAlongK, 128, BK, 1>() + check<T, kIsA, kAlongK, 128, BK, 2>() +
         check<T, kIsA, kAlongK, 128, BK, 4>() + check<T, kIsA, kAlongK, 256, BK, 4>() + check<T, kIsA, kAlongK, 256, BK, 8>();
}
template <class T, int BK> static int both() {
  return sizes<T, true, true, BK>() + sizes<T, true, false, BK>() + sizes<T, false, true, BK>() + sizes<T, false, false, BK>();
}

int main() {
  const int wrong = both<uint16_t, 32>() + both<uint16_t, 64>() + both<uint32_t, 16>() + both<uint32_t, 32>() +
                    check<uint16_t, true, true, 16, 64, 1>() + check<uint32_t, true, true, 16, 16, 1>();
  return wrong != 0;
}
