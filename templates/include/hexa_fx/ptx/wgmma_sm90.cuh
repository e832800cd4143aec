// wgmma of operands in shared memory, with the widths that CuTe keeps in a header of 3 MB. The templates write those that a kernel needs.
#pragma once
#include <cute/arch/mma_sm90_desc.hpp>

namespace hexa::sm90 {
using namespace cute;

// Adds A (64 x 16) B (16 x Columns) to d.
template <int Columns>
struct Wgmma;

// Where an operand begins in shared memory, as wgmma is told of it: in units of 16 bytes, so that offsets can be added.
CUTE_DEVICE uint32_t operand_at(uint32_t address) {
  constexpr uint32_t kUnused = 1 << 16;
  return kUnused | address >> 4;
}
CUTE_DEVICE constexpr uint32_t operand_offset(int bytes) { return uint32_t(bytes) >> 4; }

// An operand in shared memory: swizzled lines of 128 bytes, along the contraction or across it, 1024 bytes an eight.
CUTE_DEVICE uint64_t swizzled_operand_at(uint32_t at) {
  constexpr uint32_t kSwizzle = uint32_t(SM90::GMMA::LayoutType::B128) << 30, kStride = 1024 >> 4;
  return uint64_t(kSwizzle | kStride) << 32 | at;  // GmmaDescriptor's fields, without a mask for each
}
CUTE_DEVICE uint64_t swizzled_operand(uint32_t address) { return swizzled_operand_at(operand_at(address)); }

}  // namespace hexa::sm90
