// Backward steps 5 and 6 of a chunk outside tier 1, in the fused path.
#pragma once

#include "../device/intra_exact.cuh"
#include "../device/scores.cuh"
#include "../device/scores_exact.cuh"

namespace gla_ext::cuda::sm90 {

// By kThreads threads.
struct ExactIntra {
  static constexpr int kPitchX = ExactScores::kPitchX;
  bf16 dA[kTile * kPitchX];  // [token][token]
  union {
    ScoreGradTiles<bf16> values;
    ExactTiles<bf16> operands;
  };

  // dA = tril(scale do v^T)
  __device__ __forceinline__ void make_score_grads(const Problem& p, const Chunk& chunk) {
    float acc[2][2][4];  // [token, token]
    multiply_values<Access::kFast, bf16>(acc, values, p, chunk);
    const WarpTile<kTile> warp;
    for_pairs(acc, [&](int r, int c, float x0, float x1) {
      const int row = warp.m + r, column = warp.n + c;
      store2<Access::kFast>(dA + row * kPitchX + column, column <= row ? p.scale * x0 : 0.f,
                            column + 1 <= row ? p.scale * x1 : 0.f, 2);
    });
    __syncthreads();  // dA is written, the values are read
  }

  // dq_intra, dk_intra and dg_intra of 64 key channels from `first` on.
  __device__ __forceinline__ void write_gradients(const Problem& p, const Chunk& chunk, int first) {
    exact<bf16, bf16, FusedGateColumn>(operands, dA, p, chunk, first);
  }
};

}  // namespace gla_ext::cuda::sm90
