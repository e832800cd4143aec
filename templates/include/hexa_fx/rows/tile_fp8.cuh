// A tile of 128 x 128 numbers of a block of 256 threads on its way to e4m3, as it lies and turned round.
//
// Sixteen threads have a line, eight columns each; a thread has the same columns of eight lines, 16 apart.
#pragma once
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/ptx/fp8.cuh>
#include <hexa_fx/types/fp8.cuh>

namespace hexa {

inline constexpr int kTileThreads = 256, kTile = kScaleBlock, kTileLines = 8, kLineStep = 16;

__device__ __forceinline__ int tile_line(int i) { return threadIdx.x / 16 + i * kLineStep; }
__device__ __forceinline__ int tile_column() { return threadIdx.x % 16 * kChunk; }

// The largest of the sixteen threads of a line.
__device__ __forceinline__ float largest_of_line(float x) {
#pragma unroll
  for (int d = 1; d < 16; d *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}
__device__ __forceinline__ float largest_of(const float (&x)[kChunk]) {
  float largest[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) largest[i] = fmaxf(fabsf(x[i]), fabsf(x[i + kChunk / 2]));
#pragma unroll
  for (int n = kChunk / 4; n > 0; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) largest[i] = fmaxf(largest[i], largest[i + n]);
  }
  return largest[0];
}
__device__ __forceinline__ uint2 quantised(const float (&x)[kChunk], const float (&by)[kChunk]) {
  return {pack_e4m3(x[0] * by[0], x[1] * by[1], x[2] * by[2], x[3] * by[3]),
          pack_e4m3(x[4] * by[4], x[5] * by[5], x[6] * by[6], x[7] * by[7])};
}
__device__ __forceinline__ uint2 quantised(const float (&x)[kChunk], float by) {
  const float all[kChunk] = {by, by, by, by, by, by, by, by};
  return quantised(x, all);
}

// A tile's elements.
struct alignas(16) TileElements {
  unsigned word[kTile][kTile / 4];  // by line, four columns a word; see place()

  // Words of a line are exchanged so that threads that read the same word of lines 16 apart, and its neighbours, meet in no bank.
  static __device__ int place(int line, int word) { return word ^ (line / 16 * 4); }

  // Eight elements of line `line`, of this thread's columns.
  __device__ void put(int line, uint2 elements) {
    *reinterpret_cast<uint2*>(&word[line][place(line, tile_column() / 4)]) = elements;
  }

  // Writes the tile turned round, of which all have put their elements: column c at out + c * stride, 128 bytes of which count.
  __device__ void write_turned(unsigned char* out, long long stride) const {
    const int lines = threadIdx.x % 8, quad = threadIdx.x / 8;  // sixteen lines, four columns
    unsigned turned[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int line = lines * 16 + i * 4 + k;
        w[k] = word[line][place(line, quad)];
      }
      const unsigned a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);  // columns 0 and 1 of two lines each
      const unsigned c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);  // columns 2 and 3
      turned[0][i] = __byte_perm(a, b, 0x5410);
      turned[1][i] = __byte_perm(a, b, 0x7632);
      turned[2][i] = __byte_perm(c, d, 0x5410);
      turned[3][i] = __byte_perm(c, d, 0x7632);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      *reinterpret_cast<uint4*>(out + (quad * 4 + k) * stride + lines * 16) =
          uint4{turned[k][0], turned[k][1], turned[k][2], turned[k][3]};
  }
};

// With what it takes to find their scales.
struct alignas(16) TileMemory : TileElements {
  float largest[kTileThreads / 32][kTile];  // of a warp's lines, by column
  float inverse[kTile];

  // Scales of the tile's columns. Of the largest number that each thread has seen in each of its columns it makes what they are
  // multiplied by. All threads together.
  __device__ void of_columns(float (&seen)[kChunk], float* scales) {
    const int warp = threadIdx.x / 32, first = tile_column();
#pragma unroll
    for (int i = 0; i < kChunk; ++i) seen[i] = fmaxf(seen[i], __shfl_xor_sync(0xffffffffu, seen[i], 16));
    __syncthreads();  // whoever used the memory before has read it
    if (threadIdx.x % 32 < 16) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) largest[warp][first + i] = seen[i];
    }
    __syncthreads();
    if (threadIdx.x < kTile) {
      float most = 0.f;
#pragma unroll
      for (int w = 0; w < kTileThreads / 32; ++w) most = fmaxf(most, largest[w][threadIdx.x]);
      const BlockScale of(most);
      scales[threadIdx.x] = of.scale;
      inverse[threadIdx.x] = of.inverse;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kChunk; ++i) seen[i] = inverse[first + i];
  }

  // The largest that the lanes of all sixteenths of a warp have seen, which are alike.
  __device__ float largest_of_all(float seen) {
    seen = fmaxf(seen, __shfl_xor_sync(0xffffffffu, seen, 16));
    if (threadIdx.x % 32 == 0) inverse[threadIdx.x / 32] = seen;
    __syncthreads();
    float most = 0.f;
#pragma unroll
    for (int w = 0; w < kTileThreads / 32; ++w) most = fmaxf(most, inverse[w]);
    return most;
  }
};

}  // namespace hexa
