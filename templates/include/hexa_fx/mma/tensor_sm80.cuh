// What the warps of a block multiply, on the tensor cores: BM x BN results, kDepth of k at a time.
//
// Warps lie kWarpsM by kWarpsN. A warp has every kWarpsM-th group of 16 rows and every kWarpsN-th group of 8 columns.
#pragma once
#include <hexa_fx/mma/operand_sm80.cuh>
#include <hexa_fx/ptx/sm80.cuh>
#include <hexa_fx/types/gemm_sm80.cuh>

namespace hexa {

template <class C, class LayoutA, class LayoutB>
struct TensorProduct {
  using T = typename C::T;
  using Core = TensorCore<T>;
  static constexpr int kM = C::BM / (16 * C::kWarpsM), kN = C::BN / (8 * C::kWarpsN), kSteps = C::BK / Core::kDepth;
  static constexpr int kRows = 16 * C::kWarpsM, kColumns = 8 * C::kWarpsN;  // of a group, in which each warp has 16 and 8
  static constexpr int kLinesA = 2 * kM, kLinesB = kN;                      // of which one thread sees elements

  struct A {
    unsigned r[kM][4];
  };  // r[i]: rows g and g + 8 of the group, then the same in the second half of k
  struct B {
    unsigned r[kN][2];
  };  // r[j]: column g, both halves of k
  struct Sum {
    float r[kM][kN][4];
  };

  int m, n, lane;  // first row and column of this warp
  Operand<T, LayoutA, C::kOp == Op::esmm, kM, kRows, 8, 0, kSteps> from_a;
  Operand<T, LayoutB, C::kBAlongK, kN / 2, 2 * kColumns, kColumns, 1, kSteps> from_b;  // two groups of columns at a time

  __device__ TensorProduct(const T* a, const T* b)
      : m(int(threadIdx.x) / 32 % C::kWarpsM * 16),
        n(int(threadIdx.x) / 32 / C::kWarpsM * 8),
        lane(threadIdx.x % 32),
        from_a(a, m, lane),
        from_b(b, n, lane) {}

  // Depth kDepth * step of a stage.
  __device__ void load(A& to, int step, int stage) const {
#pragma unroll
    for (int i = 0; i < kM; ++i) from_a.load(to.r[i], i, step, stage);
  }
  __device__ void load(B& to, int step, int stage) const {
#pragma unroll
    for (int j = 0; j < kN; j += 2) {
      unsigned r[4];
      from_b.load(r, j / 2, step, stage);
#pragma unroll
      for (int v = 0; v < 4; ++v) to.r[j + v / 2][v % 2] = r[v];
    }
  }

  // sum += a b. Operands of tf32 are rounded in place.
  static __device__ void multiply(Sum& sum, A& a, B& b) {
    if constexpr (C::kMath == Math::fast_f32) {
      A a_high, a_low;
      B b_high, b_low;
      split(a.r, a_high.r, a_low.r);
      split(b.r, b_high.r, b_low.r);
      instructions(sum, a_low, b_high);
      instructions(sum, a_high, b_low);
    }
    if constexpr (sizeof(T) == 4) {
      round(a.r);
      round(b.r);
    }
    instructions(sum, a, b);
  }

  static __device__ void add(Sum& sum, const Sum& part) {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j)
#pragma unroll
        for (int v = 0; v < 4; ++v) sum.r[i][j][v] += part.r[i][j][v];
  }

  // f(row, column, value) for every result that this thread has in row group i.
  template <class F> __device__ void each_of_group(const Sum& sum, int i, F&& f) const {
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int v = 0; v < 4; ++v) f(m + lane / 4 + v / 2 * 8, n + j * 8 * C::kWarpsN + lane % 4 * 2 + v % 2, sum.r[i][j][v]);
  }

  // Adds what this thread sees of each line of the operand: of each row of A, or of each column of B.
  static __device__ void add_lines(float (&total)[kLinesA], const A& a) {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int v = 0; v < 4; ++v) add_elements(total[2 * i + v % 2], a.r[i][v]);
  }
  static __device__ void add_lines(float (&total)[kLinesB], const B& b) {
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int v = 0; v < 2; ++v) add_elements(total[j], b.r[j][v]);
  }
  // Number of line i in the tile, and the whole line's total. One thread of those that hold it is its writer.
  __device__ int line_of_a(int i) const { return m + i / 2 * kRows + i % 2 * 8 + lane / 4; }
  __device__ int line_of_b(int j) const { return n + j * 8 * C::kWarpsN + lane / 4; }
  __device__ bool writes_a() const { return n == 0 && lane % 4 == 0; }
  __device__ bool writes_b() const { return m == 0 && lane % 4 == 0; }
  static __device__ float whole_line(float total) {
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    return total + __shfl_xor_sync(0xffffffffu, total, 2);
  }

 private:
  template <int kCount> static __device__ void round(unsigned (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) r[i] = round_tf32(__uint_as_float(r[i]));
  }
  template <int kGroups, int kCount> static __device__ void round(unsigned (&r)[kGroups][kCount]) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) round(r[i]);
  }
  // What the correction terms of 3xTF32 multiply. Infinity has no part in them: inf times a zero rest would be NaN.
  template <int kGroups, int kCount>
  static __device__ void split(const unsigned (&r)[kGroups][kCount], unsigned (&high)[kGroups][kCount],
                               unsigned (&low)[kGroups][kCount]) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i)
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        const float x = __uint_as_float(r[i][v]), rounded = __uint_as_float(round_tf32(x));
        const bool infinite = isinf(rounded);
        high[i][v] = infinite ? 0u : __float_as_uint(rounded);
        low[i][v] = round_tf32(infinite ? 0.f : x - rounded);
      }
  }
  // Up one column group and down the next, so that neighbouring instructions share an operand's registers.
  static __device__ void instructions(Sum& sum, const A& a, const B& b) {
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        const int row = j % 2 ? kM - 1 - i : i;
        Core::multiply(sum.r[row][j], a.r[row], b.r[j]);
      }
  }
  static __device__ void add_elements(float& total, unsigned r) {
#pragma unroll
    for (int i = 0; i < Core::kPacked; ++i) total += Core::element(r, i);
  }
};

}  // namespace hexa
