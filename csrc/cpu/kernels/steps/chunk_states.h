// Forward step 2: S' = a ⊙ S + c ⊙ (k_outᵀ v_out), the state that leaves a chunk. With gates on
// values, both terms are also multiplied by factors of the columns.
//   reads k_out, v_out, gates; updates t.S [K, V] in place. Accumulates in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
inline void chunk_states(Tiles<T>& t) {
  Epilogue<T> decay;
  decay.row_alpha = t.gates.c;
  decay.row_beta = t.gates.a;
  const Gates<T>& v = t.values.gates;
  if (t.value_gated) scale_columns(t, t.S, v.in_tier1() ? v.s_in : v.a);
  gemm(Left<T>{t.k_out, 1, t.Kp}, t.v_out, t.Vp, t.S, t.Vp, t.K, t.Vp, t.length(), decay);
  if (t.value_gated && v.in_tier1()) scale_columns(t, t.S, v.c);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
