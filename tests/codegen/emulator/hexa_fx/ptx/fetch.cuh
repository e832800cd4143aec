// Stands for templates/include/hexa_fx/ptx/fetch.cuh.
#pragma once
#include "emulator.hpp"

namespace hexa {
inline uint4 fetch16(const uint4* from, bool wanted) { return wanted ? *from : uint4{}; }
}  // namespace hexa
