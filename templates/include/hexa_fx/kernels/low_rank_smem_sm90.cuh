// What a kernel of low-rank factors is told by its template, and its shared memory.
#pragma once
#include <hexa_fx/kernels/smem_sm90.cuh>
#include <hexa_fx/scheduler/runs.cuh>
#include <hexa_fx/types/low_rank.cuh>

namespace hexa::sm90 {

// W: type of the weights of u's rows, void if there are none. Rank: R rounded up to 16 or 32. Steps: of 128 columns.
// RankMajor: the factor is (E, R, N), not (E, N, R).
template <class T_, class W_, int Rank_, int Steps_, int Stages_, bool Gather_, bool RankMajor_, bool Multiplies_, bool Sums_,
          int MaxExperts_>
struct LowRankConfig {
  using T = T_;
  using W = W_;
  using Element = Operand<T>;
  static constexpr int Rank = Rank_, Steps = Steps_, Stages = Stages_, MaxExperts = MaxExperts_;
  static constexpr bool Gather = Gather_, RankMajor = RankMajor_;
  static constexpr bool Multiplies = Multiplies_, Sums = Sums_;  // gives du, gives dC
  static constexpr int Words = Rank / 2;                         // of an accumulator of 64 rows, a thread
  static constexpr int Pitch = Element::bytes(Rank);       // of R numbers in shared memory, swizzled as a line of 32 or 64 bytes
  static constexpr int HalfBytes = kRunRows * kLineBytes;  // of a step: a consumer's columns
  static constexpr int FactorBytes = Multiplies ? Steps * 128 * Pitch : 0;
  // Of u: a tile's rows are read until its last step, when later tiles are on their way.
  static constexpr int Slots = Sums ? Stages / Steps + 2 : 0;
};

template <class C>
struct alignas(1024) LowRankSmem {
  alignas(1024) uint8_t rows[C::Stages][2][C::HalfBytes];
  alignas(1024) uint8_t factor[C::FactorBytes + 1024 * !C::Multiplies];
  alignas(1024) uint8_t u[C::Slots + !C::Sums][C::Sums ? kRunRows * C::Pitch : 1024];
  alignas(16) float other[2][C::Words][128];  // the second consumer's part of du, by turns
  alignas(16) uint64_t full[C::Stages];
  uint64_t empty[C::Stages], u_full[C::Slots + 1], factor_full;
  RunTable<C::MaxExperts> table;
};

}  // namespace hexa::sm90
