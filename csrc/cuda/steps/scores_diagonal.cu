// Forward step 4: the diagonal blocks of 16 x 16, element by element,
//
//   A_ij = scale sum_d q_id k_jd prod_(j < s <= i) 2^x_sd
//
// with a running product of decays down the tokens, which a reset makes 0.
//
// grid    (row, chunk, head), a warp a diagonal block; lane (j, half of the channels)
// reads   q, k, b [B, T, H, K], or the gates g in place of b's differences
// writes  A_diagonal [B, T, H, c], zero above the diagonal. Of whole scores, the diagonal blocks of
//         A in chunks outside tier 1 alone: step 3 wrote the others.
// All in fp32.
#include "../device/gates.cuh"
#include "../device/launch.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int kDiagonalThreads = 32 * kSubChunks;
constexpr int kColumns = 32;  // key channels a tile
constexpr int kPitchX = kColumns + 1;

struct DiagonalTiles {
  float q[kTile][kPitchX], k[kTile][kPitchX], decay[kTile][kPitchX];  // [token][K]
};

template <class In>
__device__ __forceinline__ void diagonal_blocks(DiagonalTiles& s, const Rows& out, int first_column,
                                                const Problem& p, const Chunk& chunk) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int sub = static_cast<int>(threadIdx.x) / 32, token = sub * static_cast<int>(kSubChunk);
  const int j = lane % static_cast<int>(kSubChunk), part = lane / static_cast<int>(kSubChunk);
  float acc[kSubChunk] = {};  // A_ij for all i of this lane's j
  for (int first = 0; first < p.K; first += kColumns) {
    if (first > 0) __syncthreads();  // the tiles before are read
    const GateColumn gates(p, chunk, token, first + lane);
    const Column<In> q(p.q, chunk, token, first + lane, p.K);
    const Column<In> k(p.k, chunk, token, first + lane, p.K);
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) {
      s.q[token + i][lane] = q.x[i];
      s.k[token + i][lane] = k.x[i];
      s.decay[token + i][lane] = exp2_ftz(gates.x[i]);
    }
    __syncthreads();  // the tiles are written
    for (int c = part; c < kColumns; c += 2) {
      float x = 0;  // k_j times the decays from j to i
#pragma unroll
      for (int i = 0; i < kSubChunk; ++i) {
        x = i == j ? s.k[token + j][c] : x * s.decay[token + i][c];
        acc[i] += s.q[token + i][c] * x;
      }
    }
  }
  const int64_t base = offset_at(out, chunk) + first_column * sub + j;
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) {
    const float sum = acc[i] + __shfl_xor_sync(0xffffffffu, acc[i], kSubChunk);
    if (part == 0 && token + i < chunk.length)
      store_any(out.data, out.dtype, base + token_offset(out, token + i),
                j <= i ? p.scale * sum : 0.f);
  }
}

// All chunks, into A_diagonal.
template <class In>
__global__ void __launch_bounds__(kDiagonalThreads) scores_diagonal_all(Problem p) {
  __shared__ DiagonalTiles s_tiles;
  const Chunk chunk = find_chunk(p, blockIdx.x);
  if (chunk.length == 0) return;
  if (chunk.tail) return write_zeros<kDiagonalThreads>(p.A_diagonal, chunk, 0, kSubChunk);
  diagonal_blocks<In>(s_tiles, p.A_diagonal, 0, p, chunk);
}

// Those outside tier 1, into A.
template <class In>
__global__ void __launch_bounds__(kDiagonalThreads) scores_diagonal_exact(Problem p) {
  __shared__ DiagonalTiles s_tiles;
  for_exact_chunks(p, 1, [&](const Chunk& chunk, int) {
    diagonal_blocks<In>(s_tiles, p.A, kSubChunk, p, chunk);
  });
}

}  // namespace

void scores_diagonal(const Problem& p, cudaStream_t stream) {
  with_dtype(p.dtype, [&](auto type) {
    using In = typename decltype(type)::type;
    if (p.whole_scores)
      launch(scores_diagonal_exact<In>, exact_strips(p, 1), kDiagonalThreads, p, stream);
    else
      launch(scores_diagonal_all<In>, chunk_heads(p), kDiagonalThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
