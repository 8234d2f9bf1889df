// Step 2 and backward step 3 with gates on values:
//
//   S' = 2^b_C S 2^bv_C + (k 2^(b_C - b))^T v_out
//   dS = 2^b_C dS' 2^bv_C + (scale q 2^b)^T do_in
//
// These are the sweeps of state_sweep.cuh, with decaying columns too. gate_values makes v_out and
// do_in.
#include "cuda/steps/state_sweep.cuh"

namespace gla_ext::cuda {
namespace {

template <Access kAccess, class In, Sweep kSweep, bool kCheckpoints = false>
__device__ __forceinline__ void value_gated_sweep(const Problem& p, const Problem& value_side) {
  __shared__ SweepShared<kAccess, In, kTile> shared;
  __shared__ float s_columns[kTile];
  sweep<kAccess, In, kTile, kSweep, /*kValueGated=*/true, kCheckpoints>(shared, p, blockIdx.x,
                                                                        &value_side.b, s_columns);
}

}  // namespace

namespace steps {

template <Access kAccess, class In, bool kCheckpoints>
__global__ void __launch_bounds__(kThreads, kCheckpoints ? 1 : 2)
    value_gated_states(Problem p, Problem value_side) {
  value_gated_sweep<kAccess, In, Sweep::kStates, kCheckpoints>(p, value_side);
}

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, 2)
    value_gated_state_grads(Problem p, Problem value_side) {
  value_gated_sweep<kAccess, In, Sweep::kStateGrads>(p, value_side);
}

}  // namespace steps

void launch_value_gated_states(const Problem& p, const Problem& value_side, cudaStream_t stream) {
  with_gated_access(p, value_side, [&](auto type, auto access) {
    using In = typename decltype(type)::type;
    constexpr Access kAccess = decltype(access)::value;
    launch(p.pool.checkpoint_chunks > 0 ? steps::value_gated_states<kAccess, In, true>
                                        : steps::value_gated_states<kAccess, In, false>,
           sweep_blocks<kTile>(p), kThreads, p, value_side, stream);
  });
}

void launch_value_gated_state_grads(const Problem& p, const Problem& value_side,
                                    cudaStream_t stream) {
  with_gated_access(p, value_side, [&](auto type, auto access) {
    launch(steps::value_gated_state_grads<decltype(access)::value, typename decltype(type)::type>,
           sweep_blocks<kTile>(p), kThreads, p, value_side, stream);
  });
}

}  // namespace gla_ext::cuda
