// norm_linear and norm_swiglu: linear maps of the norm of each row.
#include "cluster.cuh"

namespace gla_ext::cuda {

size_t decode_linear_bytes(const DecodeLinear& p, Before before) {
  const int warps = decode::warps_of(p.D, before != Before::kNothing);
  const decode::Places at(p, warps, decode::row_tiles_of(p.rows), before);
  return at.end * sizeof(float);
}

void decode_norm_linear(const DecodeLinear& p, cudaStream_t stream) {
  decode::launch<Before::kNorm, After::kStore>(p, stream);
}

void decode_norm_swiglu(const DecodeLinear& p, cudaStream_t stream) {
  decode::launch<Before::kNorm, After::kSwiglu>(p, stream);
}

}  // namespace gla_ext::cuda
