// Writing a chunk's 64 x 64 scores.
#pragma once

#include "gates.cuh"

namespace gla_ext::cuda {

// scale acc where keep(row, column), else 0, into the rows of A or dA.
template <Access kAccess, class Op, class Keep>
__device__ __forceinline__ void store_scores(const Rows& out, const Chunk& chunk,
                                             const float (&acc)[2][2][4], float scale,
                                             Keep&& keep) {
  const WarpTile<kTile> warp;
  const int64_t base = offset_at(out, chunk);
  for_pairs(acc, [&](int r, int c, float x0, float x1) {
    const int row = warp.m + r, column = warp.n + c;
    if (row >= chunk.length) return;
    x0 = keep(row, column) ? scale * x0 : 0.f;
    x1 = keep(row, column + 1) ? scale * x1 : 0.f;
    store2_operands<kAccess, Op>(out.data, out.dtype, base + token_offset(out, row) + column, x0,
                                 x1, 2);
  });
}

}  // namespace gla_ext::cuda
