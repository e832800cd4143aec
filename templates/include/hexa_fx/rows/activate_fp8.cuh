// The activation's gradient from da and a quantised h, quantised by rows and turned round. A block has a group of 128 rows of one expert,
// 128 columns at a time, so each number is read once; numbers wait for their scales as bf16, which is finer than e4m3 by five bits.
#pragma once
#include <hexa_fx/epilogue/activations.cuh>
#include <hexa_fx/ptx/sm80.cuh>
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
  unsigned char* a_t;   // (groups, I, 128), of the weighted activation; 128 columns share a scale
  float* at_scales;
  float* dots;           // (n, I / 128): <da, a> of 128 columns
  int experts, columns;  // columns: I
  ActParams act_params;
};

template <Act A, bool kGated>
class ActivateFp8 {
  using Params = ActivateFp8Params;
  static constexpr int kParts = kGated ? 2 : 1;
  // A thread's numbers of one matrix, two in a word. By words: the compiler keeps halves in registers of their own.
  struct Held {
    unsigned two[kTileLines][kChunk / 2];
    __device__ void get(int i, float (&x)[kChunk]) const {
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) {
        x[2 * j] = __uint_as_float(two[i][j] << 16);
        x[2 * j + 1] = __uint_as_float(two[i][j] & 0xffff0000u);
      }
    }
  };
  // The largest magnitudes: of dh's columns, two in a word, and of all of the weighted activation.
  struct Largest {
    unsigned of_dh[kParts][kChunk / 2] = {}, of_a = 0;
    static __device__ void add(unsigned& most, unsigned two) { most = larger_magnitudes<__nv_bfloat16>(most, two); }
    __device__ void add(int part, const uint4& x) {
      add(of_dh[part][0], x.x), add(of_dh[part][1], x.y), add(of_dh[part][2], x.z), add(of_dh[part][3], x.w);
    }
    __device__ void add_a(const uint4& x) { add(of_a, x.x), add(of_a, x.y), add(of_a, x.z), add(of_a, x.w); }
  };

  static __device__ uint4 packed(const float (&x)[kChunk]) {
    return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
  }
  static __device__ void read_e4m3(float (&x)[kChunk], const uint2& raw, float scale) {
    const unsigned two[4] = {raw.x & 0xffff, raw.x >> 16, raw.y & 0xffff, raw.y >> 16};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack_e4m3(two[j]);
      x[2 * j] = pair.x * scale;
      x[2 * j + 1] = pair.y * scale;
    }
  }

 public:
  // What comes ahead, behind the tile before: a tile of da and of h, zeros where there is no row; its scales, and the rows' weights.
  struct Memory {
    uint4 da[kTile][16];
    uint2 h[kParts][kTile][16];
    float scale[kParts][kTile], weight[kTile];
    TileElements tile[2];
    uint4 largest[kParts][kTileThreads / 32][16];  // of a warp's lines of dh
    float inverse[kParts][kTile];
    unsigned of_a[kTileThreads / 32];
  };

 private:
  const Params& p;
  Memory& memory;
  const Segment rows;
  const unsigned blocks = p.columns / kTile, width = kParts * p.columns;  // of a part's columns; columns of h

  // Pieces of 16 bytes of lines of `bytes` bytes of the tile, from `first` on; lines of the matrix have `line` bytes.
  template <int kBytes>
  __device__ void ask(void* to, const void* matrix, long long line, long long first) const {
    constexpr int kPieces = kBytes / 16;
    const unsigned begin = shared_address(to);
#pragma unroll
    for (int i = 0; i < kTile * kPieces / kTileThreads; ++i) {
      const int piece = threadIdx.x + i * kTileThreads, row = rows.begin + piece / kPieces;
      const char* from = static_cast<const char*>(matrix) + min(row, rows.end - 1) * line + first + piece % kPieces * 16;
      copy_async16(begin + piece * 16, from, row < rows.end ? 16 : 0);
    }
  }
  __device__ void ask_tile(int first) const {
    ask<2 * kTile>(memory.da, p.da, 2ll * p.columns, 2ll * first);
#pragma unroll
    for (int part = 0; part < kParts; ++part) ask<kTile>(memory.h[part], p.h, width, part * p.columns + first);
    commit_copies();
  }
  // Of a row and part that the thread has alone.
  __device__ float scale_of_tile(int first) const {
    const int part = threadIdx.x / kTile, row = rows.begin + threadIdx.x % kTile;
    return part < kParts && row < rows.end
               ? __ldg(p.hs + static_cast<unsigned long long>(row) * (kParts * blocks) + part * blocks + first / kTile)
               : 0.f;
  }

  // The thread's columns of line i: what it holds of dh's first part, the second part in the place of h, the weighted activation in that of
  // da, and the parts of results that lie by row.
  __device__ void line(int i, int first, Held& dh, Largest& largest) const {
    const unsigned long long row = rows.begin + tile_line(0);
    unsigned char* dh_row = p.dh + row * width + first + tile_column();
    float* dhs_row = p.dhs + row * (kParts * blocks) + first / kTile;
    float* dots_row = p.dots + row * blocks + first / kTile;
    const int l = tile_line(i), column = threadIdx.x % 16;
    const bool exists = rows.begin + l < rows.end;
    const unsigned down = i * kLineStep;  // from the thread's first line
    float da[kChunk], h[kParts][kChunk], d[kParts][kChunk], a[kChunk], dot = 0.f;
    const float w = memory.weight[l];
    unpack<__nv_bfloat16>(da, reinterpret_cast<const Raw<__nv_bfloat16>&>(memory.da[l][column]));
#pragma unroll
    for (int part = 0; part < kParts; ++part) read_e4m3(h[part], memory.h[part][l][column], memory.scale[part][l]);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      float slope[kParts];
      if constexpr (kGated) a[j] = glu_slopes<A>(h[0][j], h[1][j], p.act_params, slope[0], slope[1]);
      else a[j] = activate<A, true>(h[0][j], slope[0]);
      dot = fmaf(da[j], a[j], dot);
      a[j] *= w;  // which is 0 where there is no row
#pragma unroll
      for (int part = 0; part < kParts; ++part) d[part][j] = w * da[j] * slope[part];
    }
    const uint4 of_a = packed(a), of_dh = packed(d[0]);
    memory.da[l][column] = of_a;
    largest.add_a(of_a);
    largest.add(0, of_dh);
    dh.two[i][0] = of_dh.x, dh.two[i][1] = of_dh.y, dh.two[i][2] = of_dh.z, dh.two[i][3] = of_dh.w;
    if constexpr (kGated) {
      const uint4 of_up = packed(d[1]);
      largest.add(kParts - 1, of_up);
      memory.h[0][l][column] = {of_up.x, of_up.y};
      memory.h[1][l][column] = {of_up.z, of_up.w};
    }
    // All that lanes ask each other for at once, and nothing in between: each answer takes some 25 cycles.
    float most[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) most[part] = largest_of(d[part]);
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) most[part] = fmaxf(most[part], __shfl_xor_sync(0xffffffffu, most[part], step));
      dot += __shfl_xor_sync(0xffffffffu, dot, step);
    }
    if (exists && p.dh) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const BlockScale of(most[part]);
        *reinterpret_cast<uint2*>(dh_row + part * p.columns + down * width) = quantised(d[part], of.inverse);
        if (column == 0) dhs_row[part * blocks + down * (kParts * blocks)] = of.scale;
      }
    }
    if (exists && p.dots && column == 0) dots_row[down * blocks] = dot;
  }

  // What line() has put into memory.
  template <bool kWeighted>
  __device__ Held put_aside() const {
    Held held;
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      const int l = tile_line(i), column = threadIdx.x % 16;
      if constexpr (kWeighted) {
        const uint4 x = memory.da[l][column];
        held.two[i][0] = x.x, held.two[i][1] = x.y, held.two[i][2] = x.z, held.two[i][3] = x.w;
      } else {
        const uint2 low = memory.h[0][l][column], high = memory.h[kParts - 1][l][column];
        held.two[i][0] = low.x, held.two[i][1] = low.y, held.two[i][2] = high.x, held.two[i][3] = high.y;
      }
    }
    return held;
  }

  // Scales of dh's columns, which go to memory, and what they are multiplied by, which stays; those of a are one number.
  __device__ float find_scales(Largest& most, int first) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      unsigned (&x)[kChunk / 2] = most.of_dh[part];
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) Largest::add(x[j], __shfl_xor_sync(0xffffffffu, x[j], 16));
      if (lane < 16) memory.largest[part][warp][lane] = {x[0], x[1], x[2], x[3]};
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) Largest::add(most.of_a, __shfl_xor_sync(0xffffffffu, most.of_a, step));
    if (lane == 0) memory.of_a[warp] = most.of_a;
    __syncthreads();
    const int part = threadIdx.x / kTile, column = threadIdx.x % kTile;
    if (part < kParts && p.dh_t) {
      unsigned all = 0;
#pragma unroll
      for (int w = 0; w < kTileThreads / 32; ++w)
        Largest::add(all, reinterpret_cast<const unsigned*>(memory.largest[part][w])[column / 2]);
      const BlockScale of(__uint_as_float(column % 2 ? all & 0xffff0000u : all << 16));
      p.dhs_t[static_cast<long long>(blockIdx.x) * width + part * p.columns + first + column] = of.scale;
      memory.inverse[part][column] = of.inverse;
    }
    unsigned all = 0;
#pragma unroll
    for (int w = 0; w < kTileThreads / 32; ++w) Largest::add(all, memory.of_a[w]);
    const BlockScale of(fmaxf(__uint_as_float(all << 16), __uint_as_float(all & 0xffff0000u)));
    if (p.a_t && threadIdx.x < kTile) p.at_scales[static_cast<long long>(blockIdx.x) * p.columns + first + threadIdx.x] = of.scale;
    __syncthreads();
    return of.inverse;
  }
  __device__ void put(TileElements& tile, const Held& held, const float (&by)[kChunk]) const {
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      float x[kChunk];
      held.get(i, x);
      tile.put(tile_line(i), quantised(x, by));
    }
  }
  __device__ void put_part(TileElements& tile, const Held& held, int part) const {
    float by[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) by[j] = memory.inverse[part][tile_column() + j];
    put(tile, held, by);
  }
  // A tile of a matrix `columns` wide.
  __device__ void write(const TileElements& tile, unsigned char* out, int columns, int first) const {
    tile.write_turned(out + (static_cast<long long>(blockIdx.x) * columns + first) * kTile, kTile);
  }

 public:
  __device__ ActivateFp8(const Params& p, Memory& memory)
      : p(p), memory(memory), rows(find_segment<kTile>(p.offs, p.experts, blockIdx.x)) {}

  // Block (g, c): tiles c, c + gridDim.y, .. of group g.
  __device__ void run() const {
    if (rows.expert < 0) return;
    int first = blockIdx.y * kTile;
    ask_tile(first);
    float scale = scale_of_tile(first);
    if (threadIdx.x < kTile) {
      const int row = rows.begin + threadIdx.x;
      memory.weight[threadIdx.x] = row >= rows.end ? 0.f : p.weights ? __ldg(p.weights + __ldg(p.v + row)) : 1.f;
    }
    while (true) {
      if (threadIdx.x < kParts * kTile) memory.scale[0][threadIdx.x] = scale;
      wait_for_copies<0>();
      __syncthreads();
      Held dh;
      Largest largest;
#pragma unroll
      for (int i = 0; i < kTileLines; ++i) line(i, first, dh, largest);
      const float of_a = find_scales(largest, first);
      if (p.a_t) {
        const float by[kChunk] = {of_a, of_a, of_a, of_a, of_a, of_a, of_a, of_a};
        put(memory.tile[0], put_aside<true>(), by);
      }
      if (kGated && p.dh_t) put_part(memory.tile[1], put_aside<false>(), kParts - 1);
      __syncthreads();
      if (p.a_t) write(memory.tile[0], p.a_t, p.columns, first);
      if (kGated && p.dh_t) write(memory.tile[1], p.dh_t, width, p.columns + first);
      __syncthreads();  // all have read what the next tile takes the place of
      const int next = first + gridDim.y * kTile;
      if (next < p.columns) {
        ask_tile(next);
        scale = scale_of_tile(next);
      }
      if (p.dh_t) {
        put_part(memory.tile[0], dh, 0);
        __syncthreads();
        write(memory.tile[0], p.dh_t, width, first);
      }
      if (next >= p.columns) return;
      first = next;
    }
  }
};

}  // namespace hexa
