// The second kernel of a step with buffers on a pool of fp16 states.
#include "buffered_step.cuh"

namespace gla_ext::cuda {

void recurrent_buffered_outputs_fp16(const Recurrence& p, const Buffers& buffers, bool overlaps,
                                     cudaStream_t stream) {
  recurrent::launch_buffered_outputs<half>(p, buffers, overlaps, stream);
}

}  // namespace gla_ext::cuda
