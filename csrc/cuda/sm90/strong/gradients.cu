// Forward steps 3 and 4 and backward steps 5 and 6 for strong chunks, which the fused backward
// leaves out. Not needed if prepare.cu has made the prepared chunks, since it does this itself. If
// forward has stored the prepared chunks, they already have A.
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "intra.cuh"

namespace gla_ext::cuda::sm90 {
namespace strong::gradients {

__global__ void __launch_bounds__(kThreads, 2) kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  __shared__ __align__(16) StrongChunk s;
  __shared__ Chunk chunk;
  for_strong_chunks(p, chunk, [&] {
    const auto find = [&] { return chunk; };
    if (!p.has_A) {
      finish_scores(s.scores, p, find());
      __syncthreads();  // A is read
    }
    s.finish_gradients(p, find);
  });
#endif
}

}  // namespace strong::gradients

void launch_strong_gradients(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = strong_grid(p, 1);
  if (blocks > 0) launch_dependent(strong::gradients::kernel, blocks, kThreads, 0, stream, p);
}

void launch_strong_gradients_without_A(const Problem& p, cudaStream_t stream) {
  launch_strong_gradients(told(p, &Problem::has_A), stream);
}

}  // namespace gla_ext::cuda::sm90
