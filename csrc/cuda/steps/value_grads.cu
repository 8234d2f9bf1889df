// Backward step 4: dv = A^T do + (k 2^(b_C - b)) dS'. See chunk_product.cuh.
#include "chunk_product.cuh"

namespace gla_ext::cuda {

namespace steps {

template <Access kAccess, class In, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) value_grads(Problem p) {
  chunk_product<kAccess, In, kColumns, Values::kGrads>(p);
}

}  // namespace steps

void launch_value_grads(const Problem& p, cudaStream_t stream) {
  with_value_tiles(p, [&](auto type, auto access, auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    launch(steps::value_grads<decltype(access)::value, typename decltype(type)::type, kColumns>,
           chunk_heads(p) * blocks_of(p.V, kColumns), kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
