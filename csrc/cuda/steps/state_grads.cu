// Backward step 3: the gradient of the state that leaves each chunk,
// dS = 2^b_C dS' + (scale q 2^b)^T do. See state_sweep.cuh.
#include "../device/state_sweep.cuh"

namespace gla_ext::cuda {

void state_grads(const Problem& p, cudaStream_t stream) {
  launch_state_sweep<Sweep::kStateGrads>(p, stream);
}

void states_and_state_grads(const Problem& p, cudaStream_t stream) {
  with_value_tiles(p, [&](auto type, auto access, auto columns) {
    using In = typename decltype(type)::type;
    constexpr Access kAccess = decltype(access)::value;
    constexpr int kColumns = decltype(columns)::value;
    // Of other dtypes one kernel for both would spill, and no plan asks for it.
    if constexpr (std::is_same_v<In, bf16>)
      launch(both_sweeps<kAccess, In, kColumns>, 2 * sweep_blocks<kColumns>(p), kThreads, p,
             stream);
  });
}

}  // namespace gla_ext::cuda
