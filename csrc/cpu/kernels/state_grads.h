// Backward step 3: dS = a ⊙ dS' + s_in ⊙ (scale q_inᵀ do), the gradient of the state that enters a
// chunk.
//   reads q_in, do, gates; updates t.dS [K, V] in place. Accumulates in T.
#pragma once

#include "tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
inline void state_grads(const Problem<T>& p, Tiles<T>& t) {
  const Vec<T> scale(p.scale);
  map<T>(t.Kp, [&](Vec<T> s) { return s * scale; }, t.row_scale, t.gates.s_in);
  Epilogue<T> decay;
  decay.row_alpha = t.row_scale;
  decay.row_beta = t.gates.a;
  gemm(Left<T>{t.q_in, 1, t.Kp}, t.d_o, t.Vp, t.dS, t.Vp, t.K, t.Vp, t.length(), decay);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
