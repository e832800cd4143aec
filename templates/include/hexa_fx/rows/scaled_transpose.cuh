// A matrix transposed, cast and multiplied by a number: by tiles of 64 x 64 through shared memory, so that both sides move whole lines.
#pragma once
#include <hexa_fx/types/element.cuh>

namespace hexa {

struct ScaledTransposeParams {
  const void* x;  // (rows, columns)
  void* out;      // (columns, rows)
  long long rows, columns;
  double scale;
  int column_tiles;
};

template <bool kFirst, class A, class B> struct Either {
  using type = A;
};
template <class A, class B> struct Either<false, A, B> {
  using type = B;
};

template <class S, class T>
struct ScaledTranspose {
  using F = typename Either<(sizeof(wide_t<S>) > sizeof(wide_t<T>)), wide_t<S>, wide_t<T>>::type;
  static constexpr int kThreads = 256, kSide = 64, kPitch = kSide + 1, kTileBytes = kSide * kPitch * int(sizeof(F));
  static constexpr int kStep = kThreads / kSide, kEach = kSide / kStep;

  static __device__ void run(const ScaledTransposeParams& p, F* tile) {
    const long long row0 = static_cast<long long>(blockIdx.x / p.column_tiles) * kSide;
    const long long column0 = static_cast<long long>(blockIdx.x % p.column_tiles) * kSide;
    const int line = threadIdx.x % kSide, first = threadIdx.x / kSide;
    const S* x = static_cast<const S*>(p.x) + column0 + line;
    S value[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {  // all loads are under way before one is used
      const long long row = row0 + first + i * kStep;
      if (row < p.rows && column0 + line < p.columns) value[i] = x[row * p.columns];
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) tile[(first + i * kStep) * kPitch + line] = F(widen(value[i])) * F(p.scale);
    __syncthreads();
    T* out = static_cast<T*>(p.out) + row0 + line;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = first + i * kStep;
      if (column0 + at < p.columns && row0 + line < p.rows)
        out[(column0 + at) * p.rows] = narrow<T>(wide_t<T>(tile[line * kPitch + at]));
    }
  }
};

}  // namespace hexa
