// What one block multiplies of few tokens: columns of the weights of experts that have rows, in tiles, and each tile with every part of
// the expert's rows. Parts of one tile follow one another, so that the weight comes from memory once.
#pragma once

namespace hexa {

struct DecodeWork {
  int expert, first_row, rows;  // the expert's rows
  int part, parts;
  int column, columns, last;  // of the tile, and behind the block's columns of this expert
};

// kColumns: the widest tile; kGrain: columns that are not parted; kAll: a share has the same columns of every expert, else an equal part
// of everything.
template <class Slots, int kColumns, int kGrain, bool kAll>
struct DecodeShare {
  const Slots& slots;
  int grains;      // of a weight
  int begin, end;  // in grains: of all parts of all experts, or of every expert
  int stop;        // behind the last part

  // columns: of the weight; width: where all are alike, of a share.
  __device__ DecodeShare(const Slots& slots_, int columns, int width) : slots(slots_), grains((columns + kGrain - 1) / kGrain) {
    if constexpr (kAll) {
      begin = blockIdx.x * width / kGrain;
      end = min(begin + width / kGrain, grains);
      stop = slots.parts();
    } else {
      const int work = slots.parts() * grains, each = work / gridDim.x, more = work - each * gridDim.x;
      begin = blockIdx.x * each + min(int(blockIdx.x), more);
      end = begin + each + (blockIdx.x < more);
      stop = (end + grains - 1) / grains;
    }
  }

  __device__ DecodeWork start() const { return from(kAll ? 0 : begin / grains); }

  // Until `none`.
  __device__ DecodeWork behind(DecodeWork work) const {
    if (++work.part < work.parts) return work;
    work.part = 0;
    work.column += work.columns;
    if (work.column >= work.last) return from(slots.first[work.expert + 1]);
    work.columns = width(work.last - work.column);
    return work;
  }
  static __device__ bool none(const DecodeWork& work) { return work.expert < 0; }

 private:
  // From this part on, which is the first one of an expert, or where the share begins.
  __device__ DecodeWork from(int part) const {
#pragma unroll 1
    while (part < stop) {
      const int e = slots.expert[part], base = slots.first[e], next = slots.first[e + 1], parts = next - base;
      int low = begin, high = end;
      if constexpr (!kAll) {  // the expert's grains are dealt out together with their parts
        low = max(begin - base * grains, 0), high = min(end - base * grains, grains * parts);
        if (parts > 1) low = (low + parts - 1) / parts, high = (high + parts - 1) / parts;
      }
      if (low < high) {
        const int column = low * kGrain, last = high * kGrain;
        return {e, slots.offs[e], slots.offs[e + 1] - slots.offs[e], 0, parts, column, width(last - column), last};
      }
      part = next;
    }
    return {-1, 0, 0, 0, 1, 0, 0, 0};
  }
  // Of the next tile: all that are left to come are about as wide.
  static __device__ int width(int columns) {
    const int tiles = (columns + kColumns - 1) / kColumns, each = (columns + tiles - 1) / tiles;
    return (each + kGrain - 1) / kGrain * kGrain;
  }
};

}  // namespace hexa
