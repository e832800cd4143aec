// What a grouped product with mma.sync is told: by its template at compile time, and by a launch.
#pragma once
#include <hexa_fx/epilogue/activations.cuh>

namespace hexa {

enum class Math { tensor, fast_f32, simt };  // tensor: tf32 for float; fast_f32: three tf32 products, about float32
enum class Op { esmm, estmm };

// Quotient by a run-time divisor as one multiplication; exact for 0 <= x < 2^31.
struct Divisor {
  unsigned value, magic, shift;
  __device__ unsigned operator()(unsigned x) const { return value == 1 ? x : __umulhi(x, magic) >> shift; }
};

struct GemmParams {
  const void* a;       // esmm: rows (T or n, K); estmm: rows (T or n, M)
  const void* b;       // esmm: weight of expert 0; estmm: rows (T or n, N)
  const void* b2;      // esmm, glu split: the up weight
  const void* bias;    // (E, N) or (E, 2N) for concat and interleaved
  const void* bias2;   // glu split: the up bias
  void* d;             // esmm: (n, N or 2N) or null; estmm: (E, M, N), wide where it is added to
  void* act;           // esmm with an activation: (n, N)
  const int* a_index;  // v or null
  const int* b_index;  // estmm: v or null
  const int* offs;     // (E+1,)
  long long a_stride;  // of a row
  long long b_stride;  // of a row (nk: of n; kn: of k; estmm: of a row)
  long long b_expert;  // of an expert
  long long d_stride;
  long long d_expert;  // estmm
  long long act_stride;
  int rows;     // n
  int m, n, k;  // esmm: n of one glu half, k; estmm: m, n
  int experts;
  Divisor top_k;
  ActParams act_params;
};

// One tile of a product.
struct GemmTile {
  int expert, row, end;  // esmm: rows row .. end of D; estmm: the contraction runs over them
  int m0, n0;            // estmm: first row of D; first column of D (of one half)
};

template <class T_, Math kMath_, Op kOp_, int BM_, int BN_, int BK_, int kStages_, int kWarpsM_, int kWarpsN_, bool kBAlongK_,
          bool kGatherA_, bool kGatherB_, bool kAligned_, Act kAct_, Glu kGlu_, bool kBias_, bool kKeep_, bool kAdd_ = false,
          bool kListed_ = false>
struct GemmConfig {
  using T = T_;
  static constexpr Math kMath = kMath_;
  static constexpr Op kOp = kOp_;
  static constexpr int BM = BM_, BN = BN_, BK = BK_, kStages = kStages_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr bool kBAlongK = kBAlongK_, kGatherA = kGatherA_, kGatherB = kGatherB_, kAligned = kAligned_;
  static constexpr Act kAct = kAct_;
  static constexpr Glu kGlu = kGlu_;
  static constexpr bool kBias = kBias_;
  static constexpr bool kKeep = kKeep_;      // store the product itself (h)
  static constexpr bool kAdd = kAdd_;        // estmm: add to d, which is of the accumulators' type
  static constexpr bool kListed = kListed_;  // esmm: experts' matrices lie apart, see places.cuh
  static constexpr bool kActs = kAct_ != Act::none || kGlu_ != Glu::none;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  // gate and up of the same columns lie side by side in one tile: two halves of it, or alternating where the weight does
  static constexpr bool kHalves = kGlu == Glu::concat || kGlu == Glu::split;
  static constexpr int kHalf = kHalves ? BN / 2 : BN;
  static constexpr int kStepN = kGlu == Glu::interleaved ? BN / 2 : kHalf;  // columns of one half that a tile covers
};

}  // namespace hexa
