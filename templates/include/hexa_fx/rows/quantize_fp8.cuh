// e4m3 and scales of rows, of rows gathered and turned round in groups of 128, and of weights in both orientations; and sums over rows
// that are turned round. As hexa_fx/ops/fp8_quantizing.py and fp8.py say. Each reads its operand once.
#pragma once
#include <hexa_fx/rows/tile_fp8.cuh>
#include <hexa_fx/scheduler/segments.cuh>
#include <hexa_fx/types/places.cuh>

namespace hexa {

struct QuantizeFp8Params {
  const void* x;   // rows; of a weight its first, or only, half
  const void* x3;  // a weight's second half of lines or columns; groups: scales of rows
  const int* v;    // columns, groups: slot of every row, or null
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

template <class T, bool kAligned, bool kListed = false>
struct QuantizeFp8 {
  using Params = QuantizeFp8Params;
  // Of a half of a listed expert's weight: steps to its matrix.
  static __device__ int place_of(const Params& p, int expert, bool second) {
    const bool split = static_cast<const Listed<Params>&>(p).places.up != nullptr;
    const Matrices at = split ? Matrices::of<true>(p, expert) : Matrices::of<false>(p, expert);
    return second ? at.up : at.own;
  }
  static __device__ int padded(int size) { return (size + kTile - 1) / kTile * kTile; }

  // Eight elements from `column` on as they lie; zeros behind `columns`, and where the line is not wanted. kAligned: there are eight or
  // none, next to each other, at a multiple of 16 bytes.
  static __device__ Raw<T> ask(const T* line, int column, int columns, bool wanted, long long by_column = 1) {
    if constexpr (kAligned) return fetch(line + column, wanted && column < columns);
    else {
      Packed<T> some;
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        some.value[i] = wanted && column + i < columns ? line[(column + i) * by_column] : narrow<T>(0.f);
      return reinterpret_cast<const Raw<T>&>(some);
    }
  }
  // The largest magnitudes of the thread's columns. Of 16-bit numbers two at a time: unpacked ones would stay in registers.
  static __device__ void largest_of_columns(float (&seen)[kChunk], const Raw<T> (&raw)[kTileLines]) {
    Raw<T> most = {};
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      if constexpr (sizeof(T) == 2) {
        uint4& m = most.word[0];
        const uint4& x = raw[i].word[0];
        m = {larger_magnitudes<T>(m.x, x.x), larger_magnitudes<T>(m.y, x.y), larger_magnitudes<T>(m.z, x.z),
             larger_magnitudes<T>(m.w, x.w)};
      } else {
        Packed<T>& m = reinterpret_cast<Packed<T>&>(most);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) m.value[j] = fmaxf(m.value[j], fabsf(reinterpret_cast<const Packed<T>&>(raw[i]).value[j]));
      }
    }
    unpack<T>(seen, most);
  }

  // Sixteen threads a block of 128 columns of a row.
  template <class Scale>
  static __device__ void rows(const Params& p) {
    const int blocks = padded(p.columns) / kTile;
    const long long unit = (static_cast<long long>(blockIdx.x) * kTileThreads + threadIdx.x) / 16;
    const long long row = unit / blocks;
    const int block = unit - row * blocks, column = block * kTile + tile_column();
    const bool exists = row < p.lines;  // threads past the end stay, for their warp's others
    float x[kChunk];
    const T* line = static_cast<const T*>(p.x) + (exists ? row : 0) * p.by_line;
    unpack<T>(x, ask(line, column, p.columns, exists));
    const Scale of(largest_of_line(largest_of(x)));
    if (!exists) return;
    *reinterpret_cast<uint2*>(p.q + row * (blocks * kTile) + column) = quantised(x, of.inverse);
    if (threadIdx.x % 16 == 0) p.s[row * blocks + block] = of.scale;
  }

  // The rows of x that the thread has; -1 where there is none.
  static __device__ void find_rows(int (&from)[kTileLines], const Params& p, const Segment& rows) {
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      const int row = rows.begin + tile_line(i);
      from[i] = row >= rows.end ? -1 : p.v ? __ldg(p.v + row) / p.top_k : row;
    }
  }

  // Block (g, c): tiles c, c + gridDim.y, .. of the columns of group g, the next one on its way while one is written.
  static __device__ void columns(const Params& p, TileMemory& memory) {
    const Segment rows = find_segment<kTile>(p.offs, p.experts, blockIdx.x);
    if (rows.expert < 0) return;
    const int width = padded(p.columns), step = gridDim.y * kTile;
    int from[kTileLines];
    find_rows(from, p, rows);
    Raw<T> raw[kTileLines];
    auto ask_tile = [&](int first) {
#pragma unroll
      for (int i = 0; i < kTileLines; ++i) {
        const T* line = static_cast<const T*>(p.x) + max(from[i], 0) * p.by_line;
        raw[i] = ask(line, first + tile_column(), p.columns, from[i] >= 0);
      }
    };
    int first = blockIdx.y * kTile;
    ask_tile(first);
    while (true) {
      const long long at = static_cast<long long>(blockIdx.x) * width + first;
      float by[kChunk];
      largest_of_columns(by, raw);
      memory.of_columns(by, p.s + at);
#pragma unroll
      for (int i = 0; i < kTileLines; ++i) {
        float x[kChunk];
        unpack<T>(x, raw[i]);
        memory.put(tile_line(i), quantised(x, by));
      }
      first += step;
      if (first < width) ask_tile(first);
      __syncthreads();
      memory.write_turned(p.q + at * kTile, kTile);
      if (first >= width) return;
    }
  }

  // The same of rows of elements, whose scales are powers of two: their exponents move to the largest scale of a tile.
  static __device__ void groups(const Params& p, TileMemory& memory) {
    const Segment rows = find_segment<kTile>(p.offs, p.experts, blockIdx.x);
    if (rows.expert < 0) return;
    const int step = gridDim.y * kTile;
    int from[kTileLines];
    find_rows(from, p, rows);
    uint2 raw[kTileLines];
    float scale[kTileLines];
    auto ask_tile = [&](int first) {
#pragma unroll
      for (int i = 0; i < kTileLines; ++i) {
        const long long at = max(from[i], 0) * p.by_line + first;
        const auto* there = static_cast<const unsigned char*>(p.x) + at + tile_column();
        raw[i] = from[i] < 0 ? uint2{} : __ldg(reinterpret_cast<const uint2*>(there));
        scale[i] = from[i] < 0 ? 0.f : __ldg(static_cast<const float*>(p.x3) + at / kTile);
      }
    };
    int first = blockIdx.y * kTile;
    ask_tile(first);
    while (true) {
      const long long at = static_cast<long long>(blockIdx.x) * p.columns + first;
      float most = scale[0];
#pragma unroll
      for (int i = 1; i < kTileLines; ++i) most = fmaxf(most, scale[i]);
      __syncthreads();  // whoever used the memory before has read it
      most = memory.largest_of_all(most);
      if (threadIdx.x < kTile) p.s[at + threadIdx.x] = most;
#pragma unroll
      for (int i = 0; i < kTileLines; ++i) {
        const unsigned down = (__float_as_uint(most) - __float_as_uint(scale[i])) >> 23;
        memory.put(tile_line(i), lowered(raw[i], down));
      }
      first += step;
      if (first < p.columns) ask_tile(first);
      __syncthreads();
      memory.write_turned(p.q + at * kTile, kTile);
      if (first >= p.columns) return;
    }
  }
  // Eight elements with exponents that are `down` less. Conversions take most of the time: what stays normal has none.
  static __device__ uint2 lowered(uint2 eight, unsigned down) {
    if (stay_normal(eight.x, down) && stay_normal(eight.y, down)) {
      const unsigned by = down * 0x08080808;
      return {eight.x - by, eight.y - by};
    }
    const unsigned half = down < 15 ? (15 - down) << 10 : down < 25 ? 1u << (24 - down) : 0, by = half | half << 16;
    return {multiplied(eight.x, by), multiplied(eight.y, by)};
  }
  // Whether four elements are normal, and are with such exponents; NaN is not. Sums of bytes of up to 127 and 128 stay in their byte.
  static __device__ bool stay_normal(unsigned four, unsigned down) {
    const unsigned size = four & 0x7f7f7f7f, above = down < 15 ? (0x78 - 8 * down) * 0x01010101 : 0;
    return ((size + above) & ~(size + 0x01010101) & 0x80808080) == 0x80808080;
  }
  static __device__ unsigned multiplied(unsigned four, unsigned by) {
    return e4m3_of_halves(multiply_halves(halves_of_e4m3(four & 0xffff), by)) |
           e4m3_of_halves(multiply_halves(halves_of_e4m3(four >> 16), by)) << 16;
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
    long long place = expert;
    if constexpr (kListed) place = place_of(p, blockIdx.z, second);
    const T* matrix = static_cast<const T*>(second ? p.x3 : p.x) + place * p.by_expert;
    Raw<T> raw[kTileLines];
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      const int at_line = line + tile_line(i);
      raw[i] =
          ask(matrix + min(at_line, p.lines - 1) * p.by_line, column + tile_column(), p.columns, at_line < p.lines, p.by_column);
    }
    float seen[kChunk];
    largest_of_columns(seen, raw);
    const BlockScale of(memory.largest_of_all(largest_of_line(largest_of(seen))));
    if (threadIdx.x == 0) {
      if (p.s) p.s[blocks + blockIdx.y * (columns / kTile) + blockIdx.x] = of.scale;
      if (p.s_t) p.s_t[blocks + blockIdx.x * (lines / kTile) + blockIdx.y] = of.scale;
    }
#pragma unroll
    for (int i = 0; i < kTileLines; ++i) {
      float x[kChunk];
      unpack<T>(x, raw[i]);
      const uint2 elements = quantised(x, of.inverse);
      if (q) *reinterpret_cast<uint2*>(q + static_cast<long long>(tile_line(i)) * columns + tile_column()) = elements;
      if (q_t) memory.put(tile_line(i), elements);
    }
    __syncthreads();
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
