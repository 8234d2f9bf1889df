// Forward step 4: the diagonal blocks of 16 x 16, computed element by element,
//
//   A_ij = scale sum_d q_id k_jd prod_(j < s <= i) 2^x_sd
//
// with a running product of decays down the tokens, which a reset makes 0.
//
// grid    (row, chunk, head), one warp per diagonal block; a lane has a column j and half of the
//         channels
// reads   q, k, b [B, T, H, K]; if given, the gates g in place of b's differences
// writes  A_diagonal [B, T, H, c], zero above the diagonal. With whole scores: only the diagonal
//         blocks of A of strong chunks, as step 3 has written the others.
// All in fp32.
#include "cuda/device/capability.h"
#include "cuda/device/launch.cuh"
#include "strong/scores.cuh"

namespace gla_ext::cuda {
namespace {

// The place of the results: row `token`, column j of diagonal block `sub`.
struct DiagonalRows {
  const Rows& out;
  int first_column;
  const Chunk& chunk;
  int64_t base;

  __device__ __forceinline__ DiagonalRows(const Rows& rows, int first, const Chunk& c)
      : out(rows), first_column(first), chunk(c), base(offset_at(rows, c)) {}
  __device__ __forceinline__ void operator()(int sub, int token, int j, float x) const {
    if (token < chunk.length)
      store_any(out.data, out.dtype, base + token_offset(out, token) + first_column * sub + j, x);
  }
};

}  // namespace

namespace steps {

// Left to itself, the assembler spills registers for 12.0, to have a third block on a processor.
constexpr int kDiagonalBlocks = kMajor >= 12 ? 2 : 0;

// Computes all chunks, into A_diagonal.
template <class In>
__global__ void __launch_bounds__(kDiagonalThreads, kDiagonalBlocks) scores_diagonal(Problem p) {
  __shared__ DiagonalTiles s_tiles;
  const Chunk chunk = find_chunk(p, blockIdx.x);
  if (chunk.length == 0) return;
  if (chunk.tail) return write_zeros<kDiagonalThreads>(p.A_diagonal, chunk, 0, kSubChunk);
  diagonal_blocks<In, kDiagonalThreads>(s_tiles, p, chunk, DiagonalRows(p.A_diagonal, 0, chunk));
}

// Computes strong chunks, into A.
template <class In>
__global__ void __launch_bounds__(kDiagonalThreads) strong_scores_diagonal(Problem p) {
  __shared__ DiagonalTiles s_tiles;
  for_strong_chunks(p, 1, [&](const Chunk& chunk, int) {
    diagonal_blocks<In, kDiagonalThreads>(s_tiles, p, chunk, DiagonalRows(p.A, kSubChunk, chunk));
  });
}

}  // namespace steps

void launch_scores_diagonal(const Problem& p, cudaStream_t stream) {
  with_dtype(p.dtype, [&](auto type) {
    using In = typename decltype(type)::type;
    launch(steps::scores_diagonal<In>, chunk_heads(p), kDiagonalThreads, p, stream);
  });
}

void launch_strong_scores_diagonal(const Problem& p, cudaStream_t stream) {
  with_dtype(p.dtype, [&](auto type) {
    using In = typename decltype(type)::type;
    launch(steps::strong_scores_diagonal<In>, strong_grid(p, 1), kDiagonalThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
