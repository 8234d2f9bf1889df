// Forward step 5: o = A v + (scale q 2^b) S. See chunk_product.cuh.
#include "../device/chunk_product.cuh"

namespace gla_ext::cuda {

void output(const Problem& p, cudaStream_t stream) {
  launch_chunk_product<Values::kOutput>(p, stream);
}

}  // namespace gla_ext::cuda
