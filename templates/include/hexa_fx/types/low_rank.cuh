// What kernels of low-rank factors are told by a launch.
#pragma once

namespace hexa {

struct LowRankParams {
  const int* v;         // (n,) slot of every row, or null: rows are in expert order
  const int* offs;      // (E + 1,)
  const void* rows;     // (T, N) or (n, N)
  const void* u;        // (n, R)
  const void* weights;  // by slot: what rows of u are multiplied by, or null
  void* du;             // (n, R)
  void* dc;             // (E, N, R), (E, R, N), or (N, R, E), from the launch's columns on
  float* parts;         // (blocks + E, columns, R) sums of experts' rows, a block's at a time
  const float* before;  // (n, R) du of the columns before these, or null: there are none
  float* beyond;        // (n, R) where du goes if more columns follow, else null
  long long stride;     // of rows
  int n, experts, N, R;
  int columns;                  // of N, that this launch takes
  int blocks;                   // of the launch that makes the parts
  unsigned div_mul, div_shift;  // v / top_k == umulhi(2 v, div_mul) >> div_shift
  float scale;                  // of dC
};

}  // namespace hexa
