// e4m3 and scales of rows, of rows gathered and turned round in groups of 128, and of weights in both orientations; and sums over rows
// that are turned round. As hexa_fx/ops/fp8.py says. Each reads its operand once.
#pragma once
#include <hexa_fx/rows/tile_fp8.cuh>
#include <hexa_fx/scheduler/segments.cuh>

namespace hexa {

struct QuantizeFp8Params {
  const void* x;   // rows; of a weight its first, or only, half
  const void* x3;  // a weight's second half of lines or columns
  const int* v;    // columns: slot of every row, or null
  const int* offs;
  unsigned char* q;  // elements as x lies; columns: groups; sum: what is read
  float* s;
  unsigned char* q_t;  // a weight turned round, or null
  float* s_t;
  float* sum;                                      // ess: (E, columns)
  long long by_expert, by_line, by_column;         // of x, in elements
  int lines, columns;                              // that exist: rows and their width; of a half of a weight
  int experts, top_k, line_halves, column_halves;  // a weight's halves lie in its lines or in its columns: 2, else 1
};

template <class T, bool kAligned>
struct QuantizeFp8 {
  using Params = QuantizeFp8Params;
  static __device__ int padded(int size) { return (size + kTile - 1) / kTile * kTile; }

  // Eight columns from `column` on, of `columns`; zeros behind.
  static __device__ void read(float (&x)[kChunk], const T* line, int column, int columns, long long by_column = 1) {
    if (by_column == 1) load_chunk<kAligned>(x, line + column, columns - column);
    else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) x[i] = column + i < columns ? widen(line[(column + i) * by_column]) : 0.f;
    }
  }

  // Sixteen threads a block of 128 columns of a row.
  static __device__ void rows(const Params& p) {
    const int blocks = padded(p.columns) / kTile;
    const long long unit = (static_cast<long long>(blockIdx.x) * kTileThreads + threadIdx.x) / 16;
    const long long row = unit / blocks;
    const int block = unit - row * blocks, column = block * kTile + tile_column();
    const bool exists = row < p.lines;  // threads past the end stay, for their warp's others
    float x[kChunk];
    read(x, static_cast<const T*>(p.x) + row * p.by_line, column, exists ? p.columns : 0);
    const BlockScale of(largest_of_line(largest_of(x)));
    if (!exists) return;
    *reinterpret_cast<uint2*>(p.q + row * (blocks * kTile) + column) = quantised(x, of.inverse);
    if (threadIdx.x % 16 == 0) p.s[row * blocks + block] = of.scale;
  }

  // Block (c, g): 128 columns of group g.
  static __device__ void columns(const Params& p, TileMemory& memory) {
    const Segment rows = find_segment<kTile>(p.offs, p.experts, blockIdx.y);
    if (rows.expert < 0) return;
    const int width = padded(p.columns), first = blockIdx.x * kTile, column = first + tile_column();
    float x[kTileLines][kChunk], seen[kChunk] = {};
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      const int row = rows.begin + tile_line(i);
      const bool exists = row < rows.end;
      const int from = !exists ? 0 : p.v ? __ldg(p.v + row) / p.top_k : row;
      read(x[i], static_cast<const T*>(p.x) + from * p.by_line, column, exists ? p.columns : 0);
    }
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
#pragma unroll
      for (int j = 0; j < kChunk; ++j) seen[j] = fmaxf(seen[j], fabsf(x[i][j]));
    }
    float by[kChunk];
    const long long at = static_cast<long long>(blockIdx.y) * width + first;
    memory.of_columns(seen, p.s + at, by);
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) memory.put(tile_line(i), quantised(x[i], by));
    memory.write_turned(p.q + at * kTile, kTile);
  }

  // Block (c, l, e): a tile of one expert's matrix, of padded halves.
  static __device__ void weight(const Params& p, TileMemory& memory) {
    const int half_lines = padded(p.lines), half_columns = padded(p.columns);
    const int lines = half_lines * p.line_halves, columns = half_columns * p.column_halves;
    int line = blockIdx.y * kTile, column = blockIdx.x * kTile;
    const long long expert = blockIdx.z, at = expert * lines * columns;
    unsigned char* q = p.q ? p.q + at + static_cast<long long>(line) * columns + column : nullptr;
    unsigned char* q_t = p.q_t ? p.q_t + at + static_cast<long long>(column) * lines + line : nullptr;
    const long long blocks = expert * (lines / kTile) * (columns / kTile);
    const bool second = line >= half_lines || column >= half_columns;
    if (line >= half_lines) line -= half_lines;
    if (column >= half_columns) column -= half_columns;
    const T* matrix = static_cast<const T*>(second ? p.x3 : p.x) + expert * p.by_expert;
    float x[kTileLines][kChunk], seen = 0.f;
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      const int at_line = line + tile_line(i);
      read(x[i], matrix + at_line * p.by_line, column + tile_column(), at_line < p.lines ? p.columns : 0, p.by_column);
    }
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) seen = fmaxf(seen, largest_of(x[i]));
    const BlockScale of = memory.of_all(seen);
    if (threadIdx.x == 0) {
      if (p.s) p.s[blocks + blockIdx.y * (columns / kTile) + blockIdx.x] = of.scale;
      if (p.s_t) p.s_t[blocks + blockIdx.x * (lines / kTile) + blockIdx.y] = of.scale;
    }
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      const uint2 elements = quantised(x[i], of.inverse);
      if (q) *reinterpret_cast<uint2*>(q + static_cast<long long>(tile_line(i)) * columns + tile_column()) = elements;
      if (q_t) memory.put(tile_line(i), elements);
    }
    if (q_t) memory.write_turned(q_t, lines);
  }

  // Block (c, e): a warp each of eight columns, over the groups of an expert.
  static __device__ void sum(const Params& p) {
    const int expert = blockIdx.y, column = blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = __ldg(p.offs + expert + 1) - __ldg(p.offs + expert), groups = (rows + kTile - 1) / kTile;
    const long long first = first_segment<kTile>(p.offs, expert);
    float total = 0.f;
    for (long long g = first; g < first + groups; ++g) {
      const long long at = g * p.columns + column;
      const unsigned four = *reinterpret_cast<const unsigned*>(p.q + at * kTile + lane * 4);
      const float2 a = unpack_e4m3(four & 0xffff), b = unpack_e4m3(four >> 16);
      total = fmaf(a.x + a.y + b.x + b.y, __ldg(p.s + at), total);
    }
    total = warp_sum(total);
    if (lane == 0) p.sum[static_cast<long long>(expert) * p.columns + column] = total;
  }
};

}  // namespace hexa
