// Activations of hexa_fx.ops.activations on one float, with their derivative. No host code.
#pragma once

namespace hexa {

enum class Act { none, relu, relu2, gelu, gelu_tanh, silu, sigmoid, quick_gelu, swiglu_oai };

struct ActParams {  // swiglu_oai: alpha, limit
  float a, b;
};

// One instruction each; relative error about 2^-22. Flushing denormals only moves values below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(1.4426950408889634f * x); }
__device__ __forceinline__ float sigmoidf(float x) { return reciprocal(1.f + exp_fast(-x)); }
// Absolute error about 1e-7, unlike tanh.approx (5e-4).
__device__ __forceinline__ float tanh_fast(float x) { return 1.f - 2.f * reciprocal(1.f + exp_fast(2.f * x)); }

// f(x), and f'(x) where `Slope`.
template <Act A, bool Slope>
__device__ __forceinline__ float activate(float x, float& slope) {
  if constexpr (A == Act::relu) {
    slope = x > 0.f ? 1.f : 0.f;
    return x < 0.f ? 0.f : x;  // keeps NaN
  } else if constexpr (A == Act::relu2) {
    const float r = x < 0.f ? 0.f : x;
    slope = 2.f * r;
    return r * r;
  } else if constexpr (A == Act::gelu) {
    const float cdf = 0.5f * (1.f + erff(x * 0.70710678118654752f));
    if constexpr (Slope) slope = cdf + x * 0.39894228040143268f * exp_fast(-0.5f * x * x);
    return x * cdf;
  } else if constexpr (A == Act::gelu_tanh) {
    const float c = 0.79788456080286536f, u = c * (x + 0.044715f * x * x * x), t = tanh_fast(u);
    if constexpr (Slope) slope = 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * c * (1.f + 0.134145f * x * x);
    return 0.5f * x * (1.f + t);
  } else if constexpr (A == Act::silu) {
    const float s = sigmoidf(x);
    if constexpr (Slope) slope = s * (1.f + x * (1.f - s));
    return x * s;
  } else if constexpr (A == Act::quick_gelu) {
    const float s = sigmoidf(1.702f * x);
    if constexpr (Slope) slope = s + 1.702f * x * s * (1.f - s);
    return x * s;
  } else if constexpr (A == Act::sigmoid) {
    const float s = sigmoidf(x);
    if constexpr (Slope) slope = s * (1.f - s);
    return s;
  } else {
    slope = 1.f;
    return x;
  }
}

// Gated value of (gate, up).
template <Act A>
__device__ __forceinline__ float glu(float g, float u, const ActParams& p) {
  if constexpr (A == Act::swiglu_oai) {
    g = g > p.b ? p.b : g;
    u = u > p.b ? p.b : (u < -p.b ? -p.b : u);
    return g * sigmoidf(p.a * g) * (u + 1.f);
  } else {
    float unused;
    return activate<A, false>(g, unused) * u;
  }
}

// Gated value, and its gradients to gate and up.
template <Act A>
__device__ __forceinline__ float glu_slopes(float g, float u, const ActParams& p, float& dg, float& du) {
  if constexpr (A == Act::swiglu_oai) {
    const float gc = g > p.b ? p.b : g, uc = u > p.b ? p.b : (u < -p.b ? -p.b : u);
    const float s = sigmoidf(p.a * gc), f = gc * s;
    dg = g > p.b ? 0.f : (uc + 1.f) * s * (1.f + p.a * gc * (1.f - s));
    du = (u > p.b || u < -p.b) ? 0.f : f;
    return f * (uc + 1.f);
  } else {
    float slope;
    const float f = activate<A, true>(g, slope);
    dg = slope * u;
    du = f;
    return f * u;
  }
}

}  // namespace hexa
