// What the Hopper kernels know of the type that they multiply: the element, what products are summed in, and the scales that come with
// it. Everything that depends on the element's width is a number here, so that another width is another argument of a template.
#pragma once
#include <cute/tensor.hpp>

namespace hexa::sm90 {
using namespace cute;

// Operands that are multiplied as they lie in memory. One with a factor for each block of elements has a main loop of its own.
struct Unscaled {};

template <class Element_, class Accumulator_ = float, class Scale_ = Unscaled>
struct Operand {
  using Element = Element_;
  using Accumulator = Accumulator_;
  using Scale = Scale_;
  static constexpr int kBits = sizeof_bits_v<Element>;
  static constexpr int kPiece = 16 * 8 / kBits;  // elements of 16 bytes: what cp.async brings, and what a swizzle moves
  static constexpr int kLine = 128 * 8 / kBits;  // elements of a line of shared memory: a step of the contraction
  static constexpr int kInner = 32 * 8 / kBits;  // contraction of one wgmma
  template <class Count>
  static CUTE_HOST_DEVICE constexpr Count bytes(Count elements) {
    if constexpr (kBits >= 8) return elements * (kBits / 8);
    else return elements / (8 / kBits);
  }
};

inline constexpr int kPieceBytes = 16, kLineBytes = 128;

// Where the copy engine and wgmma have 16-byte piece `piece` of a line of 128 or 64 bytes: among the pieces of its line, and in bytes.
template <int LineBytes = kLineBytes>
CUTE_HOST_DEVICE constexpr int swizzled_piece(int line, int piece) {
  if constexpr (LineBytes == 128) return piece ^ (line & 7);
  else return piece ^ (line >> 1 & 3);
}
template <int LineBytes = kLineBytes>
CUTE_HOST_DEVICE constexpr int swizzled(int line, int piece) {
  return line * LineBytes + (swizzled_piece<LineBytes>(line, piece) << 4);
}
// The same piece. The compiler makes other code of it, which was measured where a lane's own line and piece are looked up.
CUTE_HOST_DEVICE constexpr int swizzled_by_lane(int line, int piece) { return (piece ^ line) & 7; }

// Written out, not as CuTe's swizzles of whole offsets: the compiler makes other code of each form, and these were measured.
template <class Swizzle, int LineBytes>
constexpr bool swizzles_as() {
  for (int line = 0; line < 16; ++line)
    for (int piece = 0; piece < LineBytes / kPieceBytes; ++piece)
      if (swizzled<LineBytes>(line, piece) != Swizzle::apply(line * LineBytes + piece * kPieceBytes) ||
          (LineBytes == kLineBytes && swizzled_by_lane(line, piece) != swizzled_piece(line, piece)))
        return false;
  return true;
}
static_assert(swizzles_as<Swizzle<3, 4, 3>, 128>() && swizzles_as<Swizzle<2, 4, 3>, 64>(), "lines are swizzled as CuTe has it");

}  // namespace hexa::sm90
