// Matrix products of tiles that live in L1 and L2.
//
//   C[i, j] = alpha_i Σ_k A[i, k] B[k, j] + beta_i C[i, j]
//
// Every element is one chain of multiply-adds (fused if the capability has them) over ascending k,
// whatever the tile's shape. So its bits depend only on its row of A and its column of B, not on
// the number of rows, the thread or the batch.
#pragma once

#include "tile.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// A's element (i, k) is at data + i * row + k * col. {p, ld, 1} is A, {p, 1, ld} its transpose.
template <typename T>
struct Left {
  const T* data;
  int64_t row, col;
};

template <typename T>
struct Epilogue {
  T alpha = 1, beta = 0;         // beta == 0 never reads C
  const T* row_alpha = nullptr;  // [M], replaces alpha
  const T* row_beta = nullptr;   // [M], replaces beta
};

template <typename T, int M, int N>
inline void gemm_block(const Left<T>& a, const T* B, int64_t ldb, T* C, int64_t ldc, int64_t depth,
                       int64_t i0, const Epilogue<T>& e) {
  constexpr int64_t width = Vec<T>::size();
  Vec<T> acc[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) acc[i][j] = Vec<T>(T(0));
  const T* pa = a.data + i0 * a.row;
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> b[N];
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) b[j] = Vec<T>::loadu(B + k * ldb + j * width);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const Vec<T> x(pa[i * a.row + k * a.col]);
#pragma GCC unroll 2
      for (int j = 0; j < N; ++j) acc[i][j] = at::vec::fmadd(x, b[j], acc[i][j]);
    }
  }
  const bool keep = e.beta != T(0) || e.row_beta != nullptr;
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    const Vec<T> alpha(e.row_alpha ? e.row_alpha[i0 + i] : e.alpha);
    const Vec<T> beta(e.row_beta ? e.row_beta[i0 + i] : e.beta);
    T* c = C + (i0 + i) * ldc;
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) {
      Vec<T> r = acc[i][j] * alpha;
      if (keep) r = at::vec::fmadd(Vec<T>::loadu(c + j * width), beta, r);
      r.store(c + j * width);
    }
  }
}

template <typename T, int N>
inline void gemm_columns(const Left<T>& a, const T* B, int64_t ldb, T* C, int64_t ldc, int64_t M,
                         int64_t depth, const Epilogue<T>& e) {
  int64_t i = 0;
  // 8 x 2 accumulators fill the 32 registers of AVX-512, 4 x 2 the 16 of AVX2.
  if constexpr (sizeof(Vec<T>) == 64)
    for (; i + 8 <= M; i += 8) gemm_block<T, 8, N>(a, B, ldb, C, ldc, depth, i, e);
  for (; i + 4 <= M; i += 4) gemm_block<T, 4, N>(a, B, ldb, C, ldc, depth, i, e);
  for (; i < M; ++i) gemm_block<T, 1, N>(a, B, ldb, C, ldc, depth, i, e);
}

// C[M, N] with N a multiple of kPad.
template <typename T>
inline void gemm(const Left<T>& a, const T* B, int64_t ldb, T* C, int64_t ldc, int64_t M, int64_t N,
                 int64_t depth, const Epilogue<T>& e = {}) {
  constexpr int64_t width = Vec<T>::size();
  int64_t j = 0;
  for (; j + 2 * width <= N; j += 2 * width)
    gemm_columns<T, 2>(a, B + j, ldb, C + j, ldc, M, depth, e);
  for (; j < N; j += width) gemm_columns<T, 1>(a, B + j, ldb, C + j, ldc, M, depth, e);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
