// Backward step 5: dA_ij = scale do_i · v_j for i >= j, else 0.
//   reads do, v; writes t.dA [C, C]. Accumulates in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
inline void score_grads(const Problem<T>& p, Tiles<T>& t) {
  std::memset(t.dA, 0, kChunk * kChunk * sizeof(T));
  transpose(t.v_t, kChunk, t.v, t.Vp, t.length(), t.V);
  const Epilogue<T> scaled{p.scale};
  for (int64_t I = 0; I < t.gates.sub_chunks(); ++I) {
    T* rows = t.dA + I * kSubChunk * kChunk;
    gemm(Left<T>{t.d_o + I * kSubChunk * t.Vp, t.Vp, 1}, t.v_t, kChunk, rows, kChunk,
         t.gates.rows(I), (I + 1) * kSubChunk, t.V, scaled);
    mask_block(rows + I * kSubChunk, kChunk, t.gates.rows(I));
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
