// Grouped matrix products with mma.sync (sm_80 and newer), or with plain FMA: the esmm and estmm of the paper.
//
//   esmm   D[p, n] = sum_k A[row(p), k] W[e(p)][n, k] + bias[e(p), n], row(p) = v[p] / top_k or p; one tile a block
//   estmm  D[e][i, j] = sum over rows p of expert e of A[row(p), i] B[row(p), j]; one tile a block
//
// Multistage: cp.async brings BK-deep stages to swizzled shared memory, ldmatrix feeds the tensor cores, accumulators pass
// through shared memory to 16-byte stores. kAligned = false replaces cp.async by element-wise loads: any address, any stride
// (the innermost is 1). Sizes need not be multiples of anything.
#pragma once
#include <cute/tensor.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>
#include <hexa_fx/epilogue/activations.cuh>
#include <hexa_fx/scheduler/segments.cuh>
#include <hexa_fx/load/vector.cuh>

namespace hexa {

enum class Math { tensor, fast_f32, simt };  // tensor: tf32 for float; fast_f32: three tf32 products, about float32
enum class Op { esmm, estmm };

// Quotient by a run-time divisor as one multiplication; exact for 0 <= x < 2^31.
struct Divisor {
  unsigned value, magic, shift;
  __device__ unsigned operator()(unsigned x) const { return value == 1 ? x : __umulhi(x, magic) >> shift; }
};

struct GemmParams {
  const void* a;        // esmm: rows (T or n, K); estmm: rows (T or n, M)
  const void* b;        // esmm: weight of expert 0; estmm: rows (T or n, N)
  const void* b2;       // esmm, glu split: the up weight
  const void* bias;     // (E, N) or (E, 2N) for concat and interleaved
  const void* bias2;    // glu split: the up bias
  void* d;              // esmm: (n, N or 2N) or null; estmm: (E, M, N), wide where it is added to
  void* act;            // esmm with an activation: (n, N)
  const int* a_index;   // v or null
  const int* b_index;   // estmm: v or null
  const int* offs;      // (E+1,)
  long long a_stride;   // of a row
  long long b_stride;   // of a row (nk: of n; kn: of k; estmm: of a row)
  long long b_expert;   // of an expert
  long long d_stride;
  long long d_expert;   // estmm
  long long act_stride;
  int rows;             // n
  int m, n, k;          // esmm: n of one glu half, k; estmm: m, n
  int experts;
  Divisor top_k;
  ActParams act_params;
};

template <class T, Math kMath> struct Instruction;
template <> struct Instruction<__nv_bfloat16, Math::tensor> {
  using Element = cute::bfloat16_t;
  using Atom = cute::MMA_Atom<cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  static constexpr int kDepth = 16;
};
template <> struct Instruction<__half, Math::tensor> {
  using Element = cute::half_t;
  using Atom = cute::MMA_Atom<cute::SM80_16x8x16_F32F16F16F32_TN>;
  static constexpr int kDepth = 16;
};
template <> struct Instruction<float, Math::tensor> {
  using Element = cute::tfloat32_t;  // float bits in shared memory, rounded in registers
  using Atom = cute::MMA_Atom<cute::SM80_16x8x8_F32TF32TF32F32_TN>;
  static constexpr int kDepth = 8;
};
template <> struct Instruction<float, Math::fast_f32> : Instruction<float, Math::tensor> {};
template <class T> struct Instruction<T, Math::simt> {
  using Element = T;
  using Atom = cute::MMA_Atom<cute::UniversalFMA<T, T, T, T>>;
  static constexpr int kDepth = 1;
};

__device__ inline cute::tfloat32_t round_tf32(float x) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return cute::tfloat32_t::bitcast(bits);
}

// Shared-memory layout of X rows (or columns) by BK deep by stages, free of bank conflicts for ldmatrix.
template <class Element, bool kKMajor, bool kSimt, int X, int BK, int kStages>
struct Shared {
  static CUTE_HOST_DEVICE constexpr auto make() {
    using namespace cute;
    constexpr int kVec = 16 / int(sizeof(Element)), kLine = 128 / int(sizeof(Element)), kBase = sizeof(Element) == 2 ? 3 : 2;
    if constexpr (kSimt) {
      if constexpr (kKMajor)
        return make_layout(Shape<Int<X>, Int<BK>, Int<kStages>>{}, Stride<Int<BK + kVec>, _1, Int<X * (BK + kVec)>>{});
      else
        return make_layout(Shape<Int<X>, Int<BK>, Int<kStages>>{}, Stride<_1, Int<X + kVec>, Int<BK * (X + kVec)>>{});
    } else {
      constexpr int kExtent = kKMajor ? BK : X, kWidth = kExtent < kLine ? kExtent : kLine;
      constexpr int kBits = kWidth == kLine ? 3 : kWidth * 2 == kLine ? 2 : 1;
      if constexpr (kKMajor)
        return tile_to_shape(composition(Swizzle<kBits, kBase, 3>{}, cute::Layout<Shape<_8, Int<kWidth>>, Stride<Int<kWidth>, _1>>{}),
                             Shape<Int<X>, Int<BK>, Int<kStages>>{});
      else
        return tile_to_shape(composition(Swizzle<kBits, kBase, 3>{}, cute::Layout<Shape<Int<kWidth>, _8>, Stride<_1, Int<kWidth>>>{}),
                             Shape<Int<X>, Int<BK>, Int<kStages>>{});
    }
  }
  using Layout = decltype(make());
};

// 16 bytes to shared memory, the last 16 - bytes of them zero. `from` is only read where bytes > 0.
template <bool kAligned, class T>
__device__ void copy16(void* to, const T* from, int count) {
  constexpr int kVec = 16 / int(sizeof(T));
  count = count < 0 ? 0 : count > kVec ? kVec : count;
  if constexpr (kAligned) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    const int bytes = count * int(sizeof(T));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(from), "r"(bytes) : "memory");
  } else {
    alignas(16) T raw[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) raw[i] = i < count ? from[i] : narrow<T>(wide_t<T>(0));
    *static_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(raw);
  }
}

// Brings stages of an operand whose lines run along k: line r of the tile starts at line[r] and has k elements.
template <class T, class Layout, int X, int BK, int kThreads, bool kAligned>
struct LinesAlongK {
  static constexpr int kVec = 16 / int(sizeof(T)), kPerLine = BK / kVec, kStep = kThreads / kPerLine;
  static constexpr int kCount = (X + kStep - 1) / kStep;
  const T* line[kCount];  // null: reads as zero
  const T* base;
  int k;

  template <class LineOf>
  __device__ LinesAlongK(const T* base_, int k_, LineOf line_of) : base(base_), k(k_) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = threadIdx.x / kPerLine + i * kStep;
      line[i] = r < X ? line_of(r) : nullptr;
    }
  }
  __device__ void load(T* shared, int stage, int k0) {
    const int c = threadIdx.x % kPerLine * kVec;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = threadIdx.x / kPerLine + i * kStep;
      if (X % kStep != 0 && r >= X) continue;
      const int count = line[i] ? k - k0 - c : 0;
      copy16<kAligned>(shared + Layout{}(r, c, stage), count > 0 ? line[i] + k0 + c : base, count);
    }
  }
};

// The same for an operand whose lines run across k; `count` columns from this thread's on are valid in each.
template <class T, class Layout, int X, int BK, int kThreads, bool kAligned, class Lines>
struct LinesAcrossK {
  static constexpr int kVec = 16 / int(sizeof(T)), kPerLine = X / kVec, kStep = kThreads / kPerLine;
  static constexpr int kCount = (BK + kStep - 1) / kStep;
  static_assert(kThreads % kPerLine == 0, "a thread keeps its column");
  Lines lines;
  int count;
  int next[kCount];  // of the stage that is loaded next: indices are read a stage ahead and used when they have arrived

  __device__ LinesAcrossK(Lines lines_, int count_) : lines(lines_), count(count_) { fetch(0); }
  static __device__ int column() { return threadIdx.x % kPerLine * kVec; }
  __device__ void fetch(int k0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) next[i] = lines.index(k0 + int(threadIdx.x) / kPerLine + i * kStep);
  }
  __device__ void load(T* shared, int stage, int k0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = threadIdx.x / kPerLine + i * kStep;
      if (BK % kStep != 0 && r >= BK) continue;
      const bool valid = next[i] >= 0 && count > 0;
      copy16<kAligned>(shared + Layout{}(column(), r, stage), valid ? lines.at(next[i]) : lines.base, valid ? count : 0);
    }
    fetch(k0 + BK);
  }
};

// Lines of a matrix: `base` is element (0, 0), `from` the column that this thread reads, n lines of which line i of the tile
// is number first + i, or index[first + i] / divisor.
template <class T, bool kGather>
struct Lines {
  const T* base;
  const T* from;
  const int* indices;
  long long stride;
  int first, end;
  Divisor divisor;
  __device__ int index(int i) const { return first + i >= end ? -1 : kGather ? __ldg(indices + first + i) : first + i; }
  __device__ const T* at(int index) const { return from + (kGather ? static_cast<long long>(divisor(index)) : index) * stride; }
};

template <class T_, Math kMath_, Op kOp_, int BM_, int BN_, int BK_, int kStages_, int kWarpsM_, int kWarpsN_, bool kBAlongK_,
          bool kGatherA_, bool kGatherB_, bool kAligned_, Act kAct_, Glu kGlu_, bool kBias_, bool kKeep_, bool kAdd_ = false>
struct GemmConfig {
  using T = T_;
  static constexpr Math kMath = kMath_;
  static constexpr Op kOp = kOp_;
  static constexpr int BM = BM_, BN = BN_, BK = BK_, kStages = kStages_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr bool kBAlongK = kBAlongK_, kGatherA = kGatherA_, kGatherB = kGatherB_, kAligned = kAligned_;
  static constexpr Act kAct = kAct_;
  static constexpr Glu kGlu = kGlu_;
  static constexpr bool kBias = kBias_;
  static constexpr bool kKeep = kKeep_;        // store the product itself (h)
  static constexpr bool kAdd = kAdd_;          // estmm: add to d, which is of the accumulators' type
  static constexpr bool kActs = kAct_ != Act::none || kGlu_ != Glu::none;
};

// What weight tiles may add up as they go: nothing. See fused_sm80.cuh.
struct NoSum {
  template <class A, class B> __device__ void add(const A&, const B&) {}
};

template <class C>
struct Gemm {
  using T = typename C::T;
  using F = wide_t<T>;
  using Inst = Instruction<T, C::kMath>;
  using Element = typename Inst::Element;
  static constexpr bool kSimt = C::kMath == Math::simt, kEsmm = C::kOp == Op::esmm;
  static constexpr int BM = C::BM, BN = C::BN, BK = C::BK, kStages = C::kStages, kThreads = 32 * C::kWarpsM * C::kWarpsN;
  // gate and up of the same columns lie side by side in one tile: two halves of it, or alternating where the weight does
  static constexpr bool kHalves = C::kGlu == Glu::concat || C::kGlu == Glu::split;
  static constexpr int kHalf = kHalves ? BN / 2 : BN;

  using ThreadsM = cute::Int<kSimt ? 8 * C::kWarpsM : C::kWarpsM>;
  using ThreadsN = cute::Int<kSimt ? 4 * C::kWarpsN : C::kWarpsN>;
  using TileM = cute::Int<kSimt ? 8 * C::kWarpsM : 16 * C::kWarpsM>;
  using TileN = cute::Int<kSimt ? 4 * C::kWarpsN : 16 * C::kWarpsN>;
  using Mma = decltype(cute::make_tiled_mma(typename Inst::Atom{}, cute::Layout<cute::Shape<ThreadsM, ThreadsN, cute::_1>>{},
                                            cute::Tile<TileM, TileN, cute::Int<Inst::kDepth>>{}));
  using LayoutA = typename Shared<Element, kEsmm, kSimt, BM, BK, kStages>::Layout;
  using LayoutB = typename Shared<Element, C::kBAlongK, kSimt, BN, BK, kStages>::Layout;

  template <bool kAlongK> static constexpr auto copy_atom() {
    using namespace cute;
    if constexpr (!kSimt && kAlongK) return Copy_Atom<SM75_U32x4_LDSM_N, Element>{};
    else if constexpr (!kSimt && sizeof(T) == 2) return Copy_Atom<SM75_U16x8_LDSM_T, Element>{};
    else return Copy_Atom<UniversalCopy<Element>, Element>{};
  }

  static constexpr int kBytesA = int(cute::cosize_v<LayoutA>) * int(sizeof(T)), kBytesB = int(cute::cosize_v<LayoutB>) * int(sizeof(T));
  static constexpr int kPitch = BN + 8;  // of the staged accumulators
  static constexpr int kBytesStage = TileM::value * kPitch * int(sizeof(F));
  static constexpr int kSharedBytes = kBytesA + kBytesB > kBytesStage ? kBytesA + kBytesB : kBytesStage;

  struct Tile {
    int expert, row, end;  // esmm: rows row .. end of D; estmm: the contraction runs over them
    int m0, n0;            // estmm: first row of D; first column of D (of one half)
  };

  static __device__ void run(const GemmParams& p, unsigned char* shared) {
    if constexpr (kEsmm) zero_tail(p);
    const Tile t = tile_of(p);
    NoSum none;
    if (t.expert >= 0) tile(p, t, shared, none);
  }

  // `sum` sees every fragment of a weight tile.
  template <class Sum>
  static __device__ void tile(const GemmParams& p, const Tile& t, unsigned char* shared, Sum& sum) {
    if constexpr (C::kAdd) {
      if (t.end <= t.row) return;
    }
    auto acc = cute::partition_fragment_C(Mma{}, cute::Shape<cute::Int<BM>, cute::Int<BN>>{});
    cute::clear(acc);
    T* sa = reinterpret_cast<T*>(shared);
    T* sb = reinterpret_cast<T*>(shared + kBytesA);
    if constexpr (kEsmm) multiply_esmm(p, t, sa, sb, acc);
    else multiply_estmm(p, t, sa, sb, acc, sum);
    epilogue(p, t, reinterpret_cast<F*>(shared), acc);
  }

  // Rows that belong to no expert are zero.
  static __device__ void zero_tail(const GemmParams& p) {
    const int width = C::kGlu == Glu::none ? p.n : 2 * p.n;
    for (int row = __ldg(p.offs + p.experts) + blockIdx.x; row < p.rows; row += gridDim.x) {
      if constexpr (C::kKeep || !C::kActs) zero_row(static_cast<T*>(p.d) + row * p.d_stride, width);
      if constexpr (C::kActs) zero_row(static_cast<T*>(p.act) + row * p.act_stride, p.n);
    }
  }

 private:
  // Eight row tiles by all column tiles at a time: the weight's tiles and the rows stay in L2.
  static __device__ Tile tile_of(const GemmParams& p) {
    constexpr int kGroup = 8;
    const int columns = (p.n + step_n() - 1) / step_n();
    if constexpr (kEsmm) {
      const int group = blockIdx.x / (kGroup * columns), rest = blockIdx.x - group * kGroup * columns;
      const Segment s = find_segment<BM>(p.offs, p.experts, group * kGroup + rest % kGroup);
      return {s.expert, s.begin, s.end, 0, rest / kGroup * step_n()};
    } else {
      const int rows = (p.m + BM - 1) / BM, per_expert = rows * columns;
      const int e = blockIdx.x / per_expert, rest = blockIdx.x - e * per_expert;
      return {e, __ldg(p.offs + e), __ldg(p.offs + e + 1), rest % rows * BM, rest / rows * step_n()};
    }
  }
  // columns of one half that a tile covers
  static __device__ constexpr int step_n() { return C::kGlu == Glu::interleaved ? BN / 2 : kHalf; }

  static __device__ void zero_row(T* row, int width) {
    const F zero[kChunk] = {};
    for (int c = threadIdx.x * kChunk; c < width; c += kThreads * kChunk) store_chunk(row + c, zero, width - c);
  }

  template <class Acc>
  static __device__ void multiply_esmm(const GemmParams& p, const Tile& t, T* sa, T* sb, Acc& acc) {
    NoSum none;
    const T* a = static_cast<const T*>(p.a);
    LinesAlongK<T, LayoutA, BM, BK, kThreads, C::kAligned> load_a(a, p.k, [&](int r) -> const T* {
      const int row = t.row + r;
      if (row >= t.end) return nullptr;
      return a + (C::kGatherA ? static_cast<long long>(p.top_k(__ldg(p.a_index + row))) : row) * p.a_stride;
    });
    const long long expert = t.expert * p.b_expert;
    const T* gate = static_cast<const T*>(p.b) + expert;
    const long long to_up = C::kBAlongK ? p.n * p.b_stride : p.n;  // concat
    const T* up = C::kGlu == Glu::split ? static_cast<const T*>(p.b2) + expert : gate + to_up;
    const int width = C::kGlu == Glu::interleaved ? 2 * p.n : p.n;
    const int n0 = C::kGlu == Glu::interleaved ? 2 * t.n0 : t.n0;
    if constexpr (C::kBAlongK) {
      LinesAlongK<T, LayoutB, BN, BK, kThreads, C::kAligned> load_b(gate, p.k, [&](int r) -> const T* {
        const int n = n0 + r % kHalf;
        return n < width ? (kHalves && r >= kHalf ? up : gate) + n * p.b_stride : nullptr;
      });
      mainloop(load_a, load_b, p.k, sa, sb, acc, none);
    } else {
      const int column = threadIdx.x % (BN / (16 / int(sizeof(T)))) * (16 / int(sizeof(T))), n = n0 + column % kHalf;
      const Lines<T, false> lines{gate, (kHalves && column >= kHalf ? up : gate) + n, nullptr, p.b_stride, 0, p.k, {}};
      LinesAcrossK<T, LayoutB, BN, BK, kThreads, C::kAligned, Lines<T, false>> load_b(lines, width - n);
      mainloop(load_a, load_b, p.k, sa, sb, acc, none);
    }
  }

  template <class Acc, class Sum>
  static __device__ void multiply_estmm(const GemmParams& p, const Tile& t, T* sa, T* sb, Acc& acc, Sum& sum) {
    const int rows = t.end - t.row;
    if (rows <= 0) return;
    constexpr int kVec = 16 / int(sizeof(T));
    using LinesA = Lines<T, C::kGatherA>;
    using LinesB = Lines<T, C::kGatherB>;
    const int i0 = t.m0 + threadIdx.x % (BM / kVec) * kVec, j0 = t.n0 + threadIdx.x % (BN / kVec) * kVec;
    const T* a = static_cast<const T*>(p.a);
    const T* b = static_cast<const T*>(p.b);
    const LinesA a_lines{a, a + i0, p.a_index, p.a_stride, t.row, t.end, p.top_k};
    const LinesB b_lines{b, b + j0, p.b_index, p.b_stride, t.row, t.end, p.top_k};
    LinesAcrossK<T, LayoutA, BM, BK, kThreads, C::kAligned, LinesA> load_a(a_lines, p.m - i0);
    LinesAcrossK<T, LayoutB, BN, BK, kThreads, C::kAligned, LinesB> load_b(b_lines, p.n - j0);
    mainloop(load_a, load_b, rows, sa, sb, acc, sum);
  }

  template <class LoadA, class LoadB, class Acc, class Sum>
  static __device__ void mainloop(LoadA& load_a, LoadB& load_b, int depth, T* sa, T* sb, Acc& acc, Sum& column_sum) {
    using namespace cute;
    Tensor a = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(sa)), LayoutA{});
    Tensor b = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(sb)), LayoutB{});
    Mma mma;
    auto thread = mma.get_slice(threadIdx.x);
    Tensor ra = thread.partition_fragment_A(a(_, _, 0));
    Tensor rb = thread.partition_fragment_B(b(_, _, 0));
    auto copy_a = make_tiled_copy_A(copy_atom<kEsmm>(), mma);
    auto copy_b = make_tiled_copy_B(copy_atom<C::kBAlongK>(), mma);
    auto thread_a = copy_a.get_slice(threadIdx.x);
    auto thread_b = copy_b.get_slice(threadIdx.x);
    Tensor from_a = thread_a.partition_S(a);
    Tensor from_b = thread_b.partition_S(b);
    Tensor to_a = thread_a.retile_D(ra);
    Tensor to_b = thread_b.retile_D(rb);

    const int steps = (depth + BK - 1) / BK;
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < steps) {
        load_a.load(sa, s, s * BK);
        load_b.load(sb, s, s * BK);
      }
      cp_async_fence();
    }
    int read = 0, write = kStages - 1;
    for (int i = 0; i < steps; ++i) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      if (i + kStages - 1 < steps) {
        load_a.load(sa, write, (i + kStages - 1) * BK);
        load_b.load(sb, write, (i + kStages - 1) * BK);
      }
      cp_async_fence();
      auto step = [&](auto& sum) {
        CUTE_UNROLL
        for (int kk = 0; kk < size<2>(ra); ++kk) {
          copy(copy_a, from_a(_, _, kk, read), to_a(_, _, kk));
          copy(copy_b, from_b(_, _, kk, read), to_b(_, _, kk));
          column_sum.add(ra(_, _, kk), rb(_, _, kk));
          product(mma, ra(_, _, kk), rb(_, _, kk), sum);
        }
      };
      if constexpr (C::kMath == Math::fast_f32) {
        // Tensor cores truncate as they add: short sums, added up in float32, keep the error from growing with the depth.
        auto sum = make_fragment_like(acc);
        clear(sum);
        step(sum);
        CUTE_UNROLL
        for (int j = 0; j < size(acc); ++j) acc(j) += sum(j);
      } else {
        step(acc);
      }
      read = read + 1 == kStages ? 0 : read + 1;
      write = write + 1 == kStages ? 0 : write + 1;
    }
    cp_async_wait<0>();
    __syncthreads();
  }

  template <class A, class B, class Acc>
  static __device__ void product(Mma& mma, A&& a, B&& b, Acc& acc) {
    using namespace cute;
    if constexpr (C::kMath == Math::fast_f32) {
      auto a_high = make_fragment_like(a);
      auto a_low = make_fragment_like(a);
      auto b_high = make_fragment_like(b);
      auto b_low = make_fragment_like(b);
      split(a, a_high, a_low);
      split(b, b_high, b_low);
      gemm(mma, a_low, b_high, acc);
      gemm(mma, a_high, b_low, acc);
    }
    if constexpr (sizeof(T) == 4 && !kSimt) {
      round(a);
      round(b);
    }
    gemm(mma, a, b, acc);
  }
  template <class A> static __device__ void round(A& a) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(a); ++i) a(i) = round_tf32(__uint_as_float(a(i).raw()));
  }
  // What the correction terms multiply. Infinity has no part in them: inf times a zero rest would be NaN.
  template <class A, class High, class Low> static __device__ void split(const A& a, High& high, Low& low) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(a); ++i) {
      const float x = __uint_as_float(a(i).raw());
      const float rounded = __uint_as_float(round_tf32(x).raw());
      const bool infinite = isinf(rounded);
      high(i) = cute::tfloat32_t::bitcast(__float_as_uint(infinite ? 0.f : rounded));
      low(i) = round_tf32(infinite ? 0.f : x - rounded);
    }
  }

  template <class Acc>
  static __device__ void epilogue(const GemmParams& p, const Tile& t, F* stage, Acc& acc) {
    using namespace cute;
    auto thread = Mma{}.get_slice(threadIdx.x);
    Tensor where = thread.partition_C(make_identity_tensor(Shape<Int<BM>, Int<BN>>{}));
    CUTE_UNROLL
    for (int i = 0; i < size<1>(acc); ++i) {
      const int m0 = i * TileM::value;
      CUTE_UNROLL
      for (int j = 0; j < size<2>(acc); ++j) {
        CUTE_UNROLL
        for (int v = 0; v < size<0>(acc); ++v)
          stage[(get<0>(where(v, i, j)) - m0) * kPitch + get<1>(where(v, i, j))] = acc(v, i, j);
      }
      __syncthreads();
      store_rows(p, t, stage, m0);
      __syncthreads();
    }
  }

  static __device__ void store_rows(const GemmParams& p, const Tile& t, const F* stage, int m0) {
    constexpr int kAcross = (C::kActs && C::kGlu != Glu::none ? BN / 2 : BN) / kChunk;
    for (int i = threadIdx.x; i < TileM::value * kAcross; i += kThreads) {
      const int r = i / kAcross, c = i % kAcross * kChunk, n = t.n0 + c, left = p.n - n;
      if (m0 + r >= BM || left <= 0) continue;
      const F* from = stage + r * kPitch;
      if constexpr (kEsmm) {
        const int row = t.row + m0 + r;
        if (row < t.end) store_esmm(p, t, from, row, c, n, left);
      } else {
        const int row = t.m0 + m0 + r;
        if (row >= p.m) continue;
        F value[kChunk];
        take(value, from + c, 1);
        const long long at = t.expert * p.d_expert + row * p.d_stride + n;
        if constexpr (C::kAdd) add_chunk(static_cast<F*>(p.d) + at, value, left);
        else store_chunk(static_cast<T*>(p.d) + at, value, left);
      }
    }
  }
  static __device__ void take(F (&value)[kChunk], const F* from, int stride) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) value[i] = from[i * stride];
  }
  static __device__ void add_bias(F (&value)[kChunk], const void* bias, long long at, int count) {
    F b[kChunk];
    load_chunk(b, static_cast<const T*>(bias) + at, count);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) value[i] += b[i];
  }

  static __device__ void store_esmm(const GemmParams& p, const Tile& t, const F* from, long long row, int c, int n, int left) {
    constexpr bool kFast = sizeof(T) == 2;
    T* d = static_cast<T*>(p.d) + row * p.d_stride;
    T* act = static_cast<T*>(p.act) + row * p.act_stride;
    const long long e = t.expert;
    if constexpr (C::kGlu == Glu::none) {
      F x[kChunk];
      take(x, from + c, 1);
      if constexpr (C::kBias) add_bias(x, p.bias, e * p.n + n, left);
      if constexpr (C::kKeep || !C::kActs) store_chunk(d + n, x, left);
      if constexpr (C::kActs) {
        F unused;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] = activate<C::kAct, false, kFast>(x[i], unused);
        store_chunk(act + n, x, left);
      }
    } else if constexpr (kHalves) {
      F gate[kChunk], up[kChunk];
      take(gate, from + c, 1);
      take(up, from + kHalf + c, 1);
      if constexpr (C::kBias) {
        constexpr bool kTwo = C::kGlu == Glu::split;
        add_bias(gate, p.bias, e * p.n * (kTwo ? 1 : 2) + n, left);
        add_bias(up, kTwo ? p.bias2 : p.bias, kTwo ? e * p.n + n : e * p.n * 2 + p.n + n, left);
      }
      if constexpr (C::kKeep) {
        store_chunk(d + n, gate, left);
        store_chunk(d + p.n + n, up, left);
      }
      store_gated(act + n, gate, up, p, left);
    } else {
      F low[kChunk], high[kChunk], gate[kChunk], up[kChunk];
      take(low, from + 2 * c, 1);
      take(high, from + 2 * c + kChunk, 1);
      if constexpr (C::kBias) {
        add_bias(low, p.bias, e * p.n * 2 + 2 * n, 2 * left);
        add_bias(high, p.bias, e * p.n * 2 + 2 * n + kChunk, 2 * left - kChunk);
      }
      if constexpr (C::kKeep) {
        store_chunk(d + 2 * n, low, 2 * left);
        store_chunk(d + 2 * n + kChunk, high, 2 * left - kChunk);
      }
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) {
        gate[i] = low[2 * i], up[i] = low[2 * i + 1];
        gate[i + kChunk / 2] = high[2 * i], up[i + kChunk / 2] = high[2 * i + 1];
      }
      store_gated(act + n, gate, up, p, left);
    }
  }
  static __device__ void store_gated(T* act, F (&gate)[kChunk], const F (&up)[kChunk], const GemmParams& p, int left) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) gate[i] = glu<C::kAct, sizeof(T) == 2>(gate[i], up[i], p.act_params);
    store_chunk(act, gate, left);
  }
};

}  // namespace hexa
