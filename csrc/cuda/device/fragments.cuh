// The operands of 16 x 8 x 16 products of bf16 or fp16 in the registers of a warp, for lane = 4 i +
// t:
//
//   a  16 x 16    (i, 2t ..), (i + 8, 2t ..), (i, 2t + 8 ..), (i + 8, 2t + 8 ..)
//   b  16 x 8     (2t .., i), (2t + 8 .., i)
//   c  16 x 8     (i, 2t), (i, 2t + 1), (i + 8, 2t), (i + 8, 2t + 1)
#pragma once

#include "element.cuh"

namespace gla_ext::cuda::warp {

__device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_pair() { return threadIdx.x % 4; }

template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of which a lane holds (i, 2t) and (i, 2t + 1).
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

template <class T>
__device__ __forceinline__ uint32_t bits_of(T x) {
  if constexpr (std::is_same_v<T, bf16>)
    return __bfloat16_as_ushort(x);
  else
    return __half_as_ushort(x);
}

template <class T>
__device__ __forceinline__ uint32_t rounded_pair(float x0, float x1) {
  return bits_of(from_float<T>(x0)) | bits_of(from_float<T>(x1)) << 16;
}

}  // namespace gla_ext::cuda::warp
