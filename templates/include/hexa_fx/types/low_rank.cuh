// What kernels of low-rank factors are told by a launch.
#pragma once

namespace hexa {

struct LowRankParams {
  const int* v;      // (n,) slot of every row, or null: rows are in expert order
  const int* offs;   // (E + 1,)
  const void* rows;  // (T, N) or (n, N)
  const void* u;     // (n, R)
  void* du;          // (n, R)
  void* dc;          // (E, N, R), or (E, R, N)
  float* parts;      // (blocks, 2, N, R) sums of experts that blocks share: of the block's first expert, of another one
  long long stride;  // of rows
  int n, experts, N, R;
  int blocks;                   // of the launch that makes the parts
  unsigned div_mul, div_shift;  // v / top_k == umulhi(2 v, div_mul) >> div_shift
};

}  // namespace hexa
