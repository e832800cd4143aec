// A warp's share of packed weights, from memory to the fragments of mma.sync, and the rows that meet them.
//
// The sum over k may go in any order, so that lane t of four takes 32 values of a line that follow one another: 16 bytes, or 32. Of
// the 128 values that the four have, instruction q of eight multiplies values 4q .. 4q + 3 of every lane. A lane reads the same places
// of its row of x, and all of its values of a line have one scale.
//
// A byte's two values, or its one, come from a table in shared memory with a column for each lane: no two lanes meet in a bank, and
// the byte, as it lies in its word, makes the address with one instruction. Each line of the table is 256 bytes, of which the
// first half is the table's. Where the device converts e4m3, that is used: four look-ups a word take as long as its bytes do to come.
#pragma once
#include <hexa_fx/ptx/fp8.cuh>
#include <hexa_fx/ptx/packed.cuh>
#include <hexa_fx/types/packed.cuh>

namespace hexa {

template <class T> __device__ unsigned pair_of_e4m3(unsigned two);
template <> __device__ __forceinline__ unsigned pair_of_e4m3<__half>(unsigned two) { return halves_of_e4m3(two); }
template <> __device__ __forceinline__ unsigned pair_of_e4m3<__nv_bfloat16>(unsigned two) {
  const float2 x = unpack_e4m3(two);
  return pack_bf16(x.x, x.y);
}

struct PackedTable {
  static constexpr int kLine = 256, kBytes = 256 * kLine;

  template <class C>
  static __device__ void fill(unsigned char* table, const unsigned (&values)[8]) {
    for (int i = threadIdx.x; i < (C::kConverts ? 0 : 256 * 8); i += C::kThreads) {
      const unsigned byte = i / 8, pair = pair_of<C>(byte, values);
      *reinterpret_cast<uint4*>(table + byte * kLine + i % 8 * 16) = make_uint4(pair, pair, pair, pair);
    }
  }
  // Values 2i and 2i + 1 of `word`.
  template <class C>
  static __device__ unsigned look_up(const unsigned char* table, unsigned word, int i, int lane) {
    if constexpr (C::kConverts) return pair_of_e4m3<typename C::T>(word >> 16 * i & 0xffffu);
    else if constexpr (C::kBits == 4) return line(table, word, i, lane);
    else return __byte_perm(line(table, word, 2 * i, lane), line(table, word, 2 * i + 1, lane), 0x7610);
  }

 private:
  static __device__ unsigned line(const unsigned char* table, unsigned word, int byte, int lane) {
    return *reinterpret_cast<const unsigned*>(table + byte_times_256(word, byte, lane * 4));
  }
  // The two values of a byte, or two times its one.
  template <class C>
  static __device__ unsigned pair_of(unsigned byte, const unsigned (&values)[8]) {
    if constexpr (C::kBits == 8) return Pair<typename C::T>::both(number_of<C::kElement>(byte));
    const auto value = [&](unsigned code) { return values[code / 2] >> code % 2 * 16 & 0xffffu; };
    const unsigned high = byte >> 4, low = byte & 15;
    return value(C::kHighFirst ? high : low) | value(C::kHighFirst ? low : high) << 16;
  }
};

// Where a lane's values lie along k.
template <class C>
struct PackedDepth {
  static constexpr int kLane = 32, kStep = 4 * kLane;

  // First value of the lane in step `step` of warp `warp` along k; at or behind k if there are none.
  static __device__ int at(int pass, int warp, int step, int lane) {
    return ((pass * C::kWarpsK + warp) * C::kSteps + step) * kStep + lane % 4 * kLane;
  }

  // Row of x that a lane holds for its column. Of the columns of a row each is for one scale, and zero where lanes have another.
  static __device__ int row(int lane) { return lane / 4 % C::kTokens; }
  static __device__ bool holds(int lane) { return lane / 4 / C::kTokens == lane % 4 * C::kGroups / 4; }
};

// The lines of a unit: two tiles of 16 for each warp, gate and up of the same columns where there is a gate.
template <class C>
struct PackedLines {
  static constexpr int kRows = 16 * C::kWarpsM, kColumns = C::kGlu == Glu::none ? 2 * kRows : kRows;

  // Column of the result (of one half) that row r of tile j of a warp gives.
  static __device__ int column(int tile, int warp, int j, int r) {
    return C::kGlu == Glu::none ? tile * kColumns + warp * 32 + j * 16 + r : tile * kColumns + warp * 16 + r;
  }
  // Line of the weight that gives column c < n.
  static __device__ int line(int j, int c, int n) {
    return C::kGlu == Glu::concat ? j * n + c : C::kGlu == Glu::interleaved ? 2 * c + j : c;
  }
};

// Rows g and g + 8 of a tile, one step deep: codes and scales as they lie in memory.
template <class C>
struct PackedFragment {
  using T = typename C::T;
  uint4 word[2][C::kBits / 4];
  unsigned scale[2];

  // sum (16 lines, 8 columns) += codes times scales times x
  __device__ void multiply(float (&sum)[4], const unsigned (&x)[16], const unsigned char* table, int lane) const {
    if constexpr (C::kOnSums) {
      float part[4] = {};
      values(part, x, table, lane, [](unsigned pair, int) { return pair; });
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += number(scale[i / 2]) * part[i];
    } else {
      const unsigned scales[2] = {Pair<T>::both(number(scale[0])), Pair<T>::both(number(scale[1]))};
      values(sum, x, table, lane, [&](unsigned pair, int row) { return Pair<T>::multiply(pair, scales[row]); });
    }
  }

 private:
  static __device__ float number(unsigned raw) {
    constexpr int kShift = C::kScale == Scale::f32 ? 0 : C::kScale == Scale::bf16 ? 16 : 23;
    return __uint_as_float(raw << kShift);
  }

  // sum += values times x, where scaled(pair, row) makes a pair of values of row g or g + 8 what is multiplied.
  template <class Scaled>
  __device__ void values(float (&sum)[4], const unsigned (&x)[16], const unsigned char* table, int lane, Scaled scaled) const {
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      unsigned a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int w = q * C::kBits / 8, c = w % 4;  // eight codes are a word, or four
        const uint4& words = word[i % 2][w / 4];
        const unsigned from = c == 0 ? words.x : c == 1 ? words.y : c == 2 ? words.z : words.w;
        const int first = C::kBits == 4 ? q % 2 * 2 : 0;
        a[i] = scaled(PackedTable::look_up<C>(table, from, first + i / 2, lane), i % 2);
      }
      const unsigned b[2] = {x[2 * q], x[2 * q + 1]};
      TensorCore<T>::multiply(sum, a, b);
    }
  }
};

// Where a lane finds its fragments of a unit: row g of both tiles, and how far row g + 8 is, in bytes.
template <class C>
struct PackedSource {
  using Lines = PackedLines<C>;
  static constexpr int kScaleBytes = C::kScale == Scale::f32 ? 4 : C::kScale == Scale::bf16 ? 2 : 1;
  const unsigned char* code[2];
  const unsigned char* scale[2];
  unsigned code_step[2], scale_step[2];

  // Lines behind the last are the last one.
  __device__ PackedSource(const PackedParams& p, int expert, int tile, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool up = C::kGlu == Glu::split && j == 1;
      const int column = Lines::column(tile, warp, j, lane / 4), last = p.n - 1;
      const unsigned low = Lines::line(j, C::kFull ? column : min(column, last), p.n);
      const unsigned high = Lines::line(j, C::kFull ? column + 8 : min(column + 8, last), p.n);
      code[j] = static_cast<const unsigned char*>(up ? p.code2 : p.code) + expert * p.code_expert + low * code_line(p);
      scale[j] = static_cast<const unsigned char*>(up ? p.scale2 : p.scale) + expert * p.scale_expert * kScaleBytes +
                 low / C::kScaleRows * scale_line(p);
      code_step[j] = (high - low) * code_line(p);
      scale_step[j] = (high / C::kScaleRows - low / C::kScaleRows) * scale_line(p);
    }
  }

  // To the next tile of the same expert, where all lines are there and each has scales of its own.
  __device__ void advance(const PackedParams& p) {
    constexpr unsigned kLines = (C::kGlu == Glu::interleaved ? 2 : 1) * Lines::kColumns;
#pragma unroll
    for (int j = 0; j < 2; ++j) code[j] += kLines * code_line(p), scale[j] += kLines * scale_line(p);
  }

  // Values behind the end of a line are those at its start: they meet zeros. Their scale is the last one, for it may multiply the
  // sums of other lanes' values.
  __device__ void fetch(PackedFragment<C>& to, int j, int depth, int k, bool wanted) const {
    const unsigned at = depth < k ? depth : 0;
#pragma unroll
    for (int i = 0; i < C::kBits / 4; ++i) {
      const unsigned byte = at * C::kBits / 8 + 16 * i;
      stream16(to.word[0][i], code[j] + byte, wanted);
      stream16(to.word[1][i], code[j] + (byte + code_step[j]), wanted);
    }
    const unsigned scales = (C::kBits == 8 ? unsigned(min(depth, k - 1)) : at) / C::kBlock * kScaleBytes;
    stream_number<kScaleBytes>(to.scale[0], scale[j] + scales, wanted);
    stream_number<kScaleBytes>(to.scale[1], scale[j] + (scales + scale_step[j]), wanted);
  }

 private:
  static __device__ unsigned code_line(const PackedParams& p) { return unsigned(p.k) * C::kBits / 8; }
  static __device__ unsigned scale_line(const PackedParams& p) { return (unsigned(p.k) + C::kBlock - 1) / C::kBlock * kScaleBytes; }
};

}  // namespace hexa
