// What the fused backward takes from elsewhere in chunks outside tier 1: forward steps 3 and 4 and
// backward steps 5 and 6 of them. Where operands.cu has made operands it has done so too.
//
// grid    as for_exact_chunks wants it: a block for A of a chunk, one for each 64 key channels
// reads   q, k, g [B, T, H, K], v, do [B, T, H, V], tiers
// writes  A, bf16, [B, T, H, C] or of operands [B, slots, H]; dq_intra, dk_intra, dg_intra
//         [B, T, H, K] fp32
//
// dA stays in shared memory, bf16. All else is fp32.
#include "../device/launch.cuh"
#include "dependent_launch.cuh"
#include "exact_intra.cuh"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

// Blocks of a chunk.
__host__ __device__ constexpr int parts_of(const Problem& p) {
  return 1 + static_cast<int>(blocks_of(p.K, kTile));
}

// A in the first of a chunk's blocks, 64 key channels in each other one.
__global__ void __launch_bounds__(kThreads, 2) exact_gradients_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  __shared__ __align__(16) ExactChunk s;
  if (blockIdx.x % parts_of(p) == 0) {
    for_exact_chunks(p, parts_of(p), [&](const Chunk& chunk, int) { s.finish_scores(p, chunk); });
    return;
  }
  for_exact_chunks(p, parts_of(p), [&](const Chunk& chunk, int part) {
    s.intra.make_score_grads(p, chunk);
    s.intra.write_gradients(p, chunk, (part - 1) * kTile);
  });
#endif
}

}  // namespace

void exact_gradients(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = exact_grid(p, parts_of(p));
  if (blocks > 0) launch_dependent(exact_gradients_kernel, blocks, kThreads, 0, stream, p);
}

}  // namespace gla_ext::cuda::sm90
