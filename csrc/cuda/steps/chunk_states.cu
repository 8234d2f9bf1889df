// Step 2: the state entering each chunk, S' = 2^b_C S + (k 2^(b_C - b))^T v. See state_sweep.cuh.
#include "../device/state_sweep.cuh"

namespace gla_ext::cuda {

void chunk_states(const Problem& p, cudaStream_t stream) {
  launch_state_sweep<Sweep::kStates>(p, stream);
}

}  // namespace gla_ext::cuda
