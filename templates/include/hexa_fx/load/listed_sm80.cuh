// Lines of a weight of listed experts, whose matrices lie apart.
#pragma once
#include <hexa_fx/types/gemm_sm80.cuh>
#include <hexa_fx/types/places.cuh>

namespace hexa {

template <class C>
struct ListedWeight {
  using T = typename C::T;
  const GemmParams& p;
  const Matrices at;

  __device__ ListedWeight(const GemmParams& p_, int expert) : p(p_), at(Matrices::of<C::kGlu == Glu::split>(p_, expert)) {}
  // Line n of gate or up, along k or across it. Lines across k hold gate and up: up begins n columns further on.
  __device__ const T* line(int n, bool up) const {
    if (C::kGlu == Glu::split && up) return static_cast<const T*>(p.b2) + at.up * p.b_expert + n * p.b_stride;
    int line = up && C::kBAlongK ? p.n + n : n;
    const long long place = at.holding(line);
    return static_cast<const T*>(p.b) + place * p.b_expert + line * p.b_stride + (up && !C::kBAlongK ? p.n : 0);
  }
};

// Lines that run across k, from one column on, as LinesAcrossK asks for them.
template <class C>
struct ListedLines {
  ListedWeight<C> weight;
  int column, end;
  bool up;
  __device__ int index(int i) const { return i >= end ? -1 : i; }
  __device__ const typename C::T* at(int index) const { return weight.line(index, up) + column; }
};

}  // namespace hexa
