// Forward on a pool of bf16 states.
#include "short_step.cuh"

namespace gla_ext::cuda {

void recurrent_forward_bf16(const Recurrence& p, cudaStream_t stream) {
  recurrent::launch_on_short_states<bf16>(p, stream);
}

}  // namespace gla_ext::cuda
