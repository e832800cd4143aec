// What packed weights are made of, and what a product with them is told: by its template at compile time, and by a launch.
#pragma once
#include <cuda_fp16.h>

#include <hexa_fx/types/gemm_sm80.cuh>

namespace hexa {

enum class Element { code4, e4m3, int8 };

// An element of eight bits as a number.
template <Element kElement>
__device__ float number_of(unsigned byte) {
  if constexpr (kElement == Element::int8) return static_cast<float>(static_cast<int>(byte << 24) >> 24);
  if ((byte & 127) == 127) return __uint_as_float(0x7fffffffu);
  // Exponents of half are eight larger, and its subnormal numbers, too, are multiplied exactly.
  const unsigned short bits = static_cast<unsigned short>((byte & 127) << 7 | (byte & 128) << 8);
  return __half2float(reinterpret_cast<const __half&>(bits)) * 256.f;
}

// Whether the device has an instruction that makes numbers of e4m3.
#if __CUDA_ARCH__ >= 890
inline constexpr bool kReadsE4m3 = true;
#else
inline constexpr bool kReadsE4m3 = false;
#endif

enum class Scale { f32, bf16, e8m0 };

struct PackedParams {
  const void* x;                        // rows (T or n, K)
  const void* code;                     // weight of expert 0: lines of K elements
  const void* code2;                    // glu split: the up weight
  const void* scale;                    // lines of K / block scales, one for `scale rows` of the weight
  const void* scale2;                   // glu split: of the up weight
  const void* bias;                     // (E, N) or (E, 2N) for concat and interleaved
  const void* bias2;                    // glu split: the up bias
  void* d;                              // (n, N or 2N) or null
  void* act;                            // (n, N), with an activation
  const int* v;                         // v or null
  const int* offs;                      // (E+1,)
  long long x_stride;                   // of a row
  long long code_expert, scale_expert;  // of an expert: bytes, scales
  long long d_stride, act_stride;
  int rows;  // n
  int n, k;  // n of one glu half
  int experts;
  Divisor top_k;
  ActParams act_params;
  unsigned values[8];  // of the sixteen codes of four bits, as elements, two in a word
};

template <class T_, Element kElement_, Scale kScale_, int kBlock_, int kScaleRows_, bool kOnSums_, bool kHighFirst_, int kWarpsM_,
          int kWarpsK_, int kSteps_, int kPasses_, bool kGather_, Act kAct_, Glu kGlu_, bool kBias_, bool kKeep_, bool kFull_>
struct PackedConfig {
  using T = T_;
  static constexpr Element kElement = kElement_;
  static constexpr int kBits = kElement_ == Element::code4 ? 4 : 8;
  static constexpr bool kConverts = kReadsE4m3 && kElement_ == Element::e4m3;  // without a table
  static constexpr Scale kScale = kScale_;
  static constexpr int kBlock = kBlock_, kScaleRows = kScaleRows_;  // values along k, and lines, that share a scale
  // Scales multiply sums in float32, else values, which are rounded then. On sums, the columns of mma.sync are not only rows of x but
  // also the scales that 128 values along k have.
  static constexpr bool kOnSums = kOnSums_;
  static constexpr int kGroups = !kOnSums_ || kBlock_ >= 128 ? 1 : 128 / kBlock_, kTokens = 8 / kGroups;
  static_assert(!kOnSums_ || kBlock_ >= 64, "a lane's sums would have several scales");
  static constexpr bool kHighFirst = kHighFirst_;  // the first of a byte's two codes is its high half
  static constexpr int kWarpsM = kWarpsM_, kWarpsK = kWarpsK_, kSteps = kSteps_, kPasses = kPasses_;
  static constexpr bool kGather = kGather_;
  static constexpr Act kAct = kAct_;
  static constexpr Glu kGlu = kGlu_;
  static constexpr bool kBias = kBias_;
  static constexpr bool kKeep = kKeep_;  // store the product itself (h)
  static constexpr bool kFull = kFull_;  // every unit's lines are there
  static constexpr bool kActs = kAct_ != Act::none || kGlu_ != Glu::none;
  static constexpr int kWarps = kWarpsM * kWarpsK, kThreads = 32 * kWarps;
};

}  // namespace hexa
