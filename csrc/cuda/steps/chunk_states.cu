// Step 2: the state entering each chunk, S' = 2^b_C S + (k 2^(b_C - b))^T v. See state_sweep.cuh.
#include "state_sweep.cuh"

namespace gla_ext::cuda {

namespace steps {

template <Access kAccess, class In, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) chunk_states(Problem p) {
  one_sweep<kAccess, In, kColumns, Sweep::kStates>(p);
}

}  // namespace steps

void launch_chunk_states(const Problem& p, cudaStream_t stream) {
  with_value_tiles(p, [&](auto type, auto access, auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    launch(steps::chunk_states<decltype(access)::value, typename decltype(type)::type, kColumns>,
           sweep_blocks<kColumns>(p), kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
