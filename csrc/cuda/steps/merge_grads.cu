// Backward step 7: the gradients through the states, added to those of step 6.
//
//   dq_i = dq_intra_i + scale 2^b_i (S do_i)
//   dk_j = dk_intra_j + 2^(b_C - b_j) (dS' v_j)
//   dg_t = dg_intra_t + sum_(i >= t) q_i dq_inter_i + sum_(j < t) k_j dk_inter_j
//          + 2^b_C rowsum_V(S dS'), and 0 at a reset
//
// grid    (row, chunk, head, 64 key channels)
// reads   q, k, b (b_suffix, g) [B, T, H, K], do, v [B, T, H, V], S, dS' [K, V] of the chunk, and
//         the outputs of step 6
// writes  dq, dk and, if there are gates, dg [B, T, H, K]
// Accumulation and dg are fp32; kValues values at a time.
#include "merge.cuh"

namespace gla_ext::cuda {
namespace steps {

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, 2) merge_grads(Problem p) {
  using Op = Operand<In>;
  __shared__ __align__(16) MergeShared<ProductTiles<Op>> s;
  merge_block<kAccess, In>(s, p, [&](auto& acc_q, auto& acc_k, const Chunk& chunk, int first) {
    multiply<kAccess, Op, In>(acc_q, acc_k, s.products, s.w, p, chunk, first);
  });
}

}  // namespace steps

void launch_merge_grads(const Problem& p, cudaStream_t stream) {
  with_dtype_and_access(p, [&](auto type, auto access) {
    launch(steps::merge_grads<decltype(access)::value, typename decltype(type)::type>,
           chunk_heads(p) * blocks_of(p.K, kTile), kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
