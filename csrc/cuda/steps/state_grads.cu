// Backward step 3: the gradient of the state that leaves each chunk,
// dS = 2^b_C dS' + (scale q 2^b)^T do. See state_sweep.cuh.
#include "state_sweep.cuh"

namespace gla_ext::cuda {

namespace steps {

template <Access kAccess, class In, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) state_grads(Problem p) {
  one_sweep<kAccess, In, kColumns, Sweep::kStateGrads>(p);
}

// Both sweeps in one launch, side by side: neither needs the other's results.
template <Access kAccess, class In, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) states_and_state_grads(Problem p) {
  __shared__ SweepShared<kAccess, In, kColumns> shared;
  const int64_t blocks = sweep_blocks<kColumns>(p);
  if (blockIdx.x < blocks)
    sweep<kAccess, In, kColumns, Sweep::kStates>(shared, p, blockIdx.x);
  else
    sweep<kAccess, In, kColumns, Sweep::kStateGrads>(shared, p, blockIdx.x - blocks);
}

}  // namespace steps

void launch_state_grads(const Problem& p, cudaStream_t stream) {
  with_value_tiles(p, [&](auto type, auto access, auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    launch(steps::state_grads<decltype(access)::value, typename decltype(type)::type, kColumns>,
           sweep_blocks<kColumns>(p), kThreads, p, stream);
  });
}

void launch_states_and_state_grads(const Problem& p, cudaStream_t stream) {
  with_value_tiles(p, [&](auto type, auto access, auto columns) {
    using In = typename decltype(type)::type;
    constexpr Access kAccess = decltype(access)::value;
    constexpr int kColumns = decltype(columns)::value;
    // For other dtypes a kernel with both sweeps would spill, and no plan has it.
    if constexpr (std::is_same_v<In, bf16>)
      launch(steps::states_and_state_grads<kAccess, In, kColumns>, 2 * sweep_blocks<kColumns>(p),
             kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
