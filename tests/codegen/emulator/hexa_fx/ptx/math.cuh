// Stands for templates/include/hexa_fx/ptx/math.cuh.
#pragma once
#include <cmath>

namespace hexa {
inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal_fast(float x) { return 1 / x; }
inline float max_or_nan(float a, float b) { return a != a ? a : b > a || b != b ? b : a; }
}  // namespace hexa
using std::erf;
