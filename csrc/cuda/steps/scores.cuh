// A chunk's 64 x 64 scores and their gradients: the products, and storing the results.
#pragma once

#include "cuda/device/gates.cuh"

namespace gla_ext::cuda {

// Stores scale * acc where keep(row, column) holds, else 0, to the rows of A or dA.
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

template <class Op>
struct ScoreGradTiles {
  Op d_o[kTile * kPitch<Op, kTile>], v[kTile * kPitch<Op, kTile>];  // [token][V]
};

// acc = do v^T
template <Access kAccess, class In>
__device__ __forceinline__ void multiply_values(float (&acc)[2][2][4],
                                                ScoreGradTiles<Operand<In>>& s, const Problem& p,
                                                const Chunk& chunk) {
  constexpr int kPitchX = kPitch<Operand<In>, kTile>;
  const WarpTile<kTile> warp;
  clear(acc);
  const In* d_o = rows_at<const In>(p.d_o, chunk);
  const In* v = rows_at<const In>(p.v, chunk);
  TileRows<kAccess, In, kTile> r_do, r_v;
  const auto load = [&](int first) {
    r_do.load(d_o, p.d_o, chunk.length, first, p.V);
    r_v.load(v, p.v, chunk.length, first, p.V);
  };
  load(0);
  for (int first = 0; first < p.V; first += kTile) {
    if (first > 0) __syncthreads();  // the tiles of the previous product are read
    r_do.store(s.d_o, takes_tf32<In>(p));
    r_v.store(s.v, takes_tf32<In>(p));
    if (first + kTile < p.V) load(first + kTile);
    __syncthreads();  // the tiles are written
    product<Stored::kAsIs, Stored::kTransposed, kPitchX, kPitchX>(
        acc, s.d_o + warp.m * kPitchX, s.v + warp.n * kPitchX, kTile, takes_tf32<In>(p));
  }
}

}  // namespace gla_ext::cuda
