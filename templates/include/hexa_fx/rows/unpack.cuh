// Packed weights to numbers: of an element and its block's scale, multiplied in float32 and rounded once, as hexa_fx.formats reads them.
// A thread takes eight values that follow one another in an expert's matrix, read row by row; they share a scale.
#pragma once
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/ptx/packed.cuh>
#include <hexa_fx/types/packed.cuh>

namespace hexa {

enum class ScaleOf { block, nested, power, tile };

struct UnpackParams {
  const void* packed;   // of expert 0, (R, C) elements
  const void* scale;    // of expert 0
  const float* nested;  // of blocks of 256 scales
  const float* offset;  // (E,)
  const float* map;     // (E, 256): values of 8-bit scales
  void* out;            // (experts, R, C)
  int values;           // R * C
  int columns;          // C
  int scales, nests;    // of an expert
  int blocks;           // of threads, for an expert
  float code[16];       // values of 4-bit codes
};

// kHighFirst: the first of two codes is a byte's high half. kRows, kColumns: of a tile that shares a scale; 0 columns are all of them. A
// block of values is kColumns long.
template <class T, Element kElement, bool kHighFirst, ScaleOf kScale, int kRows, int kColumns>
struct Unpack {
  static constexpr int kThreads = 256, kUnroll = 4, kStep = kThreads * kChunk, kTableBytes = 16 * sizeof(float);
  static constexpr int kBytes = kElement == Element::code4 ? kChunk / 2 : kChunk;
  static constexpr int kNest = 256, kScaleBytes = kScale == ScaleOf::nested || kScale == ScaleOf::power ? 1 : 4;

  static __device__ void run(const UnpackParams& p, float* table) {
    if constexpr (kElement == Element::code4) {
      if (threadIdx.x < 16) table[threadIdx.x] = p.code[threadIdx.x];
      __syncthreads();
    }
    const int expert = blockIdx.x / p.blocks, first = (blockIdx.x % p.blocks) * kUnroll * kStep + threadIdx.x * kChunk;
    const long long before = static_cast<long long>(expert) * p.values;
    const unsigned char* packed = static_cast<const unsigned char*>(p.packed) + before / kChunk * kBytes;
    T* out = static_cast<T*>(p.out) + before;
    unsigned word[kUnroll][kBytes / 4], scale[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = min(first + i * kStep, p.values - kChunk);
#pragma unroll
      for (int j = 0; j < kBytes / 4; ++j) stream_number<4>(word[i][j], packed + at / kChunk * kBytes + 4 * j, true);
      const long long block = static_cast<long long>(expert) * p.scales + block_at(p, at);
      stream_number<kScaleBytes>(scale[i], static_cast<const unsigned char*>(p.scale) + block * kScaleBytes, true);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = first + i * kStep;
      if (at >= p.values) return;
      const float factor = number(p, expert, at, scale[i]);
      wide_t<T> value[kChunk];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) value[j] = element(word[i], j, table) * factor;
      store_chunk<true, true>(out + at, value);
    }
  }

 private:
  static __device__ float element(const unsigned (&word)[kBytes / 4], int j, const float* table) {
    if constexpr (kElement == Element::code4) return table[word[0] >> (kHighFirst ? j ^ 1 : j) * 4 & 15];
    return number_of<kElement>(word[j / 4] >> j % 4 * 8 & 255);
  }

  // Place of a value's scale among those of its expert.
  static __device__ int block_at(const UnpackParams& p, int at) {
    if constexpr (kScale != ScaleOf::tile) return at / (kColumns ? kColumns : 1);
    const int row = at / p.columns, column = at - row * p.columns;
    if constexpr (kColumns == 0) return row / kRows;
    else return row / kRows * ((p.columns + kColumns - 1) / kColumns) + column / kColumns;
  }
  // A scale as it lies in memory, as a number; rounded after each operation, as the reference does.
  static __device__ float number(const UnpackParams& p, int expert, int at, unsigned bits) {
    if constexpr (kScale == ScaleOf::power) return power(bits);
    if constexpr (kScale != ScaleOf::nested) return __uint_as_float(bits);
    const float nested = __ldg(p.nested + expert * p.nests + at / (kColumns ? kColumns : 1) / kNest);
    return __fadd_rn(__fmul_rn(__ldg(p.map + expert * kNest + bits), nested), __ldg(p.offset + expert));
  }
  // E8M0
  static __device__ float power(unsigned code) {
    return __uint_as_float(code == 0 ? 0x00400000u : code == 255 ? 0x7fffffffu : code << 23);
  }
};

}  // namespace hexa
