// Forward step 5 and backward step 4: the values of a chunk from its scores and a state.
//
//   o  = A v    + (scale q 2^b) S
//   dv = A^T do + (k 2^(b_C - b)) dS'
//
// grid    (row, chunk, head, kColumns values)
// reads   A (A_diagonal), v q b S, or do k b (b_suffix) dS
// writes  o, or dv [B, T, H, V]
// Accumulation is fp32. The scores come first, then the state, 64 key channels at a time.
#pragma once

#include "cuda/device/gates.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/states.cuh"

namespace gla_ext::cuda {

enum class Values { kOutput, kGrads };

// The fields of Problem that are multiplied.
template <Values kValues>
struct ValueFields {
  static constexpr bool kOutput = kValues == Values::kOutput;
  static constexpr Decay kDecay = kOutput ? Decay::kFromStart : Decay::kToEnd;
  static constexpr Stored kScores = kOutput ? Stored::kAsIs : Stored::kTransposed;
  const Rows &x, &y, &out;
  const void* states;
  DType dtype;
  __device__ explicit ValueFields(const Problem& p)
      : x(kOutput ? p.v : p.d_o),
        y(kOutput ? p.q : p.k),
        out(kOutput ? p.o : p.dv),
        states(kOutput ? p.S : p.dS),
        dtype(kOutput ? p.S_dtype : p.dS_dtype) {}
};

// A of a chunk [64][64], loaded ahead; the diagonal blocks come from A_diagonal if that is given.
template <Access kAccess, class In>
struct ScoreRows {
  using Op = Operand<In>;
  Eight<Op> x[kPasses<kTile, kTile>];

  __device__ __forceinline__ void load(const Problem& p, const Chunk& chunk) {
    const int64_t base = offset_at(p.A, chunk);
    for_eights<kTile, kTile>([&](int pass, int row, int column) {
      const int valid = row < chunk.length ? 8 : 0;
      if (kAccess == Access::kGeneral && p.A_diagonal.data != nullptr &&
          row / kSubChunk == column / kSubChunk)
        x[pass] = load8_operands<kAccess, Op>(p.A_diagonal.data, p.A_diagonal.dtype,
                                              offset_at(p.A_diagonal, chunk) +
                                                  token_offset(p.A_diagonal, row) +
                                                  column % static_cast<int>(kSubChunk),
                                              valid, takes_tf32<In>(p));
      else
        x[pass] = load8_operands<kAccess, Op>(
            p.A.data, p.A.dtype, base + token_offset(p.A, row) + column, valid, takes_tf32<In>(p));
    });
  }
  __device__ __forceinline__ void store(Op* tile) const { store_tile<kTile>(tile, x); }
};

// 64 key channels of the operand that multiplies the state, and the state's rows, loaded ahead.
template <Access kAccess, class In, Decay kDecay, int kColumns>
struct ProductRows {
  StateOperand<kAccess, In, kDecay> y[kPasses<kTile, kTile>];
  StateRows<kAccess, In, kColumns> state;

  __device__ __forceinline__ void load(const Problem& p, const Rows& y_rows, const void* states,
                                       DType dtype, const Chunk& chunk, int first_k, int first_v) {
    const In* base = rows_at<const In>(y_rows, chunk);
    const float* b = rows_at<const float>(p.b, chunk);
    const float* suffix = suffix_at<In>(p, chunk.row, chunk.start, chunk.head);
    for_eights<kTile, kTile>([&](int pass, int row, int column) {
      y[pass].load(p, base, y_rows, b, suffix, row, chunk.length, first_k + column);
    });
    state.load(p, states, dtype, chunk.state * p.K * p.V, first_k, first_v);
  }
  template <class Op>
  __device__ __forceinline__ void store(Op* s_y, Op* s_state, const float* s_b_last,
                                        const Problem& p, const Chunk& chunk) const {
    for_eights<kTile, kTile>([&](int pass, int row, int column) {
      store8(s_y + row * kPitch<Op, kTile> + column,
             y[pass].template operands<Op>(p, load8_aligned(s_b_last + column), has_suffix<In>(p),
                                           row < chunk.length));
    });
    state.store(s_state);
  }
};

template <Access kAccess, class In, int kColumns, Values kValues>
__device__ __forceinline__ void chunk_product(const Problem& p) {
  using Op = Operand<In>;
  using Fields = ValueFields<kValues>;
  constexpr int kPitchA = kPitch<Op, kTile>, kPitchX = kPitch<Op, kColumns>;
  __shared__ __align__(16) Op s_a[kTile * kPitchA];  // scores [token][token], later y [token][K]
  __shared__ __align__(16) Op s_x[kTile * kPitchX];  // v or do [token][V], later the state [K][V]

  __shared__ __align__(16) float s_b_last[kMaxHeadDim];  // [K], zero up to a whole tile

  const int v_blocks = blocks_of(p.V, kColumns);
  const int first_v = static_cast<int>(blockIdx.x % v_blocks) * kColumns;
  const Chunk chunk = find_chunk(p, blockIdx.x / v_blocks);
  const Fields f(p);
  if (chunk.length == 0) return;
  // In packed batches, sequences without a row in the pool are a tail already.
  const bool skipped = Fields::kOutput && !p.grid.packed && is_skipped(p, chunk.row);
  if (chunk.tail || skipped) {
    write_zeros<kThreads>(f.out, chunk, first_v, min(first_v + kColumns, p.V));
    return;
  }
  const WarpTile<kColumns> warp;
  float acc[2][WarpTile<kColumns>::kN][4];  // [token, V]
  clear(acc);

  if (Fields::kDecay == Decay::kToEnd) {
    const float* b_last = rows_at<const float>(p.b, chunk) + token_offset(p.b, chunk.length - 1);
    for (int k = static_cast<int>(threadIdx.x); k < blocks_of(p.K, kTile) * kTile; k += kThreads)
      s_b_last[k] = k < p.K ? b_last[k] : 0.f;
  }
  {
    ScoreRows<kAccess, In> scores;
    TileRows<kAccess, In, kColumns> x;
    scores.load(p, chunk);
    x.load(rows_at<const In>(f.x, chunk), f.x, chunk.length, first_v, p.V);
    scores.store(s_a);
    x.store(s_x, takes_tf32<In>(p));
  }
  // The next tiles are loaded while a product runs.
  ProductRows<kAccess, In, Fields::kDecay, kColumns> rows;
  rows.load(p, f.y, f.states, f.dtype, chunk, 0, first_v);
  __syncthreads();  // the tiles are written
  product<Fields::kScores, Stored::kAsIs, kPitchA, kPitchX>(
      acc, Fields::kScores == Stored::kAsIs ? s_a + warp.m * kPitchA : s_a + warp.m, s_x + warp.n,
      kTile, takes_tf32<In>(p));
#pragma unroll 1
  for (int first_k = 0; first_k < p.K; first_k += kTile) {
    __syncthreads();  // the tiles of the previous product are read
    rows.store(s_a, s_x, s_b_last + first_k, p, chunk);
    if (first_k + kTile < p.K)
      rows.load(p, f.y, f.states, f.dtype, chunk, first_k + kTile, first_v);
    __syncthreads();  // the tiles are written
    product<Stored::kAsIs, Stored::kAsIs, kPitchA, kPitchX>(acc, s_a + warp.m * kPitchA,
                                                            s_x + warp.n, kTile, takes_tf32<In>(p));
  }

  In* out = rows_at<In>(f.out, chunk);
  if constexpr (kAccess == Access::kFast && std::is_same_v<In, Op>) {
    __syncthreads();  // the tiles are read
    for_pairs(acc, [&](int r, int c, float x0, float x1) {
      store2<kAccess>(s_x + (warp.m + r) * kPitchX + warp.n + c, x0, x1, 2);
    });
    __syncthreads();  // the rows are written
    for_eights<kTile, kColumns>([&](int, int token, int column) {
      const int v = first_v + column;
      if (token < chunk.length && v < p.V)
        store8(out + token_offset(f.out, token) + v, load8_aligned(s_x + token * kPitchX + column));
    });
  } else {
    for_pairs(acc, [&](int r, int c, float x0, float x1) {
      const int token = warp.m + r, v = first_v + warp.n + c;
      if (token < chunk.length)
        store2<kAccess>(out + token_offset(f.out, token) + v, x0, x1, p.V - v);
    });
  }
}

}  // namespace gla_ext::cuda
