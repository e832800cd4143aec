// The interface of tensor_sm80.cuh without tensor cores: float and double by fused multiply-add.
//
// Threads lie 8 kWarpsM by 4 kWarpsN. A thread has every 8 kWarpsM-th row and every 4 kWarpsN-th column.
#pragma once
#include <hexa_fx/types/gemm_sm80.cuh>

namespace hexa {

template <class C, class LayoutA, class LayoutB>
struct SimtProduct {
  using T = typename C::T;
  static constexpr int kRows = 8 * C::kWarpsM, kColumns = 4 * C::kWarpsN, kM = C::BM / kRows, kN = C::BN / kColumns;
  static constexpr int kSteps = C::BK, kLinesA = kM, kLinesB = kN;

  struct A {
    T r[kM];
  };
  struct B {
    T r[kN];
  };
  struct Sum {
    T r[kM][kN];
  };

  const T* a;
  const T* b;
  int m, n;  // first row and column of this thread

  __device__ SimtProduct(const T* a_, const T* b_) : a(a_), b(b_) { m = threadIdx.x % kRows, n = threadIdx.x / kRows; }

  __device__ void load(A& to, int step, int stage) const {
#pragma unroll
    for (int i = 0; i < kM; ++i) to.r[i] = a[LayoutA::at(m + i * kRows, step) + stage * LayoutA::kStage];
  }
  __device__ void load(B& to, int step, int stage) const {
#pragma unroll
    for (int j = 0; j < kN; ++j) to.r[j] = b[LayoutB::at(n + j * kColumns, step) + stage * LayoutB::kStage];
  }

  static __device__ void multiply(Sum& sum, const A& a, const B& b) {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int column = i % 2 ? kN - 1 - j : j;
        sum.r[i][column] = fma(a.r[i], b.r[column], sum.r[i][column]);
      }
  }

  template <class F> __device__ void each_of_group(const Sum& sum, int i, F&& f) const {
#pragma unroll
    for (int j = 0; j < kN; ++j) f(m, n + j * kColumns, sum.r[i][j]);
  }

  static __device__ void add_lines(T (&total)[kLinesA], const A& a) {
#pragma unroll
    for (int i = 0; i < kM; ++i) total[i] += a.r[i];
  }
  static __device__ void add_lines(T (&total)[kLinesB], const B& b) {
#pragma unroll
    for (int j = 0; j < kN; ++j) total[j] += b.r[j];
  }
  __device__ int line_of_a(int i) const { return m + i * kRows; }
  __device__ int line_of_b(int j) const { return n + j * kColumns; }
  __device__ bool writes_a() const { return n == 0; }
  __device__ bool writes_b() const { return m == 0; }
  static __device__ T whole_line(T total) { return total; }
};

}  // namespace hexa
