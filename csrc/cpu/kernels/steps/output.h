// Forward step 5: o_i = scale (q_i 2^b_i)ᵀ S + Σ_{j<=i} A_ij v_j = scale q_in S~ + A v_out.
//   reads q_in, v_out, t.A, t.S_in (S~); writes t.o [C, V]. Accumulates in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
inline void output(const Problem<T>& p, Tiles<T>& t) {
  gemm(Left<T>{t.q_in, t.Kp, 1}, t.S_in, t.Vp, t.o, t.Vp, t.length(), t.Vp, t.K,
       Epilogue<T>{p.scale});
  const Epilogue<T> add{1, 1};
  for (int64_t I = 0; I < t.gates.sub_chunks(); ++I)
    gemm(Left<T>{t.A + I * kSubChunk * kChunk, kChunk, 1}, t.v_out, t.Vp,
         t.o + I * kSubChunk * t.Vp, t.Vp, t.gates.rows(I), t.Vp, I * kSubChunk + t.gates.rows(I),
         add);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
