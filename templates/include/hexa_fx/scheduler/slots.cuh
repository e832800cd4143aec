// The slots of few tokens sorted by expert, in every block for itself: the rows of every expert, in parts of at most kRows.
#pragma once
#include <hexa_fx/ptx/scan.cuh>

namespace hexa {

// kExperts and kSlots: as many as there is room for.
template <int kRows, int kExperts, int kSlots, int kWarps>
struct SortedSlots {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kFew = 32;  // slots that a warp sorts in registers
  static constexpr int kOrderBytes = kSlots * int(sizeof(unsigned short));
  static constexpr int kBytes = (2 * (kExperts + 1) * int(sizeof(int)) + 2 * kOrderBytes + 15) / 16 * 16;
  static constexpr int kScratchBytes = kWarps * kExperts * int(sizeof(int)) + kOrderBytes;
  int* offs;               // first row of every expert
  int* first;              // parts of the experts before
  unsigned short* order;   // slot of every row
  unsigned short* expert;  // of every part
  int experts;

  __device__ SortedSlots(unsigned char* shared, int experts_)
      : offs(reinterpret_cast<int*>(shared)),
        first(offs + kExperts + 1),
        order(reinterpret_cast<unsigned short*>(first + kExperts + 1)),
        expert(order + kSlots),
        experts(experts_) {}

  __device__ int parts() const { return first[experts]; }

  // All threads together.
  template <class Id>
  __device__ void sort(const Id* ids, int slots, unsigned char* scratch) {
    if (slots <= kFew) sort_few(ids, slots);
    else sort_many(ids, slots, scratch);
    __syncthreads();
  }

 private:
  // Every warp holds all slots, one a lane, and every thread counts those below its experts.
  template <class Id>
  __device__ void sort_few(const Id* ids, int slots) {
    const int lane = threadIdx.x % 32;
    const long long id = lane < slots ? static_cast<long long>(ids[lane]) : -1;
    const int bin = id < 0 || id >= experts ? experts : int(id);
    const int rank = __popc(__match_any_sync(0xffffffffu, bin) & ((1u << lane) - 1u));
    const int mine = bin * 2 + (rank % kRows == 0);
    int row = rank, part = rank / kRows;
#pragma unroll 1
    for (int e = threadIdx.x; e - int(threadIdx.x) <= experts; e += kThreads) {
      int rows = 0, parts = 0;
#pragma unroll 4
      for (int i = 0; i < slots; ++i) {
        const int other = __shfl_sync(0xffffffffu, mine, i);
        const bool below = other / 2 < e;
        rows += below;
        parts += below & other & 1;
        if (e < kThreads && other / 2 < bin) ++row, part += other & 1;
      }
      if (e <= experts) offs[e] = rows, first[e] = parts;
    }
    if (threadIdx.x < 32 && bin < experts) {
      order[row] = static_cast<unsigned short>(lane);
      if (mine & 1) expert[part] = static_cast<unsigned short>(bin);
    }
  }

  // A stable counting sort. Each warp takes slots that follow one another, so that warp order is slot order.
  // Loops are not unrolled: a small launch waits for its instructions, too.
  template <class Id>
  __device__ void sort_many(const Id* ids, int slots, unsigned char* scratch) {
    int* tally = reinterpret_cast<int*>(scratch);  // of every warp, by expert
    unsigned short* bins = reinterpret_cast<unsigned short*>(tally + kWarps * kExperts);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int chunk = (slots + kThreads - 1) / kThreads * 32, begin = min(warp * chunk, slots), end = min(begin + chunk, slots);
    int* own = tally + warp * experts;
#pragma unroll 1
    for (int slot = begin + lane; slot < end; slot += 32) {
      const long long id = static_cast<long long>(ids[slot]);
      bins[slot] = static_cast<unsigned short>(id < 0 || id >= experts ? experts : id);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) tally[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int slot = begin + lane; slot < end; slot += 32)
      if (bins[slot] < experts) atomicAdd(own + bins[slot], 1);
    __syncthreads();
    if (warp == 0) scan(tally, lane);
    __syncthreads();
#pragma unroll 1
    for (int e = threadIdx.x; e < experts; e += kThreads)
      for (int part = first[e]; part < first[e + 1]; ++part) expert[part] = static_cast<unsigned short>(e);
#pragma unroll 1
    for (int at = begin; at < end; at += 32) {
      const int slot = at + lane, bin = slot < end ? bins[slot] : experts;
      const unsigned same = __match_any_sync(0xffffffffu, bin);
      const int rank = __popc(same & ((1u << lane) - 1u));
      const int row = bin < experts ? own[bin] + rank : 0;
      __syncwarp();
      if (bin < experts && rank == 0) own[bin] += __popc(same);
      __syncwarp();
      if (bin < experts) order[row] = static_cast<unsigned short>(slot);
    }
  }

  // Tallies of warps become their first rows. Rows and parts are counted in one word.
  __device__ void scan(int* tally, int lane) {
    const int each = (experts + 31) / 32, begin = min(lane * each, experts), end = min(begin + each, experts);
    const auto counted = [&](int e) {
      unsigned rows = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) rows += tally[w * experts + e];
      return rows | (rows + kRows - 1) / kRows << 16;
    };
    unsigned own = 0;
#pragma unroll 1
    for (int e = begin; e < end; ++e) own += counted(e);
    const unsigned upto = sum_up_to_lane(own, lane);
    unsigned before = upto - own;
#pragma unroll 1
    for (int e = begin; e < end; ++e) {
      const unsigned count = counted(e);
      int row = before & 0xffff;
      offs[e] = row, first[e] = before >> 16;
      for (int w = 0; w < kWarps; ++w) {
        const int rows = tally[w * experts + e];
        tally[w * experts + e] = row;
        row += rows;
      }
      before += count;
    }
    if (lane == 31) offs[experts] = upto & 0xffff, first[experts] = upto >> 16;
  }
};

}  // namespace hexa
