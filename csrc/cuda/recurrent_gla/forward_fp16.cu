// Forward on a pool of states in fp16.
#include "forward.cuh"

namespace gla_ext::cuda {

void recurrent_forward_fp16(const Recurrence& p, cudaStream_t stream) {
  recurrent::launch_forward<half>(p, stream);
}

}  // namespace gla_ext::cuda
