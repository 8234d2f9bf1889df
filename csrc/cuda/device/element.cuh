// Elements: loading eight of a row at once, converting, and the operand type of matrix products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/host/params.h"

namespace gla_ext::cuda {

using bf16 = __nv_bfloat16;
using half = __half;

// The operand type of products of tensors of type In. bf16 is used as it is. fp16 has too few
// exponents for gated operands, so fp16 and fp32 are multiplied as fp32 words, which may be rounded
// to tf32.
template <class In>
struct OperandOf {
  using type = float;
};
template <>
struct OperandOf<bf16> {
  using type = bf16;
};
template <class In>
using Operand = typename OperandOf<In>::type;

// Whether products of tensors of type In use tf32. For fp16 this is always so, and known at compile
// time.
template <class In>
__device__ __forceinline__ bool takes_tf32(const Problem& p) {
  return std::is_same_v<In, half> || p.tf32;
}

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ half from_float<half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

// Element i of a row's words, in the format of memory.
template <class T>
__device__ __forceinline__ float element_of(const uint32_t* words, int i) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(words[i]);
  } else {
    const auto bits = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
    if constexpr (std::is_same_v<T, bf16>)
      return __uint_as_float(uint32_t{bits} << 16);
    else
      return __half2float(__ushort_as_half(bits));
  }
}
// The bits of an element of 16 bits.
__device__ __forceinline__ uint16_t bits_of(bf16 x) { return __bfloat16_as_ushort(x); }
__device__ __forceinline__ uint16_t bits_of(half x) { return __half_as_ushort(x); }

// Two elements in the format of memory, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack(float x0, float x1) {
  if constexpr (std::is_same_v<T, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x0, x1);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(x0, x1);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Eight consecutive elements of a row, in the format of memory.
template <class T>
struct alignas(16) Eight {
  static constexpr int kWords = 8 * sizeof(T) / 4;
  uint32_t words[kWords];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }
  __device__ __forceinline__ float operator[](int i) const { return element_of<T>(words, i); }
  __device__ __forceinline__ void set(int i, T x) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(x);
    } else {
      const int shift = 16 * (i % 2);
      words[i / 2] = (words[i / 2] & ~(0xffffu << shift)) | (uint32_t{bits_of(x)} << shift);
    }
  }
};

// Loads 16 bytes from `p`; gives zeros if not `there`.
__device__ __forceinline__ void load16(uint32_t* words, const void* p, bool there) {
  asm("{\n"
      "  .reg .pred there;\n"
      "  setp.ne.u32 there, %5, 0;\n"
      "  mov.b32 %0, 0;\n"
      "  mov.b32 %1, 0;\n"
      "  mov.b32 %2, 0;\n"
      "  mov.b32 %3, 0;\n"
      "  @there ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
      : "l"(p), "r"(static_cast<uint32_t>(there)));
}

// How a kernel accesses memory. kFast: every row starts at a multiple of 16 bytes, K and V are
// multiples of 8, and scores and states have the operand type of products. kGeneral: all other
// cases.
enum class Access { kFast, kGeneral };

// Loads eight elements from `p`. Only the first `valid` exist; the others are 0.
template <Access kAccess, class T>
__device__ __forceinline__ Eight<T> load8(const T* p, int valid) {
  Eight<T> x;
  if constexpr (kAccess == Access::kFast) {
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords; i += 4)
      load16(x.words + i, reinterpret_cast<const uint32_t*>(p) + i, valid > 0);
  } else {
    x.clear();
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid) x.set(i, p[i]);
  }
  return x;
}

// Loads eight elements from an address that is a multiple of 16 bytes, also in shared memory.
template <class T>
__device__ __forceinline__ Eight<T> load8_aligned(const T* p) {
  Eight<T> x;
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords / 4; ++i)
    reinterpret_cast<uint4*>(x.words)[i] = reinterpret_cast<const uint4*>(p)[i];
  return x;
}

// fp32 rounded to tf32's 10 bits of mantissa, ties away from zero.
__device__ __forceinline__ float round_tf32(float x) {
  uint32_t r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return __uint_as_float(r);
}

// x as an operand of a product. `tf32` matters only for fp32 words.
template <class Op>
__device__ __forceinline__ Op to_operand(float x, bool tf32) {
  if constexpr (std::is_same_v<Op, bf16>)
    return __float2bfloat16_rn(x);
  else
    return tf32 ? round_tf32(x) : x;
}

template <class Op>
__device__ __forceinline__ Eight<Op> to_operands(const float (&x)[8], bool tf32) {
  Eight<Op> r;
  if constexpr (std::is_same_v<Op, bf16>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      r.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) r.set(i, to_operand<float>(x[i], tf32));
  }
  return r;
}

template <class Op, class In>
__device__ __forceinline__ Eight<Op> to_operands(const Eight<In>& x, bool tf32) {
  if constexpr (std::is_same_v<Op, In> && std::is_same_v<Op, bf16>) {
    return x;
  } else {
    float f[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = x[i];
    return to_operands<Op>(f, tf32);
  }
}

// Loads eight scores or elements of a state, which are fp32, or bf16 according to `dtype`.
template <Access kAccess, class Op>
__device__ __forceinline__ Eight<Op> load8_operands(const void* base, DType dtype, int64_t offset,
                                                    int valid, bool tf32) {
  if constexpr (std::is_same_v<Op, bf16>) {
    if (kAccess == Access::kFast || dtype == DType::kBFloat16)
      return load8<kAccess>(static_cast<const bf16*>(base) + offset, valid);
  }
  return to_operands<Op>(load8<kAccess>(static_cast<const float*>(base) + offset, valid), tf32);
}

// Stores eight elements to an address that is a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ void store8(T* p, const Eight<T>& x) {
#pragma unroll
  for (int i = 0; i < Eight<T>::kWords / 4; ++i)
    reinterpret_cast<uint4*>(p)[i] = reinterpret_cast<const uint4*>(x.words)[i];
}

// Stores the first `valid` of eight floats to a row of any type.
template <Access kAccess, class T>
__device__ __forceinline__ void store8(T* p, const float (&x)[8], int valid) {
  if constexpr (kAccess == Access::kFast) {
    if (valid <= 0) return;
    Eight<T> y;
#pragma unroll
    for (int i = 0; i < Eight<T>::kWords; ++i) y.words[i] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) y.set(i, from_float<T>(x[i]));
    store8(p, y);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid) p[i] = from_float<T>(x[i]);
  }
}

// Stores two neighbours of a row, the first at an even column.
template <Access kAccess, class T>
__device__ __forceinline__ void store2(T* p, float x0, float x1, int valid) {
  if constexpr (kAccess == Access::kGeneral) {
    if (valid > 0) p[0] = from_float<T>(x0);
    if (valid > 1) p[1] = from_float<T>(x1);
  } else if (valid > 0) {
    if constexpr (sizeof(T) == 4)
      *reinterpret_cast<float2*>(p) = make_float2(x0, x1);
    else if constexpr (std::is_same_v<T, bf16>)
      *reinterpret_cast<__nv_bfloat162*>(p) = __floats2bfloat162_rn(x0, x1);
    else
      *reinterpret_cast<__half2*>(p) = __floats2half2_rn(x0, x1);
  }
}

// Stores two neighbours of scores or a state, which are fp32, or bf16 according to `dtype`.
template <Access kAccess, class Op>
__device__ __forceinline__ void store2_operands(void* base, DType dtype, int64_t offset, float x0,
                                                float x1, int valid) {
  if constexpr (std::is_same_v<Op, bf16>) {
    if (kAccess == Access::kFast || dtype == DType::kBFloat16)
      return store2<kAccess>(static_cast<bf16*>(base) + offset, x0, x1, valid);
  }
  store2<kAccess>(static_cast<float*>(base) + offset, x0, x1, valid);
}

template <Access kAccess, class T>
__device__ __forceinline__ float2 load2(const T* p, int valid) {
  if constexpr (kAccess == Access::kGeneral)
    return make_float2(valid > 0 ? to_float(p[0]) : 0.f, valid > 1 ? to_float(p[1]) : 0.f);
  if (valid <= 0) return make_float2(0.f, 0.f);
  if constexpr (sizeof(T) == 4)
    return *reinterpret_cast<const float2*>(p);
  else if constexpr (std::is_same_v<std::remove_const_t<T>, bf16>)
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
  else
    return __half22float2(*reinterpret_cast<const __half2*>(p));
}

// Element i of a tensor of any dtype.
__device__ __forceinline__ float load_any(const void* base, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(static_cast<const bf16*>(base)[i]);
    case DType::kHalf:
      return to_float(static_cast<const half*>(base)[i]);
    default:
      return static_cast<const float*>(base)[i];
  }
}

__device__ __forceinline__ void store_any(void* base, DType dtype, int64_t i, float x) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<bf16*>(base)[i] = from_float<bf16>(x);
      break;
    case DType::kHalf:
      static_cast<half*>(base)[i] = from_float<half>(x);
      break;
    default:
      static_cast<float*>(base)[i] = x;
  }
}

}  // namespace gla_ext::cuda
