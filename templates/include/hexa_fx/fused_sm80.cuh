// The backward of one projection in one launch (the paper's ESFK) with the tiles of gemm_sm80.cuh: dX = dY W^T, dW = X^T dY, db.
//
// Blocks come in the order of the experts: an expert's tiles of dX, then those of dW, so that both read its rows of dY while they
// are in L2. The hardware hands blocks out in that order; the grid has as many as any routing of the rows could need.
#pragma once
#include <hexa_fx/gemm_sm80.cuh>

namespace hexa {

struct FusedParams {
  GemmParams rows;    // dX: esmm
  GemmParams weight;  // dW: estmm
  void* db;           // (E, columns of dY); wide where dW is added to
};

// Sums of the columns of dY (ESS) over a weight tile's rows, from the fragments that the tensor cores read. dY is operand A where
// dW is (E, N, K), else B.
template <class G, bool kOfA>
struct ColumnSum {
  using T = typename G::T;
  using F = typename G::F;
  static constexpr bool kSimt = G::kSimt;
  static constexpr int kExtent = kOfA ? G::BM : G::BN;
  // lines of the operand that one thread sees: a fragment of A has two, 8 lines apart
  static constexpr int kPer = kOfA && !kSimt ? 2 : 1, kBits = sizeof(T) == 2 ? 2 : 1;
  static constexpr int kCount = kExtent / (kOfA ? (kSimt ? G::ThreadsM::value : 8 * G::ThreadsM::value)
                                                : (kSimt ? G::ThreadsN::value : 8 * G::ThreadsN::value));
  F value[kCount] = {};

  template <class A, class B>
  __device__ void add(const A& a, const B& b) {
    if constexpr (kOfA) add_fragment(a);
    else add_fragment(b);
  }
  template <class Fragment>
  __device__ void add_fragment(const Fragment& f) {
    static_assert(decltype(cute::size<1>(f))::value * kPer == kCount, "lines of a thread");
    CUTE_UNROLL
    for (int i = 0; i < cute::size<1>(f); ++i) {
      CUTE_UNROLL
      for (int v = 0; v < cute::size<0>(f); ++v) value[i * kPer + (kPer == 2 ? v / kBits % 2 : 0)] += wide(f(v, i));
    }
  }

  // Columns `first` and on of `width`, at `db` of an expert.
  template <bool kAdd>
  __device__ void store(void* db, long long expert, int first, int width) {
    using namespace cute;
    auto thread = typename G::Mma{}.get_slice(threadIdx.x);
    const bool mine = kSimt ? other_thread() == 0 : other_thread() == 0 && threadIdx.x % 4 == 0;
    auto where = [&] {
      if constexpr (kOfA) return thread.partition_A(make_identity_tensor(Shape<Int<G::BM>, Int<G::BK>>{}));
      else return thread.partition_B(make_identity_tensor(Shape<Int<G::BN>, Int<G::BK>>{}));
    }();
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      F sum = value[i];
      if constexpr (!kSimt) {
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      }
      const int column = first + get<0>(where(i % kPer * kBits, i / kPer, 0));
      if constexpr (kAdd) {
        if (mine && column < width) static_cast<F*>(db)[expert * width + column] += sum;
      } else {
        if (mine && column < width) (static_cast<T*>(db) + expert * width)[column] = narrow<T>(sum);
      }
    }
  }

 private:
  // Which of those that hold the same lines this is: the warp, or the thread, along the other operand.
  static __device__ int other_thread() {
    const int i = kSimt ? threadIdx.x : threadIdx.x / 32;
    return kOfA ? i / G::ThreadsM::value : i % G::ThreadsM::value;
  }
  template <class E> static __device__ F wide(E x) {
    if constexpr (is_tf32<E>) return __uint_as_float(x.raw());
    else return static_cast<F>(x);
  }
  template <class E> static constexpr bool is_tf32 = cute::is_same_v<E, cute::tfloat32_t>;
};

template <class Rows, class Weight, bool kGradIsA, bool kBias, bool kAdd = false>
struct Fused {
  using T = typename Rows::T;
  static constexpr int BM = Rows::BM, BN = Rows::BN, kGroup = 8, kThreads = Rows::kThreads;
  static constexpr int kSharedBytes = Rows::kSharedBytes > Weight::kSharedBytes ? Rows::kSharedBytes : Weight::kSharedBytes;

  static __device__ void run(const FusedParams& p, unsigned char* shared) {
    Rows::zero_tail(p.rows);
    const int columns = (p.rows.n + BN - 1) / BN, down = (p.weight.m + BM - 1) / BM, across = (p.weight.n + BN - 1) / BN;
    const Unit u = find_unit<BM>(p.rows.offs, p.rows.experts, blockIdx.x, columns, down * across);
    if (u.expert < 0) return;
    const int high = (u.end - u.begin + BM - 1) / BM, at = u.index - high * columns;
    if (at >= 0) weight_tile(p, {u.expert, u.begin, u.end, at % down * BM, at / down * BN}, shared);
    else row_tile(p, u, high, columns, shared);
  }

 private:
  // kGroup row tiles by all column tiles at a time: the weight's tiles and the rows stay in L2.
  static __device__ void row_tile(const FusedParams& p, const Unit& u, int high, int columns, unsigned char* shared) {
    const int group = u.index / (kGroup * columns), rest = u.index - group * kGroup * columns;
    const int size = min(kGroup, high - group * kGroup);
    const int row = u.begin + (group * kGroup + rest % size) * BM;
    NoSum none;
    Rows::tile(p.rows, {u.expert, row, min(row + BM, u.end), 0, rest / size * BN}, shared, none);
  }

  static __device__ void weight_tile(const FusedParams& p, const typename Weight::Tile& t, unsigned char* shared) {
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
