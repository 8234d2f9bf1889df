// What the fused backward takes from elsewhere in chunks outside tier 1: forward steps 3 and 4 and
// backward steps 5 and 6 of them.
//
// grid    as for_exact_chunks wants it, 64 key channels of a chunk a block in the second kernel
// reads   q, k, g [B, T, H, K], v, do [B, T, H, V], tiers
// writes  A [B, T, H, C] bf16; dq_intra, dk_intra, dg_intra [B, T, H, K] fp32
//
// dA stays in shared memory, bf16. All else is fp32.
#include "../device/intra_exact.cuh"
#include "../device/launch.cuh"
#include "../device/scores.cuh"
#include "../device/scores_exact.cuh"
#include "dependent_launch.cuh"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

constexpr int kPitchX = ExactScores::kPitchX;

struct IntraTiles {
  bf16 dA[kTile * kPitchX];  // [token][token]
  union {
    ScoreGradTiles<bf16> values;
    ExactTiles<bf16> operands;
  };
};

__global__ void __launch_bounds__(kThreads, 1) exact_scores_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  __shared__ __align__(16) ExactScores s_scores;
  for_exact_chunks(p, 1, [&](const Chunk& chunk, int) {
    s_scores.make(p, chunk);
    bf16* A = rows_at<bf16>(p.A, chunk);
    for_eights<kTile, kTile>([&](int, int row, int column) {
      if (row < chunk.length)
        store8(A + token_offset(p.A, row) + column,
               load8_aligned(s_scores.A + row * kPitchX + column));
    });
  });
#endif
}

__global__ void __launch_bounds__(kThreads, 2) exact_intra_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  __shared__ __align__(16) IntraTiles s_tiles;
  for_exact_chunks(p, blocks_of(p.K, kTile), [&](const Chunk& chunk, int block) {
    float acc[2][2][4];  // [token, token]
    multiply_values<Access::kFast, bf16>(acc, s_tiles.values, p, chunk);
    const WarpTile<kTile> warp;
    for_pairs(acc, [&](int r, int c, float x0, float x1) {
      const int row = warp.m + r, column = warp.n + c;
      store2<Access::kFast>(s_tiles.dA + row * kPitchX + column, column <= row ? p.scale * x0 : 0.f,
                            column + 1 <= row ? p.scale * x1 : 0.f, 2);
    });
    __syncthreads();  // dA is written, the values are read
    exact<bf16, bf16>(s_tiles.operands, s_tiles.dA, p, chunk, block * kTile);
  });
#endif
}

}  // namespace

void exact_gradients(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = exact_grid(p, 1), parts = blocks_of(p.K, kTile);
  if (blocks == 0) return;
  launch_dependent(exact_scores_kernel, blocks, kThreads, 0, stream, p);
  launch_dependent(exact_intra_kernel, blocks * parts, kThreads, 0, stream, p);
}

}  // namespace gla_ext::cuda::sm90
