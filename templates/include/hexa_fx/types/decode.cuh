// What a product of few tokens is told: by its template at compile time, and by a launch.
#pragma once
#include <hexa_fx/types/gemm_sm80.cuh>

namespace hexa {

struct DecodeParams {
  const void* x;        // (T, K), or (n, K) by slot
  const void* w;        // weight of expert 0
  const void* w2;       // glu split: the up weight
  const void* bias;     // (E, N) or (E, 2N) for concat and interleaved
  const void* bias2;    // glu split: the up bias
  void* d;              // (n, N), by slot; rows of slots without an expert are left alone. Summed: (T, N)
  const void* ids;      // (n,) expert of every slot; below 0, or E and more, is none
  const void* weights;  // (n,) of every slot where rows are summed, or null
  long long x_stride;   // of a row
  long long w_line;     // of a line: of n where lines run along k, else of k
  long long w_expert;   // of an expert
  int slots;            // n
  int n, k;             // n of one glu half
  int experts;
  Divisor top_k;  // slots that share a row of x
  int together;   // where rows are summed: slots of a token
  int columns;    // and columns that a block gives
  ActParams act_params;
};

// A block has eight warps, kWarpsM side by side along the weight's columns, 32 of them each. The others share k.
template <class T_, class Id_, class W_, int kRows_, int kWarpsM_, int kStages_, int kExperts_, int kSlots_, bool kAlongK_,
          bool kFirst_, bool kSummed_, Act kAct_, Glu kGlu_, bool kBias_, bool kListed_ = false>
struct DecodeConfig {
  using T = T_;
  using Id = Id_;
  using W = W_;                         // of the weights of slots
  static constexpr int kRows = kRows_;  // of an expert that are multiplied at a time
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kWarpsM = kWarpsM_, kWarpsK = kWarps / kWarpsM;
  static constexpr int kLines = 32 * kWarpsM, kDepth = 32 * kWarpsK;  // columns of the weight and k of a stage
  static constexpr int kStages = kStages_;
  static constexpr int kExperts = kExperts_, kSlots = kSlots_;  // that the tables have room for
  static constexpr bool kAlongK = kAlongK_;                     // the weight's lines run along k
  static constexpr bool kFirst = kFirst_;    // of a layer's launches: ids are known once the launch before is done
  static constexpr bool kSummed = kSummed_;  // rows of a token are weighted and summed
  static constexpr Act kAct = kAct_;
  static constexpr Glu kGlu = kGlu_;
  static constexpr bool kBias = kBias_;
  static constexpr bool kListed = kListed_;                                 // experts' matrices lie apart, see places.cuh
  static constexpr int kColumns = kGlu == Glu::none ? kLines : kLines / 2;  // of the result that a tile gives
  static constexpr int kGrain = kAlongK ? 2 : 8;  // of columns; where lines run along them, pieces of 16 bytes
  static_assert(!kSummed || (kAlongK && kGlu == Glu::none && kAct == Act::none));
  static_assert(kRows % 8 == 0 && kStages >= 2 && kSlots <= 65535);
};

// Of the second product with the sum: eight warps that each stream on their own.
template <class T_, class Id_, class W_, int kTiles_, int kStages_, int kExperts_, int kSlots_, bool kBias_, bool kListed_ = false>
struct DecodeDownConfig {
  using T = T_;
  using Id = Id_;
  using W = W_;                           // of the weights of slots
  static constexpr int kTiles = kTiles_;  // of 16 columns
  static constexpr int kStages = kStages_, kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kExperts = kExperts_, kSlots = kSlots_;  // that the tables have room for
  static constexpr bool kBias = kBias_, kListed = kListed_;
  static_assert(kStages >= 2 && kSlots <= 65535);
};

}  // namespace hexa
