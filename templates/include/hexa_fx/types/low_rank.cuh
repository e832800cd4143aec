// What kernels of low-rank gradients are told by a launch.
#pragma once

namespace hexa {

struct LowRankGradientsParams {
  const int* v;     // (n,) slot of every row, or null: dy is in expert order
  const int* offs;  // (E + 1,)
  const void* dy;   // (T, N) or (n, N)
  const void* u;    // (n, R)
  void* du;         // (n, R)
  void* dc;         // (E, N, R)
  float* parts;     // (blocks, 2, N, R) sums of experts of several blocks: the block's first expert, another one
  long long dy_stride;
  int n, experts, N, R;
  int blocks;                   // of the launch that makes the parts
  unsigned div_mul, div_shift;  // v / top_k == umulhi(2 v, div_mul) >> div_shift
};

}  // namespace hexa
