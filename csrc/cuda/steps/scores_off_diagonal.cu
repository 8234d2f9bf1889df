// Forward step 3: A_ij = scale sum_d q_id k_jd 2^(b_id - b_jd) below the diagonal blocks of 16
// x 16.
//
// grid    (row, chunk, head)
// reads   q, k, b [B, T, H, K], tiers; for strong chunks the gates g if given
// writes  A [B, T, H, C], zero elsewhere. With whole scores, also the diagonal blocks of tier-1
//         chunks, which the same product gives.
// Accumulation is fp32, 64 key channels at a time. There are two kernels, one for tier-1 chunks and
// one for strong chunks; each skips the other's chunks. Past alone, the first then writes the rows
// of a strong chunk that are before its first strong one over those of the strong kernels.
#include "cuda/device/launch.cuh"
#include "scores.cuh"
#include "strong/scores.cuh"

namespace gla_ext::cuda {
namespace steps {

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, sizeof(Operand<In>) == 2 ? 3 : 2)
    scores_off_diagonal(Problem p) {
  using Op = Operand<In>;
  constexpr int kPitchX = kPitch<Op, kTile>;
  __shared__ __align__(16) Op s_q[kTile * kPitchX];
  __shared__ __align__(16) Op s_k[kTile * kPitchX];
  const Chunk chunk = find_chunk(p, blockIdx.x);
  if (chunk.length == 0) return;
  if (chunk.tail) return write_zeros<kThreads>(p.A, chunk, 0, kChunk);
  if (first_strong_row(p, chunk) == 0) return;
  const WarpTile<kTile> warp;
  float acc[2][2][4];  // [token, token]
  clear(acc);
  for (int first = 0; first < p.K; first += kTile) {
    if (first > 0) __syncthreads();  // the tiles of the previous product are read
    load_tier1_operands<kAccess, Op, In, kTile>(s_q, s_k, p, chunk, first, p.past_alone);
    __syncthreads();  // the tiles are written
    product<Stored::kAsIs, Stored::kTransposed, kPitchX, kPitchX>(
        acc, s_q + warp.m * kPitchX, s_k + warp.n * kPitchX, kTile, takes_tf32<In>(p));
  }
  Chunk weak = chunk;
  weak.length = min(chunk.length, first_strong_row(p, chunk));  // read anew, for registers
  store_scores<kAccess, Op>(p.A, weak, acc, p.scale, [&](int row, int column) {
    return p.whole_scores ? column <= row : column / kSubChunk < row / kSubChunk;
  });
}

template <class In>
__global__ void __launch_bounds__(kThreads, 1) strong_scores_off_diagonal(Problem p) {
  using Op = Operand<In>;
  constexpr int kPitchX = kPitch<Op, kTile>;
  __shared__ __align__(16) Op s_q[kTile * kPitchX];
  __shared__ __align__(16) Op s_k[kTile * kPitchX];
  __shared__ float s_sums[kSubChunks][kTile];
  for_strong_chunks(p, 1, [&](const Chunk& chunk, int) {
    float acc[2][2][4];  // [token, token]
    clear(acc);
    for (int first = 0; first < p.K; first += kTile)
      add_anchored<Op, In>(acc, s_q, s_k, s_sums, p, chunk, first);
    store_scores<Access::kGeneral, Op>(p.A, chunk, acc, p.scale, [](int row, int column) {
      return column / kSubChunk < row / kSubChunk;
    });
  });
}

}  // namespace steps

void launch_scores_off_diagonal(const Problem& p, cudaStream_t stream) {
  with_dtype_and_access(p, [&](auto type, auto access) {
    using In = typename decltype(type)::type;
    launch(steps::scores_off_diagonal<decltype(access)::value, In>, chunk_heads(p), kThreads, p,
           stream);
  });
}

void launch_strong_scores_off_diagonal(const Problem& p, cudaStream_t stream) {
  with_dtype(p.dtype, [&](auto type) {
    using In = typename decltype(type)::type;
    launch(steps::strong_scores_off_diagonal<In>, strong_grid(p, 1), kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
