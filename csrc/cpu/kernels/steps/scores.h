// Forward steps 3 and 4: A_ij = scale Σ_d q_id k_jd 2^(b_id - b_jd) for i >= j, between and inside
// sub-chunks.
//   read q_in, k_out (tier 1) or q, k, q_local (strong rows); write t.A [C, C]. Accumulate in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// Runs once before the two steps: transposes the keys of tier 1, and clears A.
template <typename T>
inline void begin_scores(const Problem<T>& p, Tiles<T>& t) {
  std::memset(t.A, 0, kChunk * kChunk * sizeof(T));
  if (t.gates.tier1_rows > 0)
    transpose(t.k_t, kChunk, tier1_keys(p, t), t.Kp, t.gates.tier1_rows, t.K);
}

// Strong rows leave other keys in k_t, so this is the last step to read those of tier 1.
template <typename T>
inline void scores_off_diagonal(const Problem<T>& p, Tiles<T>& t) {
  const auto rows_of_A = [&](const T* q, int64_t first, int64_t rows, int64_t columns) {
    gemm(Left<T>{q + first * t.Kp, t.Kp, 1}, t.k_t, kChunk, t.A + first * kChunk, kChunk, rows,
         columns, t.K, Epilogue<T>{p.scale});
  };
  for (int64_t I = 1; I < t.gates.sub_chunks(); ++I) {
    const int64_t first = I * kSubChunk, rows = t.gates.rows(I), tier1 = t.gates.tier1_rows_of(I);
    rows_of_A(t.q_in, first, tier1, first);
    if (tier1 == rows) continue;
    anchor_keys(p, t, I);
    transpose(t.k_t, kChunk, t.k_anchor, t.Kp, first, t.K);
    rows_of_A(t.q_local, first + tier1, rows - tier1, first);
  }
}

// For strong rows: the block at sub-chunk I, element by element. A running product of decays
// carries k_j down the tokens.
template <typename T>
inline void scores_diagonal_exact(const Problem<T>& p, Tiles<T>& t, int64_t I) {
  const int64_t ld = t.Kp, first = I * kSubChunk, rows = t.gates.rows(I);
  for (int64_t j = 0; j < rows; ++j) {
    Vec<T> sum[kSubChunk];
    for (auto& s : sum) s = Vec<T>(T(0));
    for (int64_t d = 0; d < ld; d += Vec<T>::size()) {
      Vec<T> carried = Vec<T>::loadu(t.k + (first + j) * ld + d);
      for (int64_t i = j; i < rows; ++i) {
        if (i > j) carried = carried * Vec<T>::loadu(t.gates.alpha + (first + i) * ld + d);
        sum[i] = at::vec::fmadd(Vec<T>::loadu(t.q + (first + i) * ld + d), carried, sum[i]);
      }
    }
    for (int64_t i = std::max(j, t.gates.tier1_rows_of(I)); i < rows; ++i)
      t.A[(first + i) * kChunk + first + j] = p.scale * sum_of_lanes<T>(sum[i]);
  }
}

template <typename T>
inline void scores_diagonal(const Problem<T>& p, Tiles<T>& t) {
  const Epilogue<T> scaled{p.scale};
  for (int64_t I = 0; I < t.gates.sub_chunks(); ++I) {
    const int64_t tier1 = t.gates.tier1_rows_of(I);
    if (tier1 > 0) {
      T* block = t.A + I * kSubChunk * (kChunk + 1);
      gemm(Left<T>{t.q_in + I * kSubChunk * t.Kp, t.Kp, 1}, t.k_t + I * kSubChunk, kChunk, block,
           kChunk, tier1, kSubChunk, t.K, scaled);
      mask_block(block, kChunk, tier1);
    }
    if (tier1 < t.gates.rows(I)) scores_diagonal_exact(p, t, I);
  }
}

// Both steps. A is then the operand of forward step 5 and backward step 4.
template <typename T>
inline void scores(const Problem<T>& p, Tiles<T>& t) {
  begin_scores(p, t);
  scores_diagonal(p, t);
  scores_off_diagonal(p, t);
  if (p.round_operands) round_to_bf16(t.A, kChunk * kChunk);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
