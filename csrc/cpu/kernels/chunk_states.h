// Forward step 2: S' = a ⊙ S + c ⊙ (k_outᵀ v), the state that leaves a chunk.
//   reads k_out, v, gates; updates t.S [K, V] in place. Accumulates in T.
#pragma once

#include "tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
inline void chunk_states(Tiles<T>& t) {
  Epilogue<T> decay;
  decay.row_alpha = t.gates.c;
  decay.row_beta = t.gates.a;
  gemm(Left<T>{t.k_out, 1, t.Kp}, t.v, t.Vp, t.S, t.Vp, t.K, t.Vp, t.length(), decay);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
