// Backward step 5: dA = tril(scale do v^T).
//
// grid    (row, chunk, head)
// reads   do, v [B, T, H, V]
// writes  dA [B, T, H, C], zero above the diagonal
// Accumulation is fp32, 64 values at a time.
#include "cuda/device/launch.cuh"
#include "scores.cuh"

namespace gla_ext::cuda {
namespace steps {

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, sizeof(Operand<In>) == 2 ? 3 : 2)
    score_grads(Problem p) {
  using Op = Operand<In>;
  __shared__ __align__(16) ScoreGradTiles<Op> s_tiles;
  const Chunk chunk = find_chunk(p, blockIdx.x);
  if (chunk.length == 0) return;
  if (chunk.tail) return write_zeros<kThreads>(p.dA, chunk, 0, kChunk);
  float acc[2][2][4];  // [token, token]
  multiply_values<kAccess, In>(acc, s_tiles, p, chunk);
  store_scores<kAccess, Op>(p.dA, chunk, acc, p.scale,
                            [](int row, int column) { return column <= row; });
}

}  // namespace steps

void launch_score_grads(const Problem& p, cudaStream_t stream) {
  with_dtype_and_access(p, [&](auto type, auto access) {
    launch(steps::score_grads<decltype(access)::value, typename decltype(type)::type>,
           chunk_heads(p), kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
