// Backward step 5: dA = tril(scale do v^T).
//
// grid    (row, chunk, head), or as for_exact_chunks wants it for chunks outside tier 1 alone
// reads   do, v [B, T, H, V]; tiers for those alone
// writes  dA [B, T, H, C], zero above the diagonal
// Accumulation is fp32, 64 values at a time.
#include "../device/launch.cuh"
#include "../device/scores.cuh"

namespace gla_ext::cuda {
namespace {

template <class Op>
struct ScoreGradTiles {
  Op d_o[kTile * kPitch<Op, kTile>], v[kTile * kPitch<Op, kTile>];  // [token][V]
};

// A whole chunk.
template <Access kAccess, class In>
__device__ __forceinline__ void score_grads_of(ScoreGradTiles<Operand<In>>& s, const Problem& p,
                                               const Chunk& chunk) {
  using Op = Operand<In>;
  constexpr int kPitchX = kPitch<Op, kTile>;
  const WarpTile<kTile> warp;
  float acc[2][2][4];  // [token, token]
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
    if (first > 0) __syncthreads();  // the tiles of the product before are read
    r_do.store(s.d_o, takes_tf32<In>(p));
    r_v.store(s.v, takes_tf32<In>(p));
    if (first + kTile < p.V) load(first + kTile);
    __syncthreads();  // the tiles are written
    product<Stored::kAsIs, Stored::kTransposed, kPitchX, kPitchX>(
        acc, s.d_o + warp.m * kPitchX, s.v + warp.n * kPitchX, kTile, takes_tf32<In>(p));
  }
  store_scores<kAccess, Op>(p.dA, chunk, acc, p.scale,
                            [](int row, int column) { return column <= row; });
}

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, sizeof(Operand<In>) == 2 ? 3 : 2)
    score_grads_kernel(Problem p) {
  __shared__ __align__(16) ScoreGradTiles<Operand<In>> s_tiles;
  const Chunk chunk = find_chunk(p, blockIdx.x);
  if (chunk.length == 0) return;
  if (chunk.tail) return write_zeros<kThreads>(p.dA, chunk, 0, kChunk);
  score_grads_of<kAccess, In>(s_tiles, p, chunk);
}

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, sizeof(Operand<In>) == 2 ? 3 : 2)
    score_grads_exact_kernel(Problem p) {
  __shared__ __align__(16) ScoreGradTiles<Operand<In>> s_tiles;
  for_exact_chunks(
      p, 1, [&](const Chunk& chunk, int) { score_grads_of<kAccess, In>(s_tiles, p, chunk); });
}

}  // namespace

void score_grads(const Problem& p, cudaStream_t stream) {
  with_dtype_and_access(p, [&](auto type, auto access) {
    launch(score_grads_kernel<decltype(access)::value, typename decltype(type)::type>,
           chunk_heads(p), kThreads, p, stream);
  });
}

void score_grads_exact(const Problem& p, cudaStream_t stream) {
  with_dtype_and_access(p, [&](auto type, auto access) {
    launch(score_grads_exact_kernel<decltype(access)::value, typename decltype(type)::type>,
           exact_grid(p, 1), kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
