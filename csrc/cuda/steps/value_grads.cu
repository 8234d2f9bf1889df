// Backward step 4: dv = A^T do + (k 2^(b_C - b)) dS'. See chunk_product.cuh.
#include "../device/chunk_product.cuh"

namespace gla_ext::cuda {

void value_grads(const Problem& p, cudaStream_t stream) {
  launch_chunk_product<Values::kGrads>(p, stream);
}

}  // namespace gla_ext::cuda
