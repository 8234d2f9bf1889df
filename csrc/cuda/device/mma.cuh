// Matrix products of one warp on tiles in shared memory, fp32 accumulators in registers.
//
// For lane = 4 g + t, acc[m / 16][n / 8][0 .. 3] are the elements (g, 2t), (g, 2t + 1), (g + 8, 2t)
// and (g + 8, 2t + 1) of a 16 x 8 tile.
#pragma once

#include "element.cuh"

namespace gla_ext::cuda {

// The layout of an operand tile in shared memory: A [m][k] or [k][m], B [k][n] or [n][k].
enum class Stored { kAsIs, kTransposed };

template <int M, int N>
__device__ __forceinline__ void clear(float (&acc)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] = 0;
}

// Loads four 8 x 8 matrices; a lane gets a pair of neighbours of each. Lane l passes the address of
// a row of matrix l / 8.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const bf16* p) {
  ldmatrix(r, static_cast<uint32_t>(__cvta_generic_to_shared(p)));
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const bf16* p) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// 16 x 8 x 16, bf16.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 x 8 x 8, tf32.
__device__ __forceinline__ void mma(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// acc += A B over `depth` terms, a multiple of 16. A and B point to the warp's first row and
// column.
template <Stored kA, Stored kB, int kPitchA, int kPitchB, int M, int N>
__device__ __forceinline__ void product(float (&acc)[M][N][4], const bf16* A, const bf16* B,
                                        int depth, bool /*tf32*/) {
  static_assert(N % 2 == 0, "ldmatrix.x4 loads B for two tiles of 8 columns");
  const int lane = threadIdx.x % 32, row = lane % 8, upper = lane / 16, odd = lane / 8 % 2;
#pragma unroll 2
  for (int k = 0; k < depth; k += 16) {
    uint32_t a[M][4], b[N / 2][4];
#pragma unroll
    for (int i = 0; i < M; ++i) {
      if constexpr (kA == Stored::kAsIs)
        ldmatrix(a[i], A + (16 * i + lane % 16) * kPitchA + k + 8 * upper);
      else
        ldmatrix_transposed(a[i], A + (k + row + 8 * upper) * kPitchA + 16 * i + 8 * odd);
    }
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      if constexpr (kB == Stored::kAsIs)
        ldmatrix_transposed(b[j], B + (k + row + 8 * odd) * kPitchB + 16 * j + 8 * upper);
      else
        ldmatrix(b[j], B + (16 * j + row + 8 * upper) * kPitchB + k + 8 * odd);
    }
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j)
        mma(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
  }
}

template <Stored kStored, int kPitch>
__device__ __forceinline__ float element(const float* tile, int row, int column) {
  return kStored == Stored::kAsIs ? tile[row * kPitch + column] : tile[column * kPitch + row];
}

// acc += A B for fp32 words: by tf32 products, or by fp32 fused multiply-adds in the order of k.
template <Stored kA, Stored kB, int kPitchA, int kPitchB, int M, int N>
__device__ __forceinline__ void product(float (&acc)[M][N][4], const float* A, const float* B,
                                        int depth, bool tf32) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (tf32) {
#pragma unroll 1
    for (int k = 0; k < depth; k += 8) {
      float a[M][4], b[N][2];
#pragma unroll
      for (int i = 0; i < M; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          a[i][e] = element<kA, kPitchA>(A, 16 * i + g + 8 * (e % 2), k + t + 4 * (e / 2));
#pragma unroll
      for (int j = 0; j < N; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) b[j][e] = element<kB, kPitchB>(B, k + t + 4 * e, 8 * j + g);
#pragma unroll
      for (int i = 0; i < M; ++i)
#pragma unroll
        for (int j = 0; j < N; ++j) mma(acc[i][j], a[i], b[j][0], b[j][1]);
    }
    return;
  }
#pragma unroll 2
  for (int k = 0; k < depth; ++k) {
    float a[M][2], b[N][2];
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e) a[i][e] = element<kA, kPitchA>(A, 16 * i + g + 8 * e, k);
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) b[j][e] = element<kB, kPitchB>(B, k, 8 * j + 2 * t + e);
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = fmaf(a[i][e / 2], b[j][e % 2], acc[i][j][e]);
  }
}

// Calls f(row, column, x0, x1) for the pairs of neighbours that this lane holds.
template <int M, int N, class F>
__device__ __forceinline__ void for_pairs(const float (&acc)[M][N][4], F&& f) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < M; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        f(16 * i + g + 8 * e, 8 * j + 2 * t, acc[i][j][2 * e], acc[i][j][2 * e + 1]);
}

}  // namespace gla_ext::cuda
