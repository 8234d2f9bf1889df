// Backward step 6, inside a chunk:
//
//   dq_i = Σ_{j<=i} dA_ij k_j 2^(b_i - b_j)
//   dk_j = Σ_{i>=j} dA_ij q_i 2^(b_i - b_j)
//
// and each token's contribution to db. A pair (i, j) adds the same number with + at i and with - at
// j, computed from the operands that were multiplied. So terms that must cancel do so up to the
// rounding of T, whatever the operands were rounded to.
//   reads q, k, q_in, k_out or q_local, t.dA; writes t.dq, t.dk and t.dg (db a token) [C, K].
//   Accumulates in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// Tier 1: P = dA k^, R = dAᵀ q^; dq = eq ⊙ P, dk = ek ⊙ R, db = q^ ⊙ P - k^ ⊙ R.
template <typename T>
inline void intra_grads_tier1(Tiles<T>& t) {
  const Gates<T>& g = t.gates;
  for (int64_t I = 0; I < g.sub_chunks(); ++I) {
    const int64_t first = I * kSubChunk, rows = g.rows(I);
    gemm(Left<T>{t.dA_operand + first * kChunk, kChunk, 1}, t.k_out, t.Kp, t.P + first * t.Kp, t.Kp,
         rows, t.Kp, first + rows);
    gemm(Left<T>{t.dA_operand + first * kChunk + first, 1, kChunk}, t.q_in + first * t.Kp, t.Kp,
         t.R + first * t.Kp, t.Kp, rows, t.Kp, t.length() - first);
  }
  map<T>(g.size(), Times(), t.dq, g.eq, t.P);
  map<T>(g.size(), Times(), t.dk, g.ek, t.R);
  if (g.absent) return;
  map<T>(
      g.size(), [](Vec<T> q, Vec<T> P, Vec<T> k, Vec<T> R) { return q * P - k * R; }, t.dg, t.q_in,
      t.P, t.k_out, t.R);
}

// For strong chunks: row block I with the sub-chunks before it.
template <typename T>
inline void intra_grads_off_diagonal(const Problem<T>& p, Tiles<T>& t, int64_t I) {
  const Gates<T>& g = t.gates;
  const int64_t ld = t.Kp, first = I * kSubChunk, rows = g.rows(I);
  anchor_keys(p, t, I);
  gemm(Left<T>{t.dA_operand + first * kChunk, kChunk, 1}, t.k_anchor, ld, t.P, ld, rows, ld, first);
  T *dq = t.dq + first * ld, *dg = t.dg + first * ld;
  map<T>(rows * ld, AddProduct(), dq, g.eq_local + first * ld, t.P, dq);
  map<T>(rows * ld, AddProduct(), dg, t.q_local + first * ld, t.P, dg);
  gemm(Left<T>{t.dA_operand + first * kChunk, 1, kChunk}, t.q_local + first * ld, ld, t.R, ld,
       first, ld, rows);
  map<T>(first * ld, AddProduct(), t.dk, t.anchor, t.R, t.dk);
  map<T>(
      first * ld, [](Vec<T> k, Vec<T> R, Vec<T> sum) { return sum - k * R; }, t.dg, t.k_anchor, t.R,
      t.dg);
}

// For strong chunks: the block at sub-chunk I. `decay` runs down the tokens from j. The pair (j, j)
// adds nothing to db.
template <typename T>
inline void intra_grads_diagonal(Tiles<T>& t, int64_t I) {
  const int64_t ld = t.Kp, first = I * kSubChunk, end = first + t.gates.rows(I);
  const auto at = [&](T* tile, int64_t i, int64_t d) { return tile + i * ld + d; };
  const auto add = [](T* to, Vec<T> x) { (Vec<T>::loadu(to) + x).store(to); };
  for (int64_t d = 0; d < ld; d += Vec<T>::size()) {
    for (int64_t j = first; j < end; ++j) {
      const Vec<T> k = Vec<T>::loadu(at(t.k, j, d));
      Vec<T> decay(T(1)), dk(T(0)), db(T(0));
      for (int64_t i = j; i < end; ++i) {
        if (i > j) decay = decay * Vec<T>::loadu(at(t.gates.alpha, i, d));
        const Vec<T> weight = Vec<T>(t.dA[i * kChunk + j]) * decay,
                     q = Vec<T>::loadu(at(t.q, i, d));
        add(at(t.dq, i, d), weight * k);
        dk = dk + weight * q;
        if (i > j) {
          const Vec<T> pair = weight * q * k;
          add(at(t.dg, i, d), pair);
          db = db - pair;
        }
      }
      add(at(t.dk, j, d), dk);
      add(at(t.dg, j, d), db);
    }
  }
}

template <typename T>
inline void intra_grads(const Problem<T>& p, Tiles<T>& t) {
  std::memcpy(t.dA_operand, t.dA, kChunk * kChunk * sizeof(T));
  if (p.round_operands) round_to_bf16(t.dA_operand, kChunk * kChunk);
  if (t.gates.in_tier1()) return intra_grads_tier1(t);
  for (T* tile : {t.dq, t.dk, t.dg}) std::memset(tile, 0, t.gates.size() * sizeof(T));
  for (int64_t I = 0; I < t.gates.sub_chunks(); ++I) {
    if (I > 0) intra_grads_off_diagonal(p, t, I);
    intra_grads_diagonal(t, I);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
