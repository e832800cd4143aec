// The backward of one projection in one launch (the paper's ESFK) with the tiles of gemm_sm80.cuh: dX = dY W^T, dW = X^T dY, db.
//
// Blocks come in the order of the experts: an expert's tiles of dX, then those of dW, so that both read its rows of dY while they
// are in L2. The hardware hands blocks out in that order; the grid has as many as any routing of the rows could need.
#pragma once
#include <hexa_fx/kernels/gemm_sm80.cuh>

namespace hexa {

template <class RowParams>
struct FusedParams {
  RowParams rows;     // dX: esmm
  GemmParams weight;  // dW: estmm
  void* db;           // (E, columns of dY); wide where dW is added to
};

// Sums of the columns of dY (ESS) over a weight tile's rows, from the fragments that the tensor cores read. dY is operand A where
// dW is (E, N, K), else B.
template <class G, bool kOfA>
struct ColumnSum {
  using T = typename G::T;
  using F = typename G::F;
  using Product = typename G::Product;
  static constexpr int kCount = kOfA ? Product::kLinesA : Product::kLinesB;
  F value[kCount] = {};

  template <class A, class B>
  __device__ void add(const A& a, const B& b) {
    if constexpr (kOfA) Product::add_lines(value, a);
    else Product::add_lines(value, b);
  }

  // Columns `first` and on of `width`, at `db` of an expert.
  template <bool kAdd>
  __device__ void store(void* db, long long expert, int first, int width) {
    const Product product(nullptr, nullptr);
    const bool mine = kOfA ? product.writes_a() : product.writes_b();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const F sum = Product::whole_line(value[i]);
      const int column = first + (kOfA ? product.line_of_a(i) : product.line_of_b(i));
      if constexpr (kAdd) {
        if (mine && column < width) static_cast<F*>(db)[expert * width + column] += sum;
      } else {
        if (mine && column < width) (static_cast<T*>(db) + expert * width)[column] = narrow<T>(sum);
      }
    }
  }
};

template <class Rows, class Weight, bool kGradIsA, bool kBias, bool kAdd = false>
struct Fused {
  using T = typename Rows::T;
  static constexpr int BM = Rows::BM, BN = Rows::BN, kGroup = 8, kThreads = Rows::kThreads;
  static constexpr int kSharedBytes = Rows::kSharedBytes > Weight::kSharedBytes ? Rows::kSharedBytes : Weight::kSharedBytes;

  template <class Params>
  static __device__ void run(const Params& p, unsigned char* shared) {
    Rows::Store::zero_tail(p.rows);
    const int columns = (p.rows.n + BN - 1) / BN, down = (p.weight.m + BM - 1) / BM, across = (p.weight.n + BN - 1) / BN;
    const Unit u = find_unit<BM>(p.rows.offs, p.rows.experts, blockIdx.x, columns, down * across);
    if (u.expert < 0) return;
    const int high = (u.end - u.begin + BM - 1) / BM, at = u.index - high * columns;
    if (at >= 0) weight_tile(p, {u.expert, u.begin, u.end, at % down * BM, at / down * BN}, shared);
    else row_tile(p, u, high, columns, shared);
  }

 private:
  // kGroup row tiles by all column tiles at a time: the weight's tiles and the rows stay in L2.
  template <class Params>
  static __device__ void row_tile(const Params& p, const Unit& u, int high, int columns, unsigned char* shared) {
    const int group = u.index / (kGroup * columns), rest = u.index - group * kGroup * columns;
    const int size = min(kGroup, high - group * kGroup);
    const int row = u.begin + (group * kGroup + rest % size) * BM;
    NoSum none;
    Rows::tile(p.rows, {u.expert, row, min(row + BM, u.end), 0, rest / size * BN}, shared, none);
  }

  template <class Params>
  static __device__ void weight_tile(const Params& p, const GemmTile& t, unsigned char* shared) {
    if (kAdd && t.end <= t.row) return;
    if (kBias && (kGradIsA ? t.n0 : t.m0) == 0) {
      const int width = kGradIsA ? p.weight.m : p.weight.n;
      ColumnSum<Weight, kGradIsA> sum;
      Weight::tile(p.weight, t, shared, sum);
      sum.template store<kAdd>(p.db, t.expert, kGradIsA ? t.m0 : t.n0, width);
    } else {
      NoSum none;
      Weight::tile(p.weight, t, shared, none);
    }
  }
};

}  // namespace hexa
