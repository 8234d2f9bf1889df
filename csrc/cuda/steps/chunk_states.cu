// Step 2: the state entering each chunk, S' = 2^b_C S + (k 2^(b_C - b))^T v. See state_sweep.cuh.
#include "state_sweep.cuh"

namespace gla_ext::cuda {

namespace steps {

// With kCheckpoints a thread needs more registers than two blocks a multiprocessor leave.
template <Access kAccess, class In, int kColumns, bool kCheckpoints>
__global__ void __launch_bounds__(kThreads, kCheckpoints ? 1 : 2) chunk_states(Problem p) {
  one_sweep<kAccess, In, kColumns, Sweep::kStates, kCheckpoints>(p);
}

}  // namespace steps

void launch_chunk_states(const Problem& p, cudaStream_t stream) {
  with_value_tiles(p, [&](auto type, auto access, auto columns) {
    using In = typename decltype(type)::type;
    constexpr Access kAccess = decltype(access)::value;
    constexpr int kColumns = decltype(columns)::value;
    launch(p.pool.checkpoint_chunks > 0 ? steps::chunk_states<kAccess, In, kColumns, true>
                                        : steps::chunk_states<kAccess, In, kColumns, false>,
           sweep_blocks<kColumns>(p), kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
