// Chunks of eight elements: what one thread moves at a time.
#pragma once
#include <hexa_fx/ptx/fetch.cuh>
#include <hexa_fx/types/element.cuh>

namespace hexa {

constexpr int kChunk = 8;

template <class T> struct alignas(16) Packed {
  T value[kChunk];
};

template <class T> __device__ bool aligned16(const T* p) { return (reinterpret_cast<unsigned long long>(p) & 15) == 0; }

// A chunk as it lies in memory. Fetching several before unpacking any keeps their loads in flight together.
template <class T> struct alignas(16) Raw {
  uint4 word[kChunk * int(sizeof(T)) / 16];
};

// p is a multiple of 16 bytes; zeros if not wanted.
template <class T>
__device__ Raw<T> fetch(const T* p, bool wanted = true) {
  Raw<T> raw;
#pragma unroll
  for (int i = 0; i < int(sizeof(raw) / 16); ++i) raw.word[i] = fetch16(reinterpret_cast<const uint4*>(p) + i, wanted);
  return raw;
}

template <class T>
__device__ void unpack(wide_t<T> (&out)[kChunk], const Raw<T>& raw) {
  const Packed<T>& packed = reinterpret_cast<const Packed<T>&>(raw);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) out[i] = widen(packed.value[i]);
}

// out[i] = p[i] for i < count, 0 beyond. kAligned: p is known to be a multiple of 16 bytes. kFull: count is known to be 8 or
// more; with both there is no branch, so neighbouring loads overlap.
template <bool kAligned = false, bool kFull = false, class T>
__device__ void load_chunk(wide_t<T> (&out)[kChunk], const T* p, int count = kChunk) {
  if ((kFull || count >= kChunk) && (kAligned || aligned16(p))) {
    unpack<T>(out, fetch(p));
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) out[i] = i < count ? widen(p[i]) : wide_t<T>(0);
  }
}

// p[i] = in[i] for i < count
template <bool kAligned = false, bool kFull = false, class T>
__device__ void store_chunk(T* p, const wide_t<T> (&in)[kChunk], int count = kChunk) {
  if ((kFull || count >= kChunk) && (kAligned || aligned16(p))) {
    Packed<T> packed;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) packed.value[i] = narrow<T>(in[i]);
    const Raw<T>& raw = reinterpret_cast<const Raw<T>&>(packed);
#pragma unroll
    for (int i = 0; i < int(sizeof(raw) / 16); ++i) reinterpret_cast<uint4*>(p)[i] = raw.word[i];
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (i < count) p[i] = narrow<T>(in[i]);
  }
}

// p[i] += in[i] for i < count
template <class F>
__device__ void add_chunk(F* p, const F (&in)[kChunk], int count = kChunk) {
  if (count >= kChunk && aligned16(p)) {
    Packed<F> there = *reinterpret_cast<const Packed<F>*>(p);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) there.value[i] += in[i];
    *reinterpret_cast<Packed<F>*>(p) = there;
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (i < count) p[i] += in[i];
  }
}

template <class F>
__device__ F warp_sum(F x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

}  // namespace hexa
