// Scores of strong chunks: blocks off the diagonal as products of operands that are anchored at the
// borders of sub-chunks, diagonal blocks element by element.
#pragma once

#include "cuda/device/gates.cuh"

namespace gla_ext::cuda {

// Adds the scores of all row blocks I of 16 tokens off the diagonal. Their operands are anchored at
// the start of I, so all exponents are <= 0 for gates <= 0: q_i 2^(sum of gates in I up to i), and,
// in a new tile for each I, k_j 2^(sum of gates after j and before I).
template <class Op, class In>
__device__ __forceinline__ void add_anchored(float (&acc)[2][2][4], Op* s_q, Op* s_k,
                                             float (*s_sums)[kTile], const Problem& p,
                                             const Chunk& chunk, int first) {
  constexpr int kPitchX = kPitch<Op, kTile>;
  const int column = static_cast<int>(threadIdx.x) % kTile;
  const int sub = static_cast<int>(threadIdx.x) / kTile, token = sub * static_cast<int>(kSubChunk);
  const WarpTile<kTile> warp;
  const GateColumn gates(p, chunk, token, first + column);
  const Column<In> q(p.q, chunk, token, first + column, p.K);
  const Column<In> k(p.k, chunk, token, first + column, p.K);
  s_sums[sub][column] = gates.sum();
#pragma unroll 1
  for (int block = 1; block < kSubChunks; ++block) {
    __syncthreads();  // s_sums is written, the previous product's tiles are read
    float prefix = 0, suffix = 0;
    for (int between = sub + 1; between < block; ++between) suffix += s_sums[between][column];
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) {
      prefix += gates.x[i];
      const float x = sub == block ? q.x[i] * exp2_ftz(prefix) : 0.f;
      s_q[(token + i) * kPitchX + column] = to_operand<Op>(x, takes_tf32<In>(p));
    }
#pragma unroll
    for (int i = static_cast<int>(kSubChunk) - 1; i >= 0; --i) {
      const float x = sub < block ? k.x[i] * exp2_ftz(suffix) : 0.f;
      s_k[(token + i) * kPitchX + column] = to_operand<Op>(x, takes_tf32<In>(p));
      suffix += gates.x[i];
    }
    __syncthreads();  // the tiles are written
    product<Stored::kAsIs, Stored::kTransposed, kPitchX, kPitchX>(
        acc, s_q + warp.m * kPitchX, s_k + warp.n * kPitchX, kTile, takes_tf32<In>(p));
  }
  __syncthreads();  // the tiles are read
}

constexpr int kDiagonalThreads = 32 * kSubChunks;
constexpr int kDiagonalColumns = 32;  // key channels of a tile

struct alignas(16) DiagonalTiles {
  static constexpr int kPitchX = kPitch<float, kDiagonalColumns>;
  float q[kTile][kPitchX], k[kTile][kPitchX], decay[kTile][kPitchX];  // [token][K]

  // Adds sum_d q_id k_jd prod_(j < s <= i) decay_sd to A_ij for all i. A lane has one j and every
  // second eight of the channels in [first, end). For i < j the result is undefined.
  __device__ __forceinline__ void add_products(float (&acc)[kSubChunk], int token, int first,
                                               int end) const {
    constexpr int kC = static_cast<int>(kSubChunk);
    const int lane = thread_anew() % 32, j = lane % kC;
#pragma unroll 1
    for (int c = first + lane / kC * 8; c < end; c += 16) {
      const auto k_j = load8_aligned(&k[token + j][c]);
      float x[8] = {};  // k_j times the decays from j to i
#pragma unroll
      for (int i = 0; i < kC; ++i) {
        const auto decay_i = load8_aligned(&decay[token + i][c]);
        const auto q_i = load8_aligned(&q[token + i][c]);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          x[n] = i == j ? k_j[n] : x[n] * decay_i[n];
          acc[i] += q_i[n] * x[n];
        }
      }
    }
  }
};

// Calls store(sub-chunk, token, j, A_ij) for all i and j. Runs on a block of kDiagonalThreads
// threads, or twice as many: then each half sums half of the channels of a tile.
template <class In, int kBlockThreads, class Store>
__device__ __forceinline__ void diagonal_blocks(DiagonalTiles& s, const Problem& p,
                                                const Chunk& chunk, Store&& store) {
  constexpr int kHalves = kBlockThreads / kDiagonalThreads;
  static_assert(kHalves * kDiagonalThreads == kBlockThreads && kHalves <= 2);
  constexpr int kColumnsEach = kDiagonalColumns / kHalves;
  const int thread = thread_anew(), lane = thread % 32;
  const int half = kHalves == 1 ? 0 : thread / kDiagonalThreads, sub = thread / 32 % kSubChunks;
  const int token = sub * static_cast<int>(kSubChunk);
  const int j = lane % static_cast<int>(kSubChunk);
  float acc[kSubChunk] = {};  // A_ij for all i of this lane's j
  for (int first = 0; first < p.K; first += kDiagonalColumns) {
    if (first > 0) __syncthreads();  // the previous tiles are read
    if (half == 0) {
      const GateColumn gates(p, chunk, token, first + lane);
#pragma unroll
      for (int i = 0; i < kSubChunk; ++i) s.decay[token + i][lane] = exp2_ftz(gates.x[i]);
    }
    if (half == kHalves - 1) {
      const Column<In> q(p.q, chunk, token, first + lane, p.K);
      const Column<In> k(p.k, chunk, token, first + lane, p.K);
#pragma unroll
      for (int i = 0; i < kSubChunk; ++i) {
        s.q[token + i][lane] = q.x[i];
        s.k[token + i][lane] = k.x[i];
      }
    }
    __syncthreads();  // the tiles are written
    s.add_products(acc, token, half * kColumnsEach, (half + 1) * kColumnsEach);
  }
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) acc[i] += __shfl_xor_sync(0xffffffffu, acc[i], kSubChunk);
  const bool stores = lane == j;
  if constexpr (kHalves > 1) {
    __syncthreads();  // the tiles are read
    if (half == 1 && stores)
#pragma unroll
      for (int i = 0; i < kSubChunk; ++i) s.q[token + i][j] = acc[i];
    __syncthreads();  // the second half's sums are written
    if (half == 0)
#pragma unroll
      for (int i = 0; i < kSubChunk; ++i) acc[i] += s.q[token + i][j];
  }
  if (half == 0 && stores)
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) store(sub, token + i, j, j <= i ? p.scale * acc[i] : 0.f);
}

// The first row of k for row block `block`, in a tile that has the rows of all row blocks.
__host__ __device__ constexpr int first_row(int block) {
  return static_cast<int>(kSubChunk) * block * (block - 1) / 2;
}

// Whole scores of bf16 inputs, off and on the diagonal, by kThreads threads. The blocks off the
// diagonal are those of add_anchored, but q^ is written once for all of them, and each of the six
// blocks has a warp.
struct StrongScores {
  static constexpr int kPitchX = kPitch<bf16, kTile>;
  static constexpr int kC = static_cast<int>(kSubChunk);
  bf16 A[kTile * kPitchX];  // [token][token]
  union {
    struct {
      bf16 q[kTile * kPitchX];                  // [token][K]
      bf16 k[first_row(kSubChunks) * kPitchX];  // [row block and token before it][K]
      float sums[kSubChunks][kTile];
    } off_diagonal;
    DiagonalTiles diagonal;
  };

  __device__ __forceinline__ void make(const Problem& p, const Chunk& chunk) {
    // The block off the diagonal that this warp computes. Two of the eight warps have none.
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = 0x44333221 >> 4 * warp & 15, column = 0x00210100 >> 4 * warp & 15;
    float acc[1][2][4];  // [token, token]
    clear(acc);
    for (int first = 0; first < p.K; first += kTile) {
      if (first > 0) __syncthreads();  // the previous tiles are read
      write_anchored(p, chunk, first);
      __syncthreads();  // the tiles are written
      if (row < kSubChunks)
        product<Stored::kAsIs, Stored::kTransposed, kPitchX, kPitchX>(
            acc, off_diagonal.q + row * kC * kPitchX,
            off_diagonal.k + (first_row(row) + column * kC) * kPitchX, kTile, false);
    }
    if (row < kSubChunks) {
      for_pairs(acc, [&](int r, int c, float x0, float x1) {
        store2<Access::kFast>(A + (row * kC + r) * kPitchX + column * kC + c, p.scale * x0,
                              p.scale * x1, 2);
        store2<Access::kFast>(A + (column * kC + r) * kPitchX + row * kC + c, 0.f, 0.f, 2);
      });
    }
    __syncthreads();  // the blocks off the diagonal are written, their operands read
    diagonal_blocks<bf16, kThreads>(diagonal, p, chunk, [&](int sub, int token, int j, float x) {
      A[token * kPitchX + sub * kC + j] = from_float<bf16>(x);
    });
    __syncthreads();  // the scores are written, the diagonal's tiles read
  }

 private:
  // Writes q_i 2^(sum of gates in its sub-chunk up to i) and, for each row block, k_j 2^(sum of
  // gates after j and before the block).
  __device__ __forceinline__ void write_anchored(const Problem& p, const Chunk& chunk, int first) {
    const int column = static_cast<int>(threadIdx.x) % kTile;
    const int sub = static_cast<int>(threadIdx.x) / kTile, token = sub * kC;
    const FusedGateColumn gates(p, chunk, token, first + column);
    const Column<bf16> q(p.q, chunk, token, first + column, p.K);
    const Column<bf16> k(p.k, chunk, token, first + column, p.K);
    auto& s = off_diagonal;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kC; ++i) {
      sum += gates.x[i];
      s.q[(token + i) * kPitchX + column] = from_float<bf16>(q.x[i] * exp2_ftz(sum));
    }
    s.sums[sub][column] = sum;
    __syncthreads();  // the sums are written
    float between = 0;
#pragma unroll 1
    for (int block = sub + 1; block < kSubChunks; ++block) {
      float suffix = between;
#pragma unroll
      for (int i = kC - 1; i >= 0; --i) {
        s.k[(first_row(block) + token + i) * kPitchX + column] =
            from_float<bf16>(k.x[i] * exp2_ftz(suffix));
        suffix += gates.x[i];
      }
      between += s.sums[block][column];
    }
  }
};

}  // namespace gla_ext::cuda
