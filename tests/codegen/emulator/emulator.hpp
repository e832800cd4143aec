// Runs a kernel's own text on the host: a block's threads are fibers that take turns, and wait for each other where the device's do.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct uint2 {
  unsigned x, y;
};
struct float2 {
  float x, y;
};
struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx, gridDim;
alignas(256) unsigned char shared[1 << 18];

using std::max;
using std::min;
template <class T> T __ldg(const T* p) { return *p; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

namespace emulator {

constexpr int kStack = 1 << 16, kWords = 6;

struct Copy {
  unsigned to;  // in `shared`
  const void* from;
  int bytes;  // of sixteen; zeros behind them
};
struct Fiber {
  ucontext_t start;
  void* place[5];  // where it goes on
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool done = false;
  long barriers = 0, meetings = 0;  // that it has come to
  std::deque<std::vector<Copy>> copies{1};  // that are under way, in groups
};
struct Warp {
  unsigned word[2][32][kWords];
  long arrived[2] = {0, 0};
};

inline void* scheduler[5];
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline const std::function<void()>* body;

inline Fiber& self() { return fibers[threadIdx.x]; }
[[gnu::noinline]] inline void jump(void** to) { __builtin_longjmp(to, 1); }
// Jumps leave out what swapcontext asks the system for.
[[gnu::noinline]] inline void leave(void** here, void** to) {
  if (!__builtin_setjmp(here)) jump(to);
}
[[gnu::noinline]] inline void begin(Fiber& fiber) {
  if (!__builtin_setjmp(scheduler)) setcontext(&fiber.start);
}
inline void pause() {
  const unsigned me = threadIdx.x;
  leave(fibers[me].place, scheduler);
  threadIdx.x = me;
}
inline void enter() {
  (*body)();
  self().done = true;
  jump(scheduler);
}

// Every lane gives some words, and sees those of all lanes.
inline const unsigned (&meet(const unsigned* words, int count))[32][kWords] {
  Fiber& me = self();
  Warp& warp = warps[threadIdx.x / 32];
  const long number = me.meetings++;  // nobody is two ahead, so that two rooms are enough
  std::copy(words, words + count, warp.word[number % 2][threadIdx.x % 32]);
  ++warp.arrived[number % 2];
  while (warp.arrived[number % 2] < 32 * (number / 2 + 1)) pause();
  return warp.word[number % 2];
}

inline void run(Index grid, unsigned threads, const std::function<void()>& kernel) {
  gridDim = grid, body = &kernel;
  for (unsigned block = 0; block < grid.x * grid.y * grid.z; ++block) {
    blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    std::memset(shared, 0xcd, sizeof(shared));
    fibers = std::vector<Fiber>(threads), warps = std::vector<Warp>(threads / 32);
    for (Fiber& f : fibers) {
      getcontext(&f.start);
      f.start.uc_stack.ss_sp = f.stack.get(), f.start.uc_stack.ss_size = kStack, f.start.uc_link = nullptr;
      makecontext(&f.start, enter, 0);
    }
    for (bool some = true, first = true; some; first = false) {
      some = false;
      for (unsigned i = 0; i < threads; ++i) {
        const unsigned next = blockIdx.x % 2 ? threads - 1 - i : i;  // results may not depend on who is first
        if (fibers[next].done) continue;
        some = true, threadIdx.x = next;
        first ? begin(fibers[next]) : leave(scheduler, fibers[next].place);
      }
    }
  }
}

}  // namespace emulator

inline void __syncthreads() {
  using namespace emulator;
  const long mine = ++self().barriers;
  for (bool all = false; !all;) {
    pause();
    all = std::all_of(fibers.begin(), fibers.end(), [&](const Fiber& f) { return f.done || f.barriers >= mine; });
  }
}
inline void __syncwarp() { emulator::meet(nullptr, 0); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int atomicAdd(int* at, int x) {
  const int before = *at;
  *at += x;
  return before;
}
inline unsigned __match_any_sync(unsigned, int value) {
  const unsigned word = unsigned(value);
  const auto& all = emulator::meet(&word, 1);
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= unsigned(all[lane][0] == word) << lane;
  return same;
}
inline int __shfl_sync(unsigned, int value, int from) {
  const unsigned word = unsigned(value);
  return int(emulator::meet(&word, 1)[from][0]);
}
template <class Int> Int __shfl_up_sync(unsigned, Int value, int distance) {
  const unsigned word = unsigned(value);
  const int lane = int(threadIdx.x % 32);
  return Int(emulator::meet(&word, 1)[lane < distance ? lane : lane - distance][0]);
}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  const unsigned word = __float_as_uint(value);
  return __uint_as_float(emulator::meet(&word, 1)[threadIdx.x % 32 ^ mask][0]);
}
template <class Int> Int __shfl_xor_sync(unsigned, Int value, int mask) {
  const unsigned word = unsigned(value);
  return Int(emulator::meet(&word, 1)[threadIdx.x % 32 ^ mask][0]);
}
inline unsigned __ballot_sync(unsigned, bool holds) {
  const unsigned word = holds;
  const auto& all = emulator::meet(&word, 1);
  unsigned found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= all[lane][0] << lane;
  return found;
}
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= unsigned(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
