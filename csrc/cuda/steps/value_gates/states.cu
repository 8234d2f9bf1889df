// Step 2 and backward step 3 with gates on values:
//
//   S' = 2^b_C S 2^bv_C + (k 2^(b_C - b))^T v_out        dS = 2^b_C dS' 2^bv_C + (scale q 2^b)^T
//   do_in
//
// The sweeps of state_sweep.cuh, whose columns decay too. v_out and do_in come from value_operands.
#include "../device/state_sweep.cuh"

namespace gla_ext::cuda {
namespace {

template <Access kAccess, class In, Sweep kSweep>
__global__ void __launch_bounds__(kThreads, 2) value_gated_sweep(Problem p, Problem values) {
  __shared__ SweepShared<kAccess, In, kTile> shared;
  __shared__ float s_columns[kTile];
  sweep<kAccess, In, kTile, kSweep, /*kValueGated=*/true>(shared, p, blockIdx.x, &values.b,
                                                          s_columns);
}

template <Sweep kSweep>
void launch_sweep(const Problem& p, const Problem& values, cudaStream_t stream) {
  with_gated_access(p, values, [&](auto type, auto access) {
    launch(value_gated_sweep<decltype(access)::value, typename decltype(type)::type, kSweep>,
           sweep_blocks<kTile>(p), kThreads, p, values, stream);
  });
}

}  // namespace

void value_gated_states(const Problem& p, const Problem& values, cudaStream_t stream) {
  launch_sweep<Sweep::kStates>(p, values, stream);
}

void value_gated_state_grads(const Problem& p, const Problem& values, cudaStream_t stream) {
  launch_sweep<Sweep::kStateGrads>(p, values, stream);
}

}  // namespace gla_ext::cuda
