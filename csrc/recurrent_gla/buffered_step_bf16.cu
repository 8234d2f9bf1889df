// The second kernel of a step with buffers on a pool of bf16 states.
#include "buffered_step.cuh"

namespace gla_ext::cuda {

void recurrent_buffered_outputs_bf16(const Recurrence& p, const Buffers& buffers, bool overlaps,
                                     cudaStream_t stream) {
  recurrent::launch_buffered_outputs<bf16>(p, buffers, overlaps, stream);
}

}  // namespace gla_ext::cuda
