// Forward step 5 with gates on values of any strength:
//
//   o_i = 2^bv_i ((scale q 2^b) S)_i + sum_(j <= i) A_ij v_j 2^(bv_i - bv_j)
//
// For row block I of 16 tokens, the state's contribution is decayed to the start of I, and so are
// the values before I ("anchored" there). Both then need one more decay per row, from there to the
// row's token. Inside I, a running product of decays goes down the tokens; a reset makes it 0. With
// gates <= 0 no exponent is positive.
//
// grid    (row, chunk, head, 64 values)
// reads   q, b [B, T, H, K], A [B, T, H, C], S of the chunk, v, gv [B, T, H, V]
// writes  o [B, T, H, V]
// Accumulation is fp32: the state first, 64 key channels at a time, then the scores.
#include "cuda/steps/chunk_product.cuh"
#include "cuda/steps/strong/intra_grads.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int kC = static_cast<int>(kSubChunk);

// The row of `anchored` where the values for sub-chunk I start. Sub-chunk I needs the 16 I values
// before it, decayed to its start; the values for I = 1, 2, 3 are stored one after another.
__device__ __forceinline__ constexpr int first_anchored(int I) { return kC * I * (I - 1) / 2; }
constexpr int kAnchored = kC * (1 + 2 + 3);
static_assert(kSubChunks == 4, "kAnchored has a term for each sub-chunk but the first");

template <class Op>
struct OutputTiles {
  static constexpr int kPitchX = kPitch<Op, kTile>;
  Op a[kTile * kPitchX];  // q [token][K], replaced by A [token][token]
  union {
    Op state[kTile * kPitchX];         // [K][V]
    Op anchored[kAnchored * kPitchX];  // [token][V]
    float rows[kTile][kTile + 8];      // [token][V]: products, from which whole columns are read
  };
  float sums[kSubChunks][kTile];  // sums of the gates over each sub-chunk
};

// acc = (scale q 2^b) S, decayed only from the chunk's start to the start of each row's sub-chunk.
template <Access kAccess, class In>
__device__ __forceinline__ void state_part(float (&acc)[2][2][4], OutputTiles<Operand<In>>& s,
                                           const Problem& p, const Chunk& chunk, int first_v) {
  constexpr int kPitchX = OutputTiles<Operand<In>>::kPitchX;
  const WarpTile<kTile> warp;
  ProductRows<kAccess, In, Decay::kFromStart, kTile> rows;
  rows.load(p, p.q, p.S, p.S_dtype, chunk, 0, first_v);
#pragma unroll 1
  for (int first_k = 0; first_k < p.K; first_k += kTile) {
    if (first_k > 0) __syncthreads();  // the tiles of the previous product are read
    rows.store(s.a, s.state, /*s_b_last, not read:*/ s.sums[0], p, chunk);
    if (first_k + kTile < p.K) rows.load(p, p.q, p.S, p.S_dtype, chunk, first_k + kTile, first_v);
    __syncthreads();  // the tiles and s.sums are written
    product<Stored::kAsIs, Stored::kAsIs, kPitchX, kPitchX>(
        acc, s.a + warp.m * kPitchX, s.state + warp.n, kTile, takes_tf32<In>(p));
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = warp.n + 8 * j + static_cast<int>(threadIdx.x) % 4 * 2 + e % 2;
        float before = 0;
        for (int J = 0; J < warp.m / kC + m; ++J) before += s.sums[J][column];
        acc[m][j][e] *= exp2_ftz(before);
      }
}

// Stores this thread's 16 tokens of one value channel in `anchored`, once for every later I.
template <class In>
__device__ __forceinline__ void anchor_values(OutputTiles<Operand<In>>& s,
                                              const Problem& value_side, const Chunk& chunk,
                                              int first_v) {
  using Op = Operand<In>;
  const int column = static_cast<int>(threadIdx.x) % kTile;
  const int sub = static_cast<int>(threadIdx.x) / kTile, token = sub * kC;
  const GateColumn gates(value_side, chunk, token, first_v + column);
  const Column<In> v(value_side.k, chunk, token, first_v + column, value_side.K);
#pragma unroll
  for (int I = 1; I < kSubChunks; ++I) {
    if (I <= sub) continue;
    float behind = 0;  // sum of the gates after the token and before I
    for (int between = sub + 1; between < I; ++between) behind += s.sums[between][column];
    Op* to = s.anchored + (first_anchored(I) + token) * OutputTiles<Op>::kPitchX + column;
#pragma unroll
    for (int i = kC - 1; i >= 0; --i) {
      to[i * OutputTiles<Op>::kPitchX] =
          to_operand<Op>(v.x[i] * exp2_ftz(behind), takes_tf32<In>(value_side));
      behind += gates.x[i];
    }
  }
}

// Computes o for this thread's 16 tokens of one value channel, from the contribution of everything
// before their sub-chunk and from the pairs inside it.
template <class In>
__device__ __forceinline__ void finish_output(const OutputTiles<Operand<In>>& s, const Problem& p,
                                              const Problem& value_side, const Chunk& chunk,
                                              int first_v) {
  const int column = static_cast<int>(threadIdx.x) % kTile, channel = first_v + column;
  const int token = static_cast<int>(threadIdx.x) / kTile * kC;
  const GateColumn gates(value_side, chunk, token, channel);
  const Column<In> v(value_side.k, chunk, token, channel, value_side.K);
  In* out = rows_at<In>(p.o, chunk) + channel;
  float carried[kC], prefix = 0;  // v_j times the decays from j to i
#pragma unroll
  for (int i = 0; i < kC; ++i) {
    float A[kSubChunk];
    row_of_dA(A, s.a, token + i, token);
    const float decay = exp2_ftz(gates.x[i]);
    prefix += gates.x[i];
    float o = exp2_ftz(prefix) * s.rows[token + i][column];
#pragma unroll
    for (int j = 0; j < i; ++j) {
      carried[j] *= decay;
      o += A[j] * carried[j];
    }
    carried[i] = v.x[i];
    o += A[i] * v.x[i];
    if (token + i < chunk.length && channel < value_side.K)
      out[token_offset(p.o, token + i)] = from_float<In>(o);
  }
}

}  // namespace

namespace steps {

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, 2) value_gated_output(Problem p, Problem value_side) {
  using Op = Operand<In>;
  constexpr int kPitchX = OutputTiles<Op>::kPitchX;
  __shared__ __align__(16) OutputTiles<Op> s;
  const int v_blocks = blocks_of(p.V, kTile);
  const int first_v = static_cast<int>(blockIdx.x % v_blocks) * kTile;
  const Chunk chunk = find_chunk(p, blockIdx.x / v_blocks);
  if (chunk.length == 0) return;
  const bool skipped = !p.grid.packed && is_skipped(p, chunk.row);
  if (chunk.tail || skipped)
    return write_zeros<kThreads>(p.o, chunk, first_v, min(first_v + kTile, p.V));
  const WarpTile<kTile> warp;
  {
    const int column = static_cast<int>(threadIdx.x) % kTile;
    const int sub = static_cast<int>(threadIdx.x) / kTile;
    s.sums[sub][column] = GateColumn(value_side, chunk, sub * kC, first_v + column).sum();
  }
  float acc[2][2][4];  // [token, V]; the 16 rows of acc[m] are a sub-chunk
  clear(acc);
  state_part<kAccess, In>(acc, s, p, chunk, first_v);
  __syncthreads();  // the tiles of the state's product are read
  {
    ScoreRows<kAccess, In> scores;
    scores.load(p, chunk);
    scores.store(s.a);
  }
  anchor_values<In>(s, value_side, chunk, first_v);
  __syncthreads();  // the scores and the anchored values are written
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int I = warp.m / kC + m;
    if (I > 0)
      product<Stored::kAsIs, Stored::kAsIs, kPitchX, kPitchX>(
          reinterpret_cast<float (&)[1][2][4]>(acc[m]), s.a + I * kC * kPitchX,
          s.anchored + first_anchored(I) * kPitchX + warp.n, I * kC, takes_tf32<In>(p));
  }
  __syncthreads();  // the anchored values are read
  store_product<kTile>(s.rows, acc);
  __syncthreads();  // the rows are written
  finish_output<In>(s, p, value_side, chunk, first_v);
}

}  // namespace steps

void launch_value_gated_output(const Problem& p, const Problem& value_side, cudaStream_t stream) {
  with_gated_access(p, value_side, [&](auto type, auto access) {
    launch(steps::value_gated_output<decltype(access)::value, typename decltype(type)::type>,
           chunk_heads(p) * blocks_of(p.V, kTile), kThreads, p, value_side, stream);
  });
}

}  // namespace gla_ext::cuda
