// Brings stages of an operand to shared memory: 16 bytes at a time by cp.async, or element by element where addresses or strides are
// no multiples of 16 bytes. Sizes need not be multiples of anything.
#pragma once
#include <hexa_fx/load/layouts_sm80.cuh>
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/ptx/sm80.cuh>
#include <hexa_fx/types/gemm_sm80.cuh>

namespace hexa {

// `count` elements, at most 16 bytes of them, to byte `at` of shared memory, and zeros after them. `from` is only read where
// count > 0.
template <bool kAligned, class T>
__device__ void copy16(T* shared, int at, const T* from, int count) {
  constexpr int kVec = 16 / int(sizeof(T));
  if constexpr (kAligned) {
    copy_async16(shared_address(shared) + at, from, count * int(sizeof(T)));
  } else {
    alignas(16) T raw[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) raw[i] = i < count ? from[i] : narrow<T>(wide_t<T>(0));
    *reinterpret_cast<uint4*>(reinterpret_cast<char*>(shared) + at) = *reinterpret_cast<const uint4*>(raw);
  }
}

// Brings stages of an operand whose lines run along k: line r of the tile starts at line_of(r), null if there is none, and has k
// elements. What a line that is not there would hold stays as it is in shared memory: its results are stored nowhere.
template <class T, class Layout, int X, int BK, int kThreads, bool kAligned>
struct LinesAlongK {
  static constexpr int kVec = 16 / int(sizeof(T)), kPerLine = BK / kVec, kStep = kThreads / kPerLine;
  static constexpr int kCount = (X + kStep - 1) / kStep;
  Places<T, Layout, kStep> places;
  const T* from[kCount];
  unsigned valid = 0;  // bit i: line i of this thread is there
  int k;               // elements from this thread's column on

  template <class LineOf>
  __device__ LinesAlongK(int k_, LineOf line_of)
      : places([](int r) { return Layout::at(first() + r, column()); }), k(k_ - column()) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = first() + i * kStep;
      const T* line = X % kStep != 0 && r >= X ? nullptr : line_of(r);
      valid |= (line ? 1u : 0u) << i;
      from[i] = line + column();
    }
  }
  static __device__ int first() { return threadIdx.x / kPerLine; }
  static __device__ int column() { return threadIdx.x % kPerLine * kVec; }
  __device__ void load(T* shared, int stage, int k0) {
    const int count = max(0, min(kVec, k - k0));
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (valid >> i & 1) copy16<kAligned>(shared, places(i, stage), from[i] + k0, count);
  }
};

// The same for an operand whose lines run across k; `left` columns from this thread's on are valid in each. Lines beyond the last are
// zero, since they are summed over.
template <class T, class Layout, int X, int BK, int kThreads, bool kAligned, class Lines>
struct LinesAcrossK {
  static constexpr int kVec = 16 / int(sizeof(T)), kPerLine = X / kVec, kStep = kThreads / kPerLine;
  static constexpr int kCount = (BK + kStep - 1) / kStep;
  static_assert(kThreads % kPerLine == 0, "a thread keeps its column");
  Places<T, Layout, kStep> places;
  Lines lines;
  int count;
  int next[kCount];  // of the stage that is loaded next: indices are read a stage ahead and used when they have arrived

  __device__ LinesAcrossK(Lines lines_, int left)
      : places([](int r) { return Layout::at(column(), first() + r); }), lines(lines_), count(min(kVec, left)) {
    fetch(0);
  }
  static __device__ int first() { return threadIdx.x / kPerLine; }
  static __device__ int column() { return threadIdx.x % kPerLine * kVec; }
  __device__ void fetch(int k0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) next[i] = lines.index(k0 + first() + i * kStep);
  }
  __device__ void load(T* shared, int stage, int k0) {
    if (count > 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (BK % kStep == 0 || first() + i * kStep < BK)
          copy16<kAligned>(shared, places(i, stage), lines.at(max(next[i], 0)), next[i] >= 0 ? count : 0);
    }
    fetch(k0 + BK);
  }
};

// Lines of a matrix: `from` is the column of line 0 that this thread reads, n lines of which line i of the tile is number first + i,
// or index[first + i] / divisor.
template <class T, bool kGather>
struct Lines {
  const T* from;
  const int* indices;
  long long stride;
  int first, end;
  Divisor divisor;
  __device__ int index(int i) const { return first + i >= end ? -1 : kGather ? __ldg(indices + first + i) : first + i; }
  __device__ const T* at(int index) const { return from + (kGather ? static_cast<long long>(divisor(index)) : index) * stride; }
};

}  // namespace hexa
