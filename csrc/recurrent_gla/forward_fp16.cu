// Forward on a pool of fp16 states.
#include "short_step.cuh"

namespace gla_ext::cuda {

void recurrent_forward_fp16(const Recurrence& p, cudaStream_t stream) {
  recurrent::launch_on_short_states<half>(p, stream);
}

}  // namespace gla_ext::cuda
