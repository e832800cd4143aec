// The activations of hexa_fx.ops.activations on one number, with their derivative, for epilogues and for the element-wise kernels.
// No host code.
//
// kFast: float by the hardware's approximate exponential and reciprocal, for results that are rounded to 16 bits anyway.
#pragma once
#include <hexa_fx/ptx/math.cuh>

namespace hexa {

enum class Act { none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, quick_gelu, tanh, swiglu_oai, swiglu_limited };
enum class Glu { none, concat, interleaved, split };

// swiglu_oai: alpha, and the limit of gate and up. swiglu_limited: the gate's limit in place of alpha, which is 1, and up's.
struct ActParams {
  float alpha, limit;
};
template <Act A>
inline constexpr bool kLimited = A == Act::swiglu_oai || A == Act::swiglu_limited;
template <Act A, class F>
__device__ __forceinline__ F alpha_of(const ActParams& p) {
  return A == Act::swiglu_oai ? F(p.alpha) : F(1);
}
template <Act A, class F>
__device__ __forceinline__ F gate_limit(const ActParams& p) {
  return A == Act::swiglu_oai ? F(p.limit) : F(p.alpha);
}

template <bool kFast> __device__ __forceinline__ float exp_of(float x) {
  return kFast ? exp2_fast(1.4426950408889634f * x) : expf(x);
}
template <bool kFast> __device__ __forceinline__ double exp_of(double x) { return exp(x); }
__device__ __forceinline__ float erf_of(float x) { return erff(x); }
__device__ __forceinline__ double erf_of(double x) { return erf(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

template <bool kFast, class F>
__device__ __forceinline__ F sigmoid_of(F x) {
  if constexpr (kFast) return reciprocal_fast(F(1) + exp_of<true>(-x));
  else return F(1) / (F(1) + exp_of<false>(-x));
}

// (1 + erf(x / sqrt 2)) / 2. Fast: formula 7.1.26 of Abramowitz and Stegun, within 3e-7, by half of erff's instructions. Where x is far
// below 0 nothing cancels.
template <bool kFast, class F>
__device__ __forceinline__ F cumulative_normal(F x) {
  if constexpr (kFast && sizeof(F) == 4) {
    const float t = reciprocal_fast(fmaf(0.3275911f * 0.70710678f, fabsf(x), 1.f));
    float sum = 0.5f * 1.061405429f;
    sum = fmaf(t, sum, 0.5f * -1.453152027f);
    sum = fmaf(t, sum, 0.5f * 1.421413741f);
    sum = fmaf(t, sum, 0.5f * -0.284496736f);
    sum = fmaf(t, sum, 0.5f * 0.254829592f);
    const float tail = t * sum * exp_of<true>(-0.5f * x * x);
    return x < 0.f ? tail : 1.f - tail;
  } else return F(0.5) * (F(1) + erf_of(x * F(0.70710678118654752440)));
}

// What f and its derivative share, and what takes long: an epilogue asks for it ahead. 0 where there is nothing.
template <Act A, bool kFast = true, class F>
__device__ __forceinline__ F shared_part(F x) {
  if constexpr (A == Act::gelu) return cumulative_normal<kFast>(x);
  else if constexpr (A == Act::gelu_tanh)  // (1 + tanh(u)) / 2 as a sigmoid: no cancellation where tanh is near -1
    return sigmoid_of<kFast>(F(2 * 0.79788456080286535588) * (x + F(0.044715) * x * x * x));
  else if constexpr (A == Act::silu || A == Act::sigmoid) return sigmoid_of<kFast>(x);
  else if constexpr (A == Act::quick_gelu) return sigmoid_of<kFast>(F(1.702) * x);
  else if constexpr (A == Act::tanh) return tanh_of(x);
  else return F(0);
}

// f(x), and f'(x) where `Slope`; s is their shared part.
template <Act A, bool Slope, bool kFast = true, class F>
__device__ __forceinline__ F activate(F x, F s, F& slope) {
  if constexpr (A == Act::relu) {
    if constexpr (Slope) slope = x <= F(0) ? F(0) : F(1);  // as torch for NaN
    return x < F(0) ? F(0) : x;                            // keeps NaN
  } else if constexpr (A == Act::relu2) {
    const F r = x < F(0) ? F(0) : x;
    if constexpr (Slope) slope = F(2) * r;
    return r * r;
  } else if constexpr (A == Act::gelu) {
    if constexpr (Slope) slope = s + x * F(0.39894228040143267794) * exp_of<kFast>(F(-0.5) * x * x);
    return x * s;
  } else if constexpr (A == Act::gelu_tanh) {
    if constexpr (Slope) slope = s + x * s * (F(1) - s) * F(2 * 0.79788456080286535588) * (F(1) + F(3 * 0.044715) * x * x);
    return x * s;
  } else if constexpr (A == Act::silu) {
    if constexpr (Slope) slope = s * (F(1) + x * (F(1) - s));
    return x * s;
  } else if constexpr (A == Act::quick_gelu) {
    if constexpr (Slope) slope = s + F(1.702) * x * s * (F(1) - s);
    return x * s;
  } else if constexpr (A == Act::sigmoid) {
    if constexpr (Slope) slope = s * (F(1) - s);
    return s;
  } else if constexpr (A == Act::tanh) {
    if constexpr (Slope) slope = F(1) - s * s;
    return s;
  } else {
    if constexpr (Slope) slope = F(1);
    return x;
  }
}
template <Act A, bool Slope, bool kFast = true, class F>
__device__ __forceinline__ F activate(F x, F& slope) {
  return activate<A, Slope, kFast>(x, shared_part<A, kFast>(x), slope);
}

template <class F>
__device__ __forceinline__ F below(F x, F limit) {
  return x > limit ? limit : x;
}
template <class F>
__device__ __forceinline__ F within(F x, F limit) {
  return x < -limit ? -limit : below(x, limit);
}

// What is added to up within its limit.
template <Act A, class F>
__device__ __forceinline__ F shifted(F up) {
  if constexpr (A == Act::swiglu_oai) return up + F(1);
  else return up;
}

// Gated value of (gate, up): act(gate) * up, or with a limit: shifted(clamp(up)) * g * sigmoid(alpha g), g = min(gate, limit).
template <Act A, bool kFast = true, class F>
__device__ __forceinline__ F glu(F gate, F up, const ActParams& p) {
  if constexpr (kLimited<A>) {
    const F g = below(gate, gate_limit<A, F>(p)), u = within(up, F(p.limit));
    return g * sigmoid_of<kFast>(alpha_of<A, F>(p) * g) * shifted<A>(u);
  } else {
    F unused;
    return activate<A, false, kFast>(gate, unused) * up;
  }
}

// What a gated value and its derivatives share; see shared_part.
template <Act A, bool kFast = true, class F>
__device__ __forceinline__ F glu_shared_part(F gate, const ActParams& p) {
  if constexpr (kLimited<A>) return sigmoid_of<kFast>(alpha_of<A, F>(p) * below(gate, gate_limit<A, F>(p)));
  else return shared_part<A, kFast>(gate);
}

// Gated value, and its derivatives by gate and up; s is what they share.
template <Act A, bool kFast = true, class F>
__device__ __forceinline__ F glu_slopes(F gate, F up, F s, const ActParams& p, F& dgate, F& dup) {
  if constexpr (kLimited<A>) {
    const F limit = F(p.limit), alpha = alpha_of<A, F>(p), top = gate_limit<A, F>(p);
    const F g = below(gate, top), u = within(up, limit), f = g * s;
    dgate = gate > top ? F(0) : shifted<A>(u) * s * (F(1) + alpha * g * (F(1) - s));
    dup = up > limit || up < -limit ? F(0) : f;
    return f * shifted<A>(u);
  } else {
    F slope;
    const F f = activate<A, true, kFast>(gate, s, slope);
    dgate = slope * up;
    dup = f;
    return f * up;
  }
}
template <Act A, bool kFast = true, class F>
__device__ __forceinline__ F glu_slopes(F gate, F up, const ActParams& p, F& dgate, F& dup) {
  return glu_slopes<A, kFast>(gate, up, glu_shared_part<A, kFast>(gate, p), p, dgate, dup);
}

}  // namespace hexa
