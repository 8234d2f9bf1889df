// linear_residual and norm_gate_linear_residual: linear maps that are added to a residual.
#include "cluster.cuh"

namespace gla_ext::cuda {

void decode_linear_residual(const DecodeLinear& p, cudaStream_t stream) {
  decode::launch<Before::kNothing, After::kAddResidual>(p, stream);
}

void decode_norm_gate_linear_residual(const DecodeLinear& p, cudaStream_t stream) {
  decode::launch<Before::kGatedNorm, After::kAddResidual>(p, stream);
}

}  // namespace gla_ext::cuda
