// Forward on fp32 states, and the choice among the state types of a pool.
#include "forward.cuh"

namespace gla_ext::cuda {

void recurrent_forward(const Recurrence& p, cudaStream_t stream) {
  if (count_runs(p) == 0) return;
  switch (p.state_dtype) {
    case DType::kBFloat16:
      return recurrent_forward_bf16(p, stream);
    case DType::kHalf:
      return recurrent_forward_fp16(p, stream);
    case DType::kFloat:
      return recurrent::launch_forward<float>(p, stream);
  }
}

}  // namespace gla_ext::cuda
