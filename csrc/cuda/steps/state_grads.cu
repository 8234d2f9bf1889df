// Backward step 3: the gradient of the state that leaves each chunk,
// dS = 2^b_C dS' + (scale q 2^b)^T do. See state_sweep.cuh.
#include "../device/state_sweep.cuh"

namespace gla_ext::cuda {

void state_grads(const Problem& p, cudaStream_t stream) {
  launch_state_sweep<Sweep::kStateGrads>(p, stream);
}

}  // namespace gla_ext::cuda
