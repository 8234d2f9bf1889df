// Backward step 3: dS = a ⊙ dS' + s_in ⊙ (scale q_inᵀ do_in), the gradient of the state that enters
// a chunk. With gates on values, both terms are also multiplied by factors of the columns.
//   reads q_in, do_in, gates; updates t.dS [K, V] in place. Accumulates in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
inline void state_grads(const Problem<T>& p, Tiles<T>& t) {
  const Vec<T> scale(p.scale);
  map<T>(t.Kp, [&](Vec<T> s) { return s * scale; }, t.row_scale, t.gates.s_in);
  Epilogue<T> decay;
  decay.row_alpha = t.row_scale;
  decay.row_beta = t.gates.a;
  const Gates<T>& v = t.values.gates;
  if (t.value_gated) scale_columns(t, t.dS, v.in_tier1() ? v.c : v.a);
  gemm(Left<T>{t.q_in, 1, t.Kp}, t.do_in, t.Vp, t.dS, t.Vp, t.K, t.Vp, t.length(), decay);
  if (t.value_gated && v.in_tier1()) scale_columns(t, t.dS, v.s_in);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
