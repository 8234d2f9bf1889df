// The parts of a strong chunk that the fused path leaves out: A, and backward steps 5 and 6.
#pragma once

#include "cuda/sm90/prepare/prepared.cuh"
#include "cuda/steps/scores.cuh"
#include "cuda/steps/strong/intra_grads.cuh"
#include "cuda/steps/strong/scores.cuh"

namespace gla_ext::cuda::sm90 {

// Writes A of a chunk, made by `StrongScores`, to the prepared chunk, from row `first` on.
__device__ __forceinline__ void write_prepared_A(const Problem& p, const Chunk& chunk,
                                                 const bf16* scores, int first = 0) {
  auto* A = reinterpret_cast<Tile*>(
      prepared_at(p, chunk.entry, static_cast<int>(blocks_of(p.K, kGroupKeys))));
  for_eights<kTile, kTile>([&](int, int row, int column) {
    // Rows after the last token are set to zero by a select: zeros in q would not undo a NaN.
    Eight<bf16> x{};
    if (row < chunk.length) x = load8_aligned(scores + row * StrongScores::kPitchX + column);
    if (row >= first) store8(&in_tile<bf16>(*A, swizzled(row, column / 8)), x);
  });
}

// Makes A of a chunk and writes it to the prepared chunk if there is one, there from row `first`
// on, else to p.A.
__device__ __forceinline__ void finish_scores(StrongScores& scores, const Problem& p,
                                              const Chunk& chunk, int first = 0) {
  scores.make(p, chunk);
  if (p.prepared != nullptr) return write_prepared_A(p, chunk, scores.A, first);
  bf16* A = rows_at<bf16>(p.A, chunk);
  for_eights<kTile, kTile>([&](int, int row, int column) {
    if (row < chunk.length)
      store8(A + token_offset(p.A, row) + column,
             load8_aligned(scores.A + row * StrongScores::kPitchX + column));
  });
}

// Backward steps 5 and 6 of a strong chunk, by kThreads threads.
struct StrongIntra {
  static constexpr int kPitchX = StrongScores::kPitchX;
  bf16 dA[kTile * kPitchX];  // [token][token]
  union {
    ScoreGradTiles<bf16> values;
    StrongTiles<bf16> operands;
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

  // Writes dq_intra, dk_intra and dg_intra of the 64 key channels that start at `first`.
  __device__ __forceinline__ void write_gradients(const Problem& p, const Chunk& chunk, int first) {
    strong<bf16, bf16, FusedGateColumn>(operands, dA, p, chunk, first);
  }
};

// All the work on a strong chunk: A and, in backward, what token pairs contribute to dq, dk and dg.
union StrongChunk {
  StrongScores scores;
  StrongIntra intra;

  // find() reads the chunk's description again, so that it takes no registers in between.
  template <class Find>
  __device__ __forceinline__ void finish_gradients(const Problem& p, Find&& find) {
    intra.make_score_grads(p, find());
    // No barrier is needed between iterations: after the second barrier of an iteration
    // a thread reads only the tiles that it wrote, and sums are written after that barrier.
#pragma unroll 1
    for (int first = 0; first < p.K; first += kTile) intra.write_gradients(p, find(), first);
  }
};

}  // namespace gla_ext::cuda::sm90
