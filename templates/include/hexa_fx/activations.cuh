// The activations of hexa_fx.ops.activations, forward and derivative, for epilogues and for the element-wise kernels.
#pragma once

namespace hexa {

enum class Act { none, relu, relu2, gelu, gelu_tanh, silu, quick_gelu, sigmoid, tanh, swiglu_oai };
enum class Glu { none, concat, interleaved, split };

struct ActParams {
  float alpha;  // swiglu_oai
  float limit;
};

// kFast: the hardware's approximate exp (2 ulp), for results that are rounded to 16 bits anyway.
template <bool kFast> __device__ inline float exp_of(float x) { return kFast ? __expf(x) : expf(x); }
template <bool kFast> __device__ inline double exp_of(double x) { return exp(x); }
__device__ inline float erf_of(float x) { return erff(x); }
__device__ inline double erf_of(double x) { return erf(x); }
__device__ inline float tanh_of(float x) { return tanhf(x); }
__device__ inline double tanh_of(double x) { return tanh(x); }

template <bool kFast, class F> __device__ F sigmoid_of(F x) {
  if constexpr (kFast) return __fdividef(F(1), F(1) + exp_of<true>(-x));
  else return F(1) / (F(1) + exp_of<false>(-x));
}

// One function of one variable: value and derivative at x.
template <Act kAct, bool kFast, class F>
struct Unary {
  static __device__ F value(F x) {
    if constexpr (kAct == Act::none) return x;
    else if constexpr (kAct == Act::relu) return x < F(0) ? F(0) : x;  // keeps NaN
    else if constexpr (kAct == Act::relu2) { const F r = x < F(0) ? F(0) : x; return r * r; }
    else if constexpr (kAct == Act::gelu) return F(0.5) * x * (F(1) + erf_of(x * F(0.70710678118654752440)));
    else if constexpr (kAct == Act::gelu_tanh) return x * gate(x);
    else if constexpr (kAct == Act::silu) return x * sigmoid_of<kFast>(x);
    else if constexpr (kAct == Act::quick_gelu) return x * sigmoid_of<kFast>(F(1.702) * x);
    else if constexpr (kAct == Act::sigmoid) return sigmoid_of<kFast>(x);
    else if constexpr (kAct == Act::tanh) return tanh_of(x);
    else return x;
  }

  static __device__ F slope(F x) {
    if constexpr (kAct == Act::none) return F(1);
    else if constexpr (kAct == Act::relu) return x <= F(0) ? F(0) : F(1);  // as torch for NaN
    else if constexpr (kAct == Act::relu2) return x <= F(0) ? F(0) : F(2) * x;
    else if constexpr (kAct == Act::gelu) {
      const F cdf = F(0.5) * (F(1) + erf_of(x * F(0.70710678118654752440)));
      return cdf + x * F(0.39894228040143267794) * exp_of<false>(F(-0.5) * x * x);
    } else if constexpr (kAct == Act::gelu_tanh) {
      const F s = gate(x), du = F(2 * 0.79788456080286535588) * (F(1) + F(3 * 0.044715) * x * x);
      return s + x * s * (F(1) - s) * du;
    } else if constexpr (kAct == Act::silu) {
      const F s = sigmoid_of<kFast>(x);
      return s + x * s * (F(1) - s);
    } else if constexpr (kAct == Act::quick_gelu) {
      const F s = sigmoid_of<kFast>(F(1.702) * x);
      return s + F(1.702) * x * s * (F(1) - s);
    } else if constexpr (kAct == Act::sigmoid) {
      const F s = sigmoid_of<kFast>(x);
      return s * (F(1) - s);
    } else if constexpr (kAct == Act::tanh) {
      const F t = tanh_of(x);
      return F(1) - t * t;
    } else return F(1);
  }

 private:
  // (1 + tanh(u)) / 2 as a sigmoid: no cancellation where tanh is near -1
  static __device__ F gate(F x) {
    return sigmoid_of<kFast>(F(2 * 0.79788456080286535588) * (x + F(0.044715) * x * x * x));
  }
};

// A gated expert: a = act(gate) * up, or swiglu_oai: (clamp(up) + 1) * g * sigmoid(alpha g), g = min(gate, limit).
template <Act kAct, bool kFast, class F>
struct Gated {
  static __device__ F value(F gate, F up, const ActParams& p) {
    if constexpr (kAct == Act::swiglu_oai) {
      const F g = low(gate, p), u = clamp(up, p);
      return (u + F(1)) * g * sigmoid_of<kFast>(g * F(p.alpha));
    } else {
      return Unary<kAct, kFast, F>::value(gate) * up;
    }
  }

  static __device__ void slope(F da, F gate, F up, const ActParams& p, F& dgate, F& dup) {
    if constexpr (kAct == Act::swiglu_oai) {
      const F g = low(gate, p), u = clamp(up, p), s = sigmoid_of<kFast>(g * F(p.alpha)), swish = g * s;
      dgate = gate <= F(p.limit) ? da * (u + F(1)) * (s + F(p.alpha) * swish * (F(1) - s)) : F(0);
      dup = up <= F(p.limit) && up >= -F(p.limit) ? da * swish : F(0);
    } else {
      dgate = da * up * Unary<kAct, kFast, F>::slope(gate);
      dup = da * Unary<kAct, kFast, F>::value(gate);
    }
  }

 private:
  static __device__ F low(F x, const ActParams& p) { return x > F(p.limit) ? F(p.limit) : x; }
  static __device__ F clamp(F x, const ActParams& p) { return x < -F(p.limit) ? -F(p.limit) : low(x, p); }
};

}  // namespace hexa
