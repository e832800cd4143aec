// Grouped matrix products with mma.sync (sm_80 and newer), or with plain FMA: the esmm and estmm of the paper.
//
//   esmm   D[p, n] = sum_k A[row(p), k] W[e(p)][n, k] + bias[e(p), n], row(p) = v[p] / top_k or p; one tile a block
//   estmm  D[e][i, j] = sum over rows p of expert e of A[row(p), i] B[row(p), j]; one tile a block
//
// Multistage: cp.async brings BK-deep stages to swizzled shared memory, ldmatrix feeds the tensor cores, accumulators pass
// through shared memory to 16-byte stores. kAligned = false replaces cp.async by element-wise loads: any address, any stride
// (the innermost is 1). Sizes need not be multiples of anything.
#pragma once
#include <hexa_fx/epilogue/store_sm80.cuh>
#include <hexa_fx/load/listed_sm80.cuh>
#include <hexa_fx/load/stages_sm80.cuh>
#include <hexa_fx/mma/simt_sm80.cuh>
#include <hexa_fx/mma/tensor_sm80.cuh>
#include <hexa_fx/scheduler/segments.cuh>

namespace hexa {

// What weight tiles may add up as they go: nothing. See fused_sm80.cuh.
struct NoSum {
  template <class A, class B> __device__ void add(const A&, const B&) {}
};

template <bool kSimt> struct Parts {
  template <class T, bool kAlongK, int X, int BK, int kStages> using Layout = Swizzled<T, kAlongK, X, BK, kStages>;
  template <class C, class A, class B> using Product = TensorProduct<C, A, B>;
};
template <> struct Parts<true> {
  template <class T, bool kAlongK, int X, int BK, int kStages> using Layout = Padded<T, kAlongK, X, BK, kStages>;
  template <class C, class A, class B> using Product = SimtProduct<C, A, B>;
};

template <class C_>
struct Gemm {
  using C = C_;
  using T = typename C::T;
  using F = wide_t<T>;
  static constexpr bool kEsmm = C::kOp == Op::esmm;
  static constexpr int BM = C::BM, BN = C::BN, BK = C::BK, kStages = C::kStages, kThreads = C::kThreads, kHalf = C::kHalf;

  using Choice = Parts<C::kMath == Math::simt>;
  using LayoutA = typename Choice::template Layout<T, kEsmm, BM, BK, kStages>;
  using LayoutB = typename Choice::template Layout<T, C::kBAlongK, BN, BK, kStages>;
  using Product = typename Choice::template Product<C, LayoutA, LayoutB>;
  using Sum = typename Product::Sum;
  using Store = Epilogue<C, Product>;

  static constexpr int kBytes = (LayoutA::kSize + LayoutB::kSize) * int(sizeof(T));
  static constexpr int kSharedBytes = kBytes > Store::kBytes ? kBytes : Store::kBytes;

  static __device__ void run(const GemmParams& p, unsigned char* shared) {
    if constexpr (kEsmm) Store::zero_tail(p);
    const GemmTile t = tile_of(p);
    NoSum none;
    if (t.expert >= 0) tile(p, t, shared, none);
  }

  // `lines` sees every fragment of a weight tile.
  template <class Seen>
  static __device__ void tile(const GemmParams& p, const GemmTile& t, unsigned char* shared, Seen& lines) {
    if constexpr (C::kAdd) {
      if (t.end <= t.row) return;
    }
    Sum sum = {};
    T* a = reinterpret_cast<T*>(shared);
    const Product product(a, a + LayoutA::kSize);
    if constexpr (kEsmm) multiply_esmm(p, t, a, product, sum);
    else multiply_estmm(p, t, a, product, sum, lines);
    Store::run(p, t, reinterpret_cast<F*>(shared), product, sum);
  }

 private:
  // Eight row tiles by all column tiles at a time: the weight's tiles and the rows stay in L2.
  static __device__ GemmTile tile_of(const GemmParams& p) {
    constexpr int kGroup = 8;
    const int columns = (p.n + C::kStepN - 1) / C::kStepN;
    if constexpr (kEsmm) {
      const int group = blockIdx.x / (kGroup * columns), rest = blockIdx.x - group * kGroup * columns;
      const Segment s = find_segment<BM>(p.offs, p.experts, group * kGroup + rest % kGroup);
      return {s.expert, s.begin, s.end, 0, rest / kGroup * C::kStepN};
    } else {
      const int rows = (p.m + BM - 1) / BM, per_expert = rows * columns;
      const int e = blockIdx.x / per_expert, rest = blockIdx.x - e * per_expert;
      return {e, __ldg(p.offs + e), __ldg(p.offs + e + 1), rest % rows * BM, rest / rows * C::kStepN};
    }
  }

  static __device__ void multiply_esmm(const GemmParams& p, const GemmTile& t, T* stages, const Product& product, Sum& sum) {
    NoSum none;
    const T* a = static_cast<const T*>(p.a);
    LinesAlongK<T, LayoutA, BM, BK, kThreads, C::kAligned> load_a(p.k, [&](int r) -> const T* {
      const int row = t.row + r;
      if (row >= t.end) return nullptr;
      return a + (C::kGatherA ? static_cast<long long>(p.top_k(__ldg(p.a_index + row))) : row) * p.a_stride;
    });
    const int width = C::kGlu == Glu::interleaved ? 2 * p.n : p.n;
    const int n0 = C::kGlu == Glu::interleaved ? 2 * t.n0 : t.n0;
    if constexpr (C::kListed) {
      multiply_listed(p, t, load_a, n0, width, stages, product, sum);
      return;
    }
    const long long expert = t.expert * p.b_expert;
    const T* gate = static_cast<const T*>(p.b) + expert;
    const long long to_up = C::kBAlongK ? p.n * p.b_stride : p.n;  // concat
    const T* up = C::kGlu == Glu::split ? static_cast<const T*>(p.b2) + expert : gate + to_up;
    if constexpr (C::kBAlongK) {
      LinesAlongK<T, LayoutB, BN, BK, kThreads, C::kAligned> load_b(p.k, [&](int r) -> const T* {
        const int n = n0 + r % kHalf;
        return n < width ? (C::kHalves && r >= kHalf ? up : gate) + n * p.b_stride : nullptr;
      });
      mainloop(load_a, load_b, p.k, stages, product, sum, none);
    } else {
      const int column = threadIdx.x % (BN / (16 / int(sizeof(T)))) * (16 / int(sizeof(T))), n = n0 + column % kHalf;
      const Lines<T, false> lines{(C::kHalves && column >= kHalf ? up : gate) + n, nullptr, p.b_stride, 0, p.k, {}};
      LinesAcrossK<T, LayoutB, BN, BK, kThreads, C::kAligned, Lines<T, false>> load_b(lines, width - n);
      mainloop(load_a, load_b, p.k, stages, product, sum, none);
    }
  }

  // The same on a weight whose lines are asked for one by one.
  template <class LoadA>
  static __device__ void multiply_listed(const GemmParams& p, const GemmTile& t, LoadA& load_a, int n0, int width, T* stages,
                                         const Product& product, Sum& sum) {
    const ListedWeight<C> weight(p, t.expert);
    NoSum none;
    if constexpr (C::kBAlongK) {
      LinesAlongK<T, LayoutB, BN, BK, kThreads, C::kAligned> load_b(p.k, [&](int r) -> const T* {
        const int n = n0 + r % kHalf;
        return n < width ? weight.line(n, C::kHalves && r >= kHalf) : nullptr;
      });
      mainloop(load_a, load_b, p.k, stages, product, sum, none);
    } else {
      const int column = threadIdx.x % (BN / (16 / int(sizeof(T)))) * (16 / int(sizeof(T))), n = n0 + column % kHalf;
      const ListedLines<C> lines{weight, n, p.k, C::kHalves && column >= kHalf};
      LinesAcrossK<T, LayoutB, BN, BK, kThreads, C::kAligned, ListedLines<C>> load_b(lines, width - n);
      mainloop(load_a, load_b, p.k, stages, product, sum, none);
    }
  }

  template <class Seen>
  static __device__ void multiply_estmm(const GemmParams& p, const GemmTile& t, T* stages, const Product& product, Sum& sum,
                                        Seen& lines) {
    const int rows = t.end - t.row;
    if (rows <= 0) return;
    constexpr int kVec = 16 / int(sizeof(T));
    using LinesA = Lines<T, C::kGatherA>;
    using LinesB = Lines<T, C::kGatherB>;
    const int i0 = t.m0 + threadIdx.x % (BM / kVec) * kVec, j0 = t.n0 + threadIdx.x % (BN / kVec) * kVec;
    const T* a = static_cast<const T*>(p.a);
    const T* b = static_cast<const T*>(p.b);
    const LinesA a_lines{a + i0, p.a_index, p.a_stride, t.row, t.end, p.top_k};
    const LinesB b_lines{b + j0, p.b_index, p.b_stride, t.row, t.end, p.top_k};
    LinesAcrossK<T, LayoutA, BM, BK, kThreads, C::kAligned, LinesA> load_a(a_lines, p.m - i0);
    LinesAcrossK<T, LayoutB, BN, BK, kThreads, C::kAligned, LinesB> load_b(b_lines, p.n - j0);
    mainloop(load_a, load_b, rows, stages, product, sum, lines);
  }

  template <class LoadA, class LoadB, class Seen>
  static __device__ void mainloop(LoadA& load_a, LoadB& load_b, int depth, T* stages, const Product& product, Sum& sum,
                                  Seen& lines) {
    T *a = stages, *b = stages + LayoutA::kSize;
    const int steps = (depth + BK - 1) / BK;
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < steps) {
        load_a.load(a, s, s * BK);
        load_b.load(b, s, s * BK);
      }
      commit_copies();
    }
    int read = 0, write = kStages - 1;
    for (int i = 0; i < steps; ++i) {
      wait_for_copies<kStages - 2>();
      __syncthreads();
      if (i + kStages - 1 < steps) {
        load_a.load(a, write, (i + kStages - 1) * BK);
        load_b.load(b, write, (i + kStages - 1) * BK);
      }
      commit_copies();
      if constexpr (C::kMath == Math::fast_f32) {
        // Tensor cores truncate as they add: short sums, added up in float32, keep the error from growing with the depth.
        Sum part = {};
        stage(product, read, part, lines);
        product.add(sum, part);
      } else {
        stage(product, read, sum, lines);
      }
      read = read + 1 == kStages ? 0 : read + 1;
      write = write + 1 == kStages ? 0 : write + 1;
    }
    wait_for_copies<0>();
    __syncthreads();
  }

  template <class Seen>
  static __device__ void stage(const Product& product, int read, Sum& sum, Seen& lines) {
#pragma unroll
    for (int step = 0; step < Product::kSteps; ++step) {
      typename Product::A a;
      typename Product::B b;
      product.load(a, step, read);
      product.load(b, step, read);
      lines.add(a, b);
      Product::multiply(sum, a, b);
    }
  }
};

}  // namespace hexa
