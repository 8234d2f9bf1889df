// Forward steps 3 and 4 and backward steps 5 and 6 for strong chunks, which the fused backward
// leaves out. Not needed if prepare.cu has made the prepared chunks, since it does this itself. If
// forward has stored the prepared chunks, they already have A.
//
// grid    that of for_strong_chunks; one block does all of a chunk, A and then 64 key channels at a
//         time, so that few blocks have nothing to do
// reads   q, k, g [B, T, H, K], v, do [B, T, H, V], tiers
// writes  A, unless forward has stored it, bf16, [B, T, H, C] or in prepared chunks [B, entries,
// H];
//         dq_intra, dk_intra, dg_intra [B, T, H, K] fp32
//
// dA stays in shared memory, in bf16. Everything else is fp32.
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
