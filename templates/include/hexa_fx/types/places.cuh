// Where the matrices of listed experts lie, each by itself in memory. A weight has one address, and every matrix lies a whole number of
// steps from there, as an expert's matrix in a stack lies as many as its number.
#pragma once

namespace hexa {

struct MatrixPlaces {
  const int* own;  // (parts, E) steps to every matrix
  const int* up;   // glu split: (E,) of the up weight
  int part;        // lines of a part, where each part of a weight is a matrix of its own (gate and up); else more than there are
};

// Arguments of a kernel whose experts are listed.
template <class Params>
struct Listed : Params {
  MatrixPlaces places;
};

// The matrices of one expert.
struct Matrices {
  int own, up, part;

  template <bool kSplit, class Params>
  static __device__ Matrices of(const Params& p, int expert) {
    const MatrixPlaces& places = static_cast<const Listed<Params>&>(p).places;
    const int own = __ldg(places.own + expert);
    if constexpr (kSplit) return {own, __ldg(places.up + expert), places.part};
    else return {own, places.part == 0x7fffffff ? own : __ldg(places.own + p.experts + expert), places.part};
  }
  // Steps to the matrix that holds a line of the whole weight, which becomes that of the matrix.
  __device__ int holding(int& line) const {
    if (line < part) return own;
    line -= part;
    return up;
  }
};

}  // namespace hexa
