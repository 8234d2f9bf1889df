// Verification of drafts on a pool of bf16 states.
#include "verify.cuh"

namespace gla_ext::cuda {

void recurrent_verify_bf16(const Recurrence& p, int multiprocessors, cudaStream_t stream) {
  recurrent::launch_verify<bf16>(p, multiprocessors, stream);
}

}  // namespace gla_ext::cuda
