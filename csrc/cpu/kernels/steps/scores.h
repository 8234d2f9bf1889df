// Forward steps 3 and 4: A_ij = scale Σ_d q_id k_jd 2^(b_id - b_jd) for i >= j, between and inside
// sub-chunks.
//   read q_in, k_out (tier 1) or q, k, q_local (strong chunks); write t.A [C, C]. Accumulate in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// Runs once before the two steps: transposes keys in tier 1, and clears A.
template <typename T>
inline void begin_scores(Tiles<T>& t) {
  std::memset(t.A, 0, kChunk * kChunk * sizeof(T));
  if (t.gates.in_tier1) transpose(t.k_t, kChunk, t.k_out, t.Kp, t.length(), t.K);
}

template <typename T>
inline void scores_off_diagonal(const Problem<T>& p, Tiles<T>& t) {
  const Epilogue<T> scaled{p.scale};
  for (int64_t I = 1; I < t.gates.sub_chunks(); ++I) {
    const T* q = t.q_in;
    if (!t.gates.in_tier1) {
      anchor_keys(p, t, I);
      transpose(t.k_t, kChunk, t.k_anchor, t.Kp, I * kSubChunk, t.K);
      q = t.q_local;
    }
    gemm(Left<T>{q + I * kSubChunk * t.Kp, t.Kp, 1}, t.k_t, kChunk, t.A + I * kSubChunk * kChunk,
         kChunk, t.gates.rows(I), I * kSubChunk, t.K, scaled);
  }
}

// For strong chunks: the block at sub-chunk I, element by element. A running product of decays
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
    for (int64_t i = j; i < rows; ++i)
      t.A[(first + i) * kChunk + first + j] = p.scale * sum_of_lanes<T>(sum[i]);
  }
}

template <typename T>
inline void scores_diagonal(const Problem<T>& p, Tiles<T>& t) {
  const Epilogue<T> scaled{p.scale};
  for (int64_t I = 0; I < t.gates.sub_chunks(); ++I) {
    if (t.gates.in_tier1) {
      T* block = t.A + I * kSubChunk * (kChunk + 1);
      gemm(Left<T>{t.q_in + I * kSubChunk * t.Kp, t.Kp, 1}, t.k_t + I * kSubChunk, kChunk, block,
           kChunk, t.gates.rows(I), kSubChunk, t.K, scaled);
      mask_block(block, kChunk, t.gates.rows(I));
    } else {
      scores_diagonal_exact(p, t, I);
    }
  }
}

// Both steps. A is then the operand of forward step 5 and backward step 4.
template <typename T>
inline void scores(const Problem<T>& p, Tiles<T>& t) {
  begin_scores(t);
  scores_off_diagonal(p, t);
  scores_diagonal(p, t);
  if (p.round_operands) round_to_bf16(t.A, kChunk * kChunk);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
