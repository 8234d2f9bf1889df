// Neighbouring channels of a token that a thread loads and stores at once, in the format of memory.
#pragma once

#include "cuda/device/launch.cuh"

namespace gla_ext::cuda {

template <class T, int kC>
struct Vec {
  static constexpr int kWords = kC * sizeof(T) / 4;
  static_assert(kWords == 2 || kWords % 4 == 0, "loads of 8 or 16 bytes");
  uint32_t words[kWords];

  __device__ __forceinline__ float operator[](int i) const { return element_of<T>(words, i); }
  // Sets element i. The words must have been cleared.
  __device__ __forceinline__ void set(int i, T x) {
    if constexpr (sizeof(T) == 4)
      words[i] = __float_as_uint(x);
    else
      words[i / 2] |= uint32_t{bits_of(x)} << (16 * (i % 2));
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }
};

// Loads from an address that is a multiple of the vector's size; gives zeros if not `there`.
template <class T, int kC>
__device__ __forceinline__ Vec<T, kC> load_aligned(const T* p, bool there) {
  Vec<T, kC> x;
  x.clear();
  if (!there) return x;
  if constexpr (Vec<T, kC>::kWords == 2) {
    const uint2 y = __ldg(reinterpret_cast<const uint2*>(p));
    x.words[0] = y.x, x.words[1] = y.y;
  } else {
#pragma unroll
    for (int i = 0; i < Vec<T, kC>::kWords; i += 4) {
      const uint4 y = __ldg(reinterpret_cast<const uint4*>(p) + i / 4);
      x.words[i] = y.x, x.words[i + 1] = y.y, x.words[i + 2] = y.z, x.words[i + 3] = y.w;
    }
  }
  return x;
}

// Loads the first `valid` elements; the others are zero.
template <class T, int kC>
__device__ __forceinline__ Vec<T, kC> load_each(const T* p, int valid) {
  Vec<T, kC> x;
  x.clear();
#pragma unroll
  for (int i = 0; i < kC; ++i)
    if (i < valid) x.set(i, p[i]);
  return x;
}

template <class T, int kC>
__device__ __forceinline__ Vec<T, kC> round_to(const float (&x)[kC]) {
  Vec<T, kC> y;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kC; ++i) y.words[i] = __float_as_uint(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kC / 2; ++i) {
      if constexpr (std::is_same_v<T, bf16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        y.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        y.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  }
  return y;
}

// Stores the first `valid` results, all at once if the address is a multiple of the vector's size.
template <class T, int kC>
__device__ __forceinline__ void store_vec(T* p, const float (&x)[kC], int valid, bool aligned) {
  if (!aligned) {
#pragma unroll
    for (int i = 0; i < kC; ++i)
      if (i < valid) p[i] = from_float<T>(x[i]);
    return;
  }
  const Vec<T, kC> y = round_to<T>(x);
  if constexpr (Vec<T, kC>::kWords == 2) {
    *reinterpret_cast<uint2*>(p) = make_uint2(y.words[0], y.words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < Vec<T, kC>::kWords; i += 4)
      reinterpret_cast<uint4*>(p)[i / 4] =
          make_uint4(y.words[i], y.words[i + 1], y.words[i + 2], y.words[i + 3]);
  }
}

}  // namespace gla_ext::cuda
