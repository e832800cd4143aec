// hexa::ess: the sum of the rows of every expert (paper, Algorithm 3). Deterministic: `partial` sums segments of kRows rows
// into (segments, C), `finish` adds an expert's segments in order. Segments come from offs, so the grid is static.
#pragma once
#include <hexa_fx/load/vector.cuh>
#include <hexa_fx/scheduler/segments.cuh>

namespace hexa {

struct EssParams {
  const void* g;      // (T, C) gathered by v, or (n, C)
  const int* v;       // (n,) or null
  const int* offs;    // (E+1,)
  const void* scale;  // by slot, or null
  void* partial;      // (segments, C) float (double)
  void* out;          // (E, C); float (double) where it is added to
  long long g_stride;
  int experts;
  int width;  // C
  int top_k;
  int pad;
};

template <class T, class W, bool kScaled, bool kGather, bool kAligned, int kRows, bool kAdd = false>
struct Ess {
  using F = wide_t<T>;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumns = 32 * kChunk;

  // grid (column blocks, segments): lanes run over columns, warps over rows
  static __device__ void partial(const EssParams& p) {
    __shared__ F shared[kWarps][kColumns];
    const Segment seg = find_segment<kRows>(p.offs, p.experts, blockIdx.y);
    if (seg.expert < 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = blockIdx.x * kColumns + lane * kChunk;
    F sum[kChunk] = {};
    if (kAligned && p.width - c >= kChunk) add_rows<true>(p, seg, c, sum);
    else if (c < p.width) add_rows<false>(p, seg, c, sum);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) shared[warp][i * 32 + lane] = sum[i];  // transposed: no bank conflicts
    __syncthreads();
    for (int i = threadIdx.x; i < kColumns; i += kThreads) {
      const int column = blockIdx.x * kColumns + i;
      if (column >= p.width) continue;
      F total = F(0);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) total += shared[w][(i % kChunk) * 32 + i / kChunk];
      static_cast<F*>(p.partial)[static_cast<long long>(blockIdx.y) * p.width + column] = total;
    }
  }

  template <bool kFull>
  static __device__ void add_rows(const EssParams& p, const Segment& seg, int c, F (&sum)[kChunk]) {
#pragma unroll 4
    for (int row = seg.begin + int(threadIdx.x) / 32; row < seg.end; row += kWarps) {
      const int slot = kGather ? __ldg(p.v + row) : row;
      const long long source = kGather ? slot / p.top_k : row;
      F part[kChunk];
      load_chunk<kAligned, kFull>(part, static_cast<const T*>(p.g) + source * p.g_stride + c, p.width - c);
      const F w = kScaled ? static_cast<F>(widen(static_cast<const W*>(p.scale)[slot])) : F(1);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) sum[i] += kScaled ? w * part[i] : part[i];
    }
  }

  // grid (column blocks, experts)
  static __device__ void finish(const EssParams& p) {
    const int expert = blockIdx.y, column = blockIdx.x * kThreads + threadIdx.x;
    const int first = first_segment<kRows>(p.offs, expert);
    const int count = (__ldg(p.offs + expert + 1) - __ldg(p.offs + expert) + kRows - 1) / kRows;
    if (column >= p.width) return;
    F sum = F(0);
#pragma unroll 4
    for (int s = 0; s < count; ++s) sum += static_cast<const F*>(p.partial)[static_cast<long long>(first + s) * p.width + column];
    const long long at = static_cast<long long>(expert) * p.width + column;
    if constexpr (!kAdd) static_cast<T*>(p.out)[at] = narrow<T>(sum);
    else if (count > 0) static_cast<F*>(p.out)[at] += sum;
  }
};

}  // namespace hexa
