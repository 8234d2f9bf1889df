// A step with buffers, and its second kernel on a pool of fp32 states.
#include "buffered_step.cuh"

namespace gla_ext::cuda {

void recurrent_buffered_step(const Recurrence& p, const Buffers& buffers, bool overlaps,
                             cudaStream_t stream) {
  if (p.B * p.H == 0) return;
  recurrent_buffered_scores(p, buffers, stream);
  switch (p.state_dtype) {
    case DType::kBFloat16:
      return recurrent_buffered_outputs_bf16(p, buffers, overlaps, stream);
    case DType::kHalf:
      return recurrent_buffered_outputs_fp16(p, buffers, overlaps, stream);
    case DType::kFloat:
      return recurrent::launch_buffered_outputs<float>(p, buffers, overlaps, stream);
  }
}

}  // namespace gla_ext::cuda
