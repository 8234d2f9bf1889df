// Backward step 7: the parts of dq, dk and dg that pass through the states.
//
//   dq_i += scale 2^b_i (S do_i)
//   dk_j += 2^(b_C - b_j) (dS' v_j)
//   dg_t  = Σ_{i>=t} db_i + Σ_{j<t} k_j ⊙ dk_j^inter + 2^b_C ⊙ rowsum_V(S ⊙ dS')
//
// with db_i from step 6 and q_i ⊙ dq_i^inter. No two terms of dg cancel between chunks. At a reset
// dg is 0, by select.
//   reads q_in, k_out, v_out, do_in, t.S_in, t.dS_in; updates t.dq, t.dk [C, K]; t.dg [C, K] holds
//   db, then dg, where there are gates. Accumulates in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// t.total[K] = 2^b_C ⊙ rowsum_V(S ⊙ 2^bv_C ⊙ dS'). In tier 1 the two operands together already
// carry 2^b_C, and 2^bv_C of gates on values.
template <typename T>
inline void state_products(Tiles<T>& t) {
  fill(t.total, t.Kp, T(0));
  const T* columns = t.value_gated && !t.values.gates.in_tier1() ? t.values.gates.a : nullptr;
  for (int64_t i = 0; i < t.K; ++i) {
    Vec<T> sum(T(0));
    for (int64_t j = 0; j < t.Vp; j += Vec<T>::size()) {
      Vec<T> S = Vec<T>::loadu(t.S_in + i * t.Vp + j);
      if (columns != nullptr) S = S * Vec<T>::loadu(columns + j);
      sum = at::vec::fmadd(S, Vec<T>::loadu(t.dS_in + i * t.Vp + j), sum);
    }
    const T row = sum_of_lanes<T>(sum);
    t.total[i] = t.gates.in_tier1() ? row : t.gates.a[i] * row;
  }
}

// t.dg[L, K]: db per token in, dg out; t.R[L, K] = k_out ⊙ (v dS~ᵀ).
template <typename T>
inline void gate_grads(Tiles<T>& t) {
  const int64_t ld = t.Kp;
  const Vec<T> zero(T(0)), reset(kResetGate<T>);
  for (int64_t d = 0; d < ld; d += Vec<T>::size()) {
    Vec<T> carried = Vec<T>::loadu(t.total + d), later(T(0));
    for (int64_t i = 0; i < t.length(); ++i) {  // R becomes total + Σ_{j<i} R_j
      T* r = t.R + i * ld + d;
      const Vec<T> next = carried + Vec<T>::loadu(r);
      carried.store(r);
      carried = next;
    }
    for (int64_t i = t.length() - 1; i >= 0; --i) {
      later = later + Vec<T>::loadu(t.dg + i * ld + d);
      const Vec<T> dg = later + Vec<T>::loadu(t.R + i * ld + d);
      const Vec<T> x = Vec<T>::loadu(t.gates.x + i * ld + d);
      Vec<T>::blendv(dg, zero, x <= reset).store(t.dg + i * ld + d);
    }
  }
}

template <typename T>
inline void merge_grads(const Problem<T>& p, Tiles<T>& t) {
  const Gates<T>& g = t.gates;
  transpose(t.state_t, t.Kp, t.S_in, t.Vp, t.K, t.V);
  gemm(Left<T>{t.do_in, t.Vp, 1}, t.state_t, t.Kp, t.P, t.Kp, t.length(), t.Kp, t.V,
       Epilogue<T>{p.scale});
  map<T>(g.size(), AddProduct(), t.dq, g.eq, t.P, t.dq);
  if (!g.absent) map<T>(g.size(), AddProduct(), t.dg, t.q_in, t.P, t.dg);
  transpose(t.state_t, t.Kp, t.dS_in, t.Vp, t.K, t.V);
  gemm(Left<T>{t.v_out, t.Vp, 1}, t.state_t, t.Kp, t.R, t.Kp, t.length(), t.Kp, t.V);
  map<T>(g.size(), AddProduct(), t.dk, g.ek, t.R, t.dk);
  if (g.absent) return;
  map<T>(g.size(), Times(), t.R, t.k_out, t.R);
  state_products(t);
  gate_grads(t);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
