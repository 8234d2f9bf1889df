// Backward step 4: dv_j = Σ_{i>=j} A_ij do_i + (k_j 2^(b_C - b_j))ᵀ dS' = Aᵀ do + k_out dS~.
//   reads t.A, do, k_out, t.dS_in (dS~); writes t.o [C, V]. Accumulates in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
inline void value_grads(Tiles<T>& t) {
  gemm(Left<T>{t.k_out, t.Kp, 1}, t.dS_in, t.Vp, t.o, t.Vp, t.length(), t.Vp, t.K);
  const Epilogue<T> add{1, 1};
  for (int64_t J = 0; J < t.gates.sub_chunks(); ++J) {
    const int64_t first = J * kSubChunk;
    gemm(Left<T>{t.A + first * kChunk + first, 1, kChunk}, t.d_o + first * t.Vp, t.Vp,
         t.o + first * t.Vp, t.Vp, t.gates.rows(J), t.Vp, t.length() - first, add);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
