// The activation's gradient from da and a quantised h, quantised by rows and turned round. A block has a group of 128 rows of one expert x
// 128 columns, so each number is read once; numbers wait for their scales as bf16, which is finer than e4m3 by five bits.
#pragma once
#include <hexa_fx/epilogue/activations.cuh>
#include <hexa_fx/rows/tile_fp8.cuh>
#include <hexa_fx/scheduler/segments.cuh>

namespace hexa {

struct ActivateFp8Params {
  const __nv_bfloat16* da;  // (n, I)
  const unsigned char* h;   // (n, H): I columns, or gate's I and up's I
  const float* hs;          // (n, H / 128)
  const float* weights;     // of every slot, or null for 1
  const int* v;
  const int* offs;
  unsigned char* dh;  // (n, H), or null; likewise below
  float* dhs;
  unsigned char* dh_t;  // (groups, H, 128)
  float* dhs_t;         // (groups, H)
  unsigned char* a_t;   // (groups, I, 128), of the weighted activation
  float* at_scales;
  float* dots;           // (n, I / 128): <da, a> of 128 columns
  int experts, columns;  // columns: I
  ActParams act_params;
};

template <Act A, bool kGated>
struct ActivateFp8 {
  using Params = ActivateFp8Params;
  static constexpr int kParts = kGated ? 2 : 1;
  // A thread's numbers of one matrix, two in a word. By words: the compiler keeps halves in registers of their own.
  struct Held {
    unsigned two[kTileLines][kChunk / 2];
    __device__ void put(int i, const float (&x)[kChunk]) {
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) two[i][j] = pack_bf16(x[2 * j], x[2 * j + 1]);
    }
    __device__ void get(int i, float (&x)[kChunk]) const {
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) {
        x[2 * j] = __uint_as_float(two[i][j] << 16);
        x[2 * j + 1] = __uint_as_float(two[i][j] & 0xffff0000u);
      }
    }
  };

  static __device__ void read_e4m3(float (&x)[kChunk], const unsigned char* from, float scale) {
    const uint2 raw = __ldg(reinterpret_cast<const uint2*>(from));
    const unsigned two[4] = {raw.x & 0xffff, raw.x >> 16, raw.y & 0xffff, raw.y >> 16};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack_e4m3(two[j]);
      x[2 * j] = pair.x * scale;
      x[2 * j + 1] = pair.y * scale;
    }
  }

  // The thread's columns of one row: what it holds of them, and the parts of results that lie by row.
  static __device__ void row(const Params& p, int i, int row, bool exists, Held (&dh)[kParts], Held& weighted) {
    const int width = kParts * p.columns, column = blockIdx.x * kTile + tile_column();
    const long long at = exists ? row : 0;
    float da[kChunk] = {}, h[kParts][kChunk] = {}, d[kParts][kChunk], a[kChunk], w = 1.f, dot = 0.f;
    if (exists) {
      load_chunk<true, true>(da, p.da + at * p.columns + column);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int first = part * p.columns;
        read_e4m3(h[part], p.h + at * width + first + column, __ldg(p.hs + at * (width / kTile) + first / kTile + blockIdx.x));
      }
      if (p.weights) w = __ldg(p.weights + __ldg(p.v + row));
    }
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      float slope[kParts];
      if constexpr (kGated) a[j] = glu_slopes<A>(h[0][j], h[1][j], p.act_params, slope[0], slope[1]);
      else a[j] = activate<A, true>(h[0][j], slope[0]);
      dot = fmaf(da[j], a[j], dot);
      a[j] = exists ? w * a[j] : 0.f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) d[part][j] = exists ? w * da[j] * slope[part] : 0.f;
    }
    weighted.put(i, a);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      dh[part].put(i, d[part]);
      if (!p.dh) continue;
      const BlockScale of(largest_of_line(largest_of(d[part])));
      if (!exists) continue;
      const int first = part * p.columns;
      *reinterpret_cast<uint2*>(p.dh + at * width + first + column) = quantised(d[part], of.inverse);
      if (threadIdx.x % 16 == 0) p.dhs[at * (width / kTile) + first / kTile + blockIdx.x] = of.scale;
    }
    if (p.dots) {
      dot = sum_of_line(dot);
      if (exists && threadIdx.x % 16 == 0) p.dots[at * (p.columns / kTile) + blockIdx.x] = dot;
    }
  }

  // Columns `first` .. of a matrix `width` wide, turned round.
  static __device__ void turn(TileMemory& memory, const Held& held, int width, int first, unsigned char* out, float* scales) {
    float seen[kChunk] = {}, by[kChunk], x[kChunk];
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      held.get(i, x);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) seen[j] = fmaxf(seen[j], fabsf(x[j]));
    }
    const long long at = static_cast<long long>(blockIdx.y) * width + first;
    memory.of_columns(seen, scales + at, by);
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      held.get(i, x);
      memory.put(tile_line(i), quantised(x, by));
    }
    memory.write_turned(out + at * kTile, kTile);
  }

  // Block (c, g).
  static __device__ void run(const Params& p, TileMemory& memory) {
    const Segment rows = find_segment<kTile>(p.offs, p.experts, blockIdx.y);
    if (rows.expert < 0) return;
    Held dh[kParts], weighted;
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      const int at = rows.begin + tile_line(i);
      row(p, i, at, at < rows.end, dh, weighted);
      asm volatile("" ::: "memory");  // the next row's numbers come behind this one's: all at once do not fit
    }
    const int first = blockIdx.x * kTile;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (p.dh_t) turn(memory, dh[part], kParts * p.columns, part * p.columns + first, p.dh_t, p.dhs_t);
    if (p.a_t) turn(memory, weighted, p.columns, first, p.a_t, p.at_scales);
  }
};

}  // namespace hexa
