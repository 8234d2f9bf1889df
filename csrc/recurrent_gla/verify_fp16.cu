// Verification of drafts on a pool of fp16 states.
#include "verify.cuh"

namespace gla_ext::cuda {

void recurrent_verify_fp16(const Recurrence& p, int multiprocessors, cudaStream_t stream) {
  recurrent::launch_verify<half>(p, multiprocessors, stream);
}

}  // namespace gla_ext::cuda
