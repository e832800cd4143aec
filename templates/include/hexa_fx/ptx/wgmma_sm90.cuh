// wgmma of operands in shared memory, with the widths that CuTe keeps in a header of 3 MB. The templates write those that a kernel needs.
#pragma once
#include <cute/arch/mma_sm90_desc.hpp>

namespace hexa::sm90 {
using namespace cute;

// Adds A (64 x 16) B (16 x Columns) to d.
template <int Columns>
struct Wgmma;

// An operand in shared memory, as wgmma is told of it: swizzled lines of 128 bytes, along the contraction or across it, 1024 bytes an
// eight. `at`: its address in shared memory.
CUTE_DEVICE uint64_t swizzled_operand(uint32_t at) {
  constexpr uint32_t kSwizzle = uint32_t(SM90::GMMA::LayoutType::B128) << 30, kStride = 1024 >> 4, kUnused = 1 << 16;
  return uint64_t(kSwizzle | kStride) << 32 | kUnused | at >> 4;  // GmmaDescriptor's fields, without a mask for each
}

}  // namespace hexa::sm90
