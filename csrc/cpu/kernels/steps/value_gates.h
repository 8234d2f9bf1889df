// The steps that gates on values change: a pair of tokens also decays by 2^(bv_i - bv_j) in every
// value channel.
//
//   o_i   = 2^bv_i ⊙ scale (q_i 2^b_i)ᵀ S + Σ_{j<=i} A_ij v_j 2^(bv_i - bv_j)
//   dA_ij = scale Σ_v do_iv v_jv 2^(bv_i - bv_j)
//   dv_j  = Σ_{i>=j} A_ij do_i 2^(bv_i - bv_j) + 2^(bv_C - bv_j) ⊙ (k_j 2^(b_C - b_j))ᵀ dS'
//   dgv_t = Σ_{i>=t} dbv_i + Σ_{j<t} v_j ⊙ dv_j^inter + 2^bv_C ⊙ colsum_K(2^b_C ⊙ S ⊙ dS')
//
// Values are to A what keys are to dA. With do in place of q, v of k, A of dA, and the gates on
// values, the scores are dA, and step 6 gives o inside the chunk, dv and each token's part of dbv.
//   reads what output, score_grads, value_grads and merge_grads read; writes t.o (o, then dv),
//   t.dA, t.values.dgv. Accumulates in T.
#pragma once

#include "intra_grads.h"
#include "merge_grads.h"
#include "output.h"
#include "scores.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// The tiles of the value side. Tiles of states stay as they are, [K, Vp].
template <typename T>
inline Tiles<T> values_side(const Tiles<T>& t) {
  Tiles<T> s = t;
  s.K = t.V, s.V = t.K, s.Kp = t.Vp, s.Vp = t.Kp;
  s.gates = t.values.gates;
  s.q = t.d_o, s.k = t.v;
  s.q_in = t.do_in, s.k_out = t.v_out, s.q_local = t.values.do_local;
  s.anchor = t.values.anchor, s.k_anchor = t.values.v_anchor, s.k_t = t.v_t;
  s.A = t.dA, s.dA = t.A;
  s.dq = t.values.o_intra, s.dk = t.o, s.dg = t.values.dgv;
  s.P = t.values.P, s.R = t.values.R, s.total = t.values.total;
  return s;
}

// For strong rows: o of row block I from the tokens of I. A running product carries v_j down.
template <typename T>
inline void diagonal_output(const Tiles<T>& t, int64_t I) {
  const Gates<T>& g = t.values.gates;
  const int64_t ld = t.Vp, first = I * kSubChunk, end = first + g.rows(I);
  const int64_t strong = first + g.tier1_rows_of(I);
  for (int64_t d = 0; d < ld; d += Vec<T>::size()) {
    for (int64_t j = first; j < end; ++j) {
      Vec<T> carried = Vec<T>::loadu(t.v + j * ld + d);
      for (int64_t i = j; i < end; ++i) {
        if (i > j) carried = carried * Vec<T>::loadu(g.alpha + i * ld + d);
        if (i < strong) continue;
        T* o = t.o + i * ld + d;
        at::vec::fmadd(Vec<T>(t.A[i * kChunk + j]), carried, Vec<T>::loadu(o)).store(o);
      }
    }
  }
}

// Forward step 5.
template <typename T>
inline void gated_output(const Problem<T>& p, Tiles<T>& t) {
  const Gates<T>& g = t.values.gates;
  const int64_t ld = t.Vp;
  Tiles<T> s = values_side(t);
  output_of_rows(p, t, tier1_keys(p, s), g.tier1_rows);
  map<T>(g.size(), Times(), t.o, t.o, g.eq);
  for (int64_t I = 0; I < g.sub_chunks(); ++I) {
    const int64_t tier1 = g.tier1_rows_of(I), rows = g.rows(I) - tier1;
    if (rows == 0) continue;
    if (I > 0) {
      const int64_t before = I * kSubChunk, first = before + tier1;
      anchor_keys(p, s, I);
      gemm(Left<T>{t.A + first * kChunk, kChunk, 1}, s.k_anchor, ld, s.P, ld, rows, ld, before);
      T* o = t.o + first * ld;
      map<T>(rows * ld, AddProduct(), o, g.eq_local + first * ld, s.P, o);
    }
    diagonal_output(t, I);
  }
}

// Backward step 5.
template <typename T>
inline void gated_score_grads(const Problem<T>& p, const Tiles<T>& t) {
  Tiles<T> s = values_side(t);
  begin_scores(p, s);
  scores_off_diagonal(p, s);
  scores_diagonal(p, s);
}

// total[V] = 2^bv_C ⊙ colsum_K(2^b_C ⊙ S ⊙ dS'). In tier 1 the operands carry both factors.
template <typename T>
inline void value_state_products(const Tiles<T>& t, T* total) {
  const Gates<T>& g = t.values.gates;
  for (int64_t j = 0; j < t.Vp; j += Vec<T>::size()) {
    Vec<T> sum(T(0));
    for (int64_t i = 0; i < t.K; ++i) {
      const Vec<T> a(t.gates.in_tier1() ? T(1) : t.gates.a[i]);
      sum = at::vec::fmadd(a * Vec<T>::loadu(t.S_in + i * t.Vp + j),
                           Vec<T>::loadu(t.dS_in + i * t.Vp + j), sum);
    }
    if (!g.in_tier1()) sum = sum * Vec<T>::loadu(g.a + j);
    sum.store(total + j);
  }
}

// Backward step 4, and dgv, which is made as steps 6 and 7 make dg.
template <typename T>
inline void gated_value_grads(const Problem<T>& p, const Tiles<T>& t) {
  Tiles<T> s = values_side(t);
  const Gates<T>& g = s.gates;
  const int64_t ld = t.Vp;
  intra_grads(p, s);
  gemm(Left<T>{t.q_in, t.Kp, 1}, t.S_in, ld, s.P, ld, t.length(), ld, t.K, Epilogue<T>{p.scale});
  map<T>(g.size(), AddProduct(), s.dg, s.q_in, s.P, s.dg);
  gemm(Left<T>{t.k_out, t.Kp, 1}, t.dS_in, ld, s.R, ld, t.length(), ld, t.K);
  map<T>(g.size(), AddProduct(), s.dk, g.ek, s.R, s.dk);
  map<T>(g.size(), Times(), s.R, s.k_out, s.R);
  value_state_products(t, s.total);
  gate_grads(s);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
