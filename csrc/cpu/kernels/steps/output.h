// Forward step 5: o_i = scale (q_i 2^b_i)ᵀ S + Σ_{j<=i} A_ij v_j = scale q_in S~ + A v_out.
//   reads q_in, v_out, t.A, t.S_in (S~); writes t.o [C, V]. Accumulates in T.
#pragma once

#include "cpu/kernels/tiles.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

// o = scale q_in S~, and o += A v of the first `rows` tokens.
template <typename T>
inline void output_of_rows(const Problem<T>& p, Tiles<T>& t, const T* v, int64_t rows) {
  gemm(Left<T>{t.q_in, t.Kp, 1}, t.S_in, t.Vp, t.o, t.Vp, t.length(), t.Vp, t.K,
       Epilogue<T>{p.scale});
  const Epilogue<T> add{1, 1};
  for (int64_t first = 0; first < rows; first += kSubChunk) {
    const int64_t n = std::min(rows - first, kSubChunk);
    gemm(Left<T>{t.A + first * kChunk, kChunk, 1}, v, t.Vp, t.o + first * t.Vp, t.Vp, n, t.Vp,
         first + n, add);
  }
}

template <typename T>
inline void output(const Problem<T>& p, Tiles<T>& t) {
  output_of_rows(p, t, t.v_out, t.length());
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
