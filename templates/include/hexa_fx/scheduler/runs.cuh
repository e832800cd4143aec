// Row tiles dealt out evenly: block b of G takes tiles b T / G up to (b + 1) T / G of all T, in expert order, so that one that sums over an
// expert's rows keeps its sums for many tiles. An expert may lie in the runs of several blocks.
#pragma once
#include <cute/config.hpp>

namespace hexa {

inline constexpr int kRunRows = 64;  // of a tile

CUTE_DEVICE int run_begin(int block, int tiles, int blocks) { return int(static_cast<long long>(block) * tiles / blocks); }

// The block whose run has this tile.
CUTE_DEVICE int block_of_tile(int tile, int tiles, int blocks) {
  return int((static_cast<long long>(tile + 1) * blocks + tiles - 1) / tiles) - 1;
}

CUTE_DEVICE int row_tiles(const int* offs, int expert) {
  return (__ldg(offs + expert + 1) - __ldg(offs + expert) + kRunRows - 1) / kRunRows;
}

}  // namespace hexa
