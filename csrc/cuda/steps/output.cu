// Forward step 5: o = A v + (scale q 2^b) S. See chunk_product.cuh.
#include "chunk_product.cuh"

namespace gla_ext::cuda {

namespace steps {

template <Access kAccess, class In, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) output(Problem p) {
  chunk_product<kAccess, In, kColumns, Values::kOutput>(p);
}

}  // namespace steps

void launch_output(const Problem& p, cudaStream_t stream) {
  with_value_tiles(p, [&](auto type, auto access, auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    launch(steps::output<decltype(access)::value, typename decltype(type)::type, kColumns>,
           chunk_heads(p) * blocks_of(p.V, kColumns), kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
