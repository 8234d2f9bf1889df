// The parts of backward step 7, also with gates on values: products over values, the gradients dq
// and dk, and the sums of dg.
#pragma once

#include "cuda/device/gates.cuh"
#include "cuda/device/launch.cuh"

namespace gla_ext::cuda {

// Values at a time. fp32 tiles have fewer columns, so that four of them fit into 48 KiB.
template <class Op>
constexpr int kValues = sizeof(Op) == 2 ? 64 : 32;
constexpr int kPitchG = kTile + 8;  // of the fp32 tiles for dg

template <class Op>
struct ProductTiles {
  static constexpr int kPitchX = kPitch<Op, kValues<Op>>;
  Op d_o[kTile * kPitchX], v[kTile * kPitchX];  // [token][V]
  Op S[kTile * kPitchX], dS[kTile * kPitchX];   // [K][V]
};
struct GateTiles {
  float from_behind[kTile][kPitchG];  // [token][K], to be summed from a token to the end
  float before[kTile][kPitchG];       // [token][K], to be summed up to a token
};

// Values of a chunk and of its states, loaded ahead.
template <Access kAccess, class Op, class In>
struct MergeRows {
  TileRows<kAccess, In, kValues<Op>> d_o, v;
  StateRows<kAccess, In, kValues<Op>> S, dS;

  __device__ __forceinline__ void load(const Problem& p, const Chunk& chunk, int first_k,
                                       int first_v) {
    const int64_t state = chunk.state * p.K * p.V;
    d_o.load(rows_at<const In>(p.d_o, chunk), p.d_o, chunk.length, first_v, p.V);
    v.load(rows_at<const In>(p.v, chunk), p.v, chunk.length, first_v, p.V);
    S.load(p, p.S, p.S_dtype, state, first_k, first_v);
    dS.load(p, p.dS, p.dS_dtype, state, first_k, first_v);
  }
};

// acc_q = do S^T, acc_k = v dS'^T; rowsum_V(S dS') of 64 key channels goes to s_w. With gates on
// values it is rowsum_V(S 2^bv_C dS').
template <Access kAccess, class Op, class In, bool kValueGated = false>
__device__ __forceinline__ void multiply(float (&acc_q)[2][2][4], float (&acc_k)[2][2][4],
                                         ProductTiles<Op>& s, float* s_w, const Problem& p,
                                         const Chunk& chunk, int first, const Rows* bv = nullptr) {
  constexpr int kN = kValues<Op>, kPitchX = ProductTiles<Op>::kPitchX, kEights = kN / 8;
  const WarpTile<kTile> warp;
  float w[kPasses<kTile, kN>] = {};
  MergeRows<kAccess, Op, In> rows;
  rows.load(p, chunk, first, 0);
  for (int first_v = 0; first_v < p.V; first_v += kN) {
    if (first_v > 0) __syncthreads();  // the tiles of the previous products are read
    rows.d_o.store(s.d_o, takes_tf32<In>(p));
    rows.v.store(s.v, takes_tf32<In>(p));
    rows.S.store(s.S);
    rows.dS.store(s.dS);
    float through[8];  // the chunk's decay of eight values
    if constexpr (kValueGated) {
      const int column = first_v + static_cast<int>(threadIdx.x) % kEights * 8;
      const auto b_last = load_row<kAccess>(rows_at<const float>(*bv, chunk), *bv, chunk.length - 1,
                                            chunk.length, column, p.V);
#pragma unroll
      for (int i = 0; i < 8; ++i) through[i] = exp2_ftz(b_last[i]);
    }
#pragma unroll
    for (int pass = 0; pass < kPasses<kTile, kN>; ++pass)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float S = kValueGated ? rows.S.x[pass][i] * through[i] : rows.S.x[pass][i];
        w[pass] += S * rows.dS.x[pass][i];
      }
    if (first_v + kN < p.V) rows.load(p, chunk, first, first_v + kN);
    __syncthreads();  // the tiles are written
    product<Stored::kAsIs, Stored::kTransposed, kPitchX, kPitchX>(
        acc_q, s.d_o + warp.m * kPitchX, s.S + warp.n * kPitchX, kN, takes_tf32<In>(p));
    product<Stored::kAsIs, Stored::kTransposed, kPitchX, kPitchX>(
        acc_k, s.v + warp.m * kPitchX, s.dS + warp.n * kPitchX, kN, takes_tf32<In>(p));
  }
  for_eights<kTile, kN>([&](int pass, int row, int column) {
#pragma unroll
    for (int other = 1; other < kEights; other *= 2)
      w[pass] += __shfl_xor_sync(0xffffffffu, w[pass], other);
    if (column == 0) s_w[row] = w[pass];
  });
}

// Writes dq and dk, and stores the terms of dg. On the value side `p` has values in the place of
// keys; only dv is written, and acc_q already includes the scale.
template <Access kAccess, class In, bool kOfValues = false>
__device__ __forceinline__ void merge(const float (&acc_q)[2][2][4], const float (&acc_k)[2][2][4],
                                      GateTiles& s, const Problem& p, const Chunk& chunk,
                                      int first) {
  store_product<kTile>(s.from_behind, acc_q);
  store_product<kTile>(s.before, acc_k);
  const float* b = rows_at<const float>(p.b, chunk);
  const float* suffix = suffix_at<In>(p, chunk.row, chunk.start, chunk.head);
  Eight<float> b_last;
  const auto finish = [&](const Rows& out, const Rows& intra, const Rows& in,
                          float (*rows)[kPitchG], bool to_end) {
    const bool written = to_end || !kOfValues;
    In* base = rows_at<In>(out, chunk);
    const In* x_base = rows_at<const In>(in, chunk);
    const float* intra_base = rows_at<const float>(intra, chunk);
    for_eights<kTile, kTile>([&](int pass, int row, int column) {
      const int channel = first + column;
      const bool has_suffix = to_end && suffix != nullptr;
      const auto e = load_row<kAccess>(has_suffix ? suffix : b, has_suffix ? p.b_suffix : p.b, row,
                                       chunk.length, channel, p.K);
      const auto x = load_row<kAccess>(x_base, in, row, chunk.length, channel, p.K);
      Eight<float> sum;
      if (written)
        sum = load_row_written<kAccess>(intra_base, intra, row, chunk.length, channel, p.K);
      if (to_end && pass == 0)
        b_last = load_row<kAccess>(b, p.b, chunk.length - 1, chunk.length, channel, p.K);
      float result[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float exponent = to_end && !has_suffix ? b_last[i] - e[i] : e[i];
        const float inter = row < chunk.length ? (to_end || kOfValues ? 1.f : p.scale) *
                                                     exp2_ftz(exponent) * rows[row][column + i]
                                               : 0.f;
        result[i] = written ? sum[i] + inter : 0.f;
        rows[row][column + i] = x[i] * inter;
      }
      if (written)
        store8<kAccess>(base + token_offset(out, row) + channel, result,
                        row < chunk.length ? p.K - channel : 0);
    });
  };
  __syncthreads();  // the rows are written
  finish(p.dq, p.dq_intra, p.q, s.from_behind, false);
  finish(p.dk, p.dk_intra, p.k, s.before, true);
}

// Computes dg of 16 tokens of one channel: step 6's output plus a suffix sum, an exclusive prefix
// sum and the states' contribution.
__device__ __forceinline__ void sum_gates(const GateTiles& s, float (*s_sums)[kTile],
                                          float (*s_replays)[kTile], const float* s_w,
                                          const Problem& p, const Chunk& chunk, int first) {
  constexpr int kC = static_cast<int>(kSubChunk);
  const int column = static_cast<int>(threadIdx.x) % kTile, channel = first + column;
  const int sub = static_cast<int>(threadIdx.x) / kTile, token = sub * kC;
  const GateColumn gates(p, chunk, token, channel);
  const Column<float, /*kInput=*/false> intra(p.dg_intra, chunk, token, channel, p.K);
  float dg[kC], before = 0;
#pragma unroll
  for (int i = 0; i < kC; ++i) {
    dg[i] = s.from_behind[token + i][column];
    before += s.before[token + i][column];
  }
  s_replays[sub][column] = before;
  suffix_sum(dg, s_sums, sub, column);
  if (channel >= p.K) return;
  before = 0;
  for (int other = 0; other < sub; ++other) before += s_replays[other][column];
  const float b_last =
      rows_at<const float>(p.b, chunk)[token_offset(p.b, chunk.length - 1) + channel];
  const float state = exp2_ftz(b_last) * s_w[column];
  // Without the gates themselves, differences of b have errors of 1e-3 next to a sum of resets.
  const float reset = p.g.data != nullptr ? kReset : kReset + 1e-2f;
  const int64_t out = offset_at(p.dg, chunk) + channel;
#pragma unroll
  for (int i = 0; i < kC; ++i) {
    const float sum = intra.x[i] + dg[i] + before + state;
    before += s.before[token + i][column];
    if (token + i < chunk.length)
      store_any(p.dg.data, p.dg.dtype, out + token_offset(p.dg, token + i),
                gates.x[i] <= reset ? 0.f : sum);
  }
}

// Shared memory of a block: the products' tiles, then the tiles for dg.
template <class Products>
struct MergeShared {
  union {
    Products products;
    GateTiles gates;
  };
  float w[kTile], sums[kSubChunks][kTile], prefixes[kSubChunks][kTile];
};

// Computes a chunk and 64 of its channels. multiply(acc_q, acc_k, chunk, first) must make the
// products and s.w.
template <Access kAccess, class In, bool kOfValues = false, class Shared, class Multiply>
__device__ __forceinline__ void merge_block(Shared& s, const Problem& p, Multiply&& multiply) {
  const int blocks = blocks_of(p.K, kTile);
  const int first = static_cast<int>(blockIdx.x % blocks) * kTile;
  const Chunk chunk = find_chunk(p, blockIdx.x / blocks);
  if (chunk.length == 0) return;
  const bool gated = p.dg.data != nullptr;
  if (chunk.tail) {
    const int end = min(first + kTile, p.K);
    if (!kOfValues) write_zeros<kThreads>(p.dq, chunk, first, end);
    write_zeros<kThreads>(p.dk, chunk, first, end);
    if (gated) write_zeros<kThreads>(p.dg, chunk, first, end);
    return;
  }
  float acc_q[2][2][4], acc_k[2][2][4];  // [token, K]
  clear(acc_q);
  clear(acc_k);
  multiply(acc_q, acc_k, chunk, first);
  __syncthreads();  // the products' tiles are read, s.w is written
  merge<kAccess, In, kOfValues>(acc_q, acc_k, s.gates, p, chunk, first);
  if (!gated) return;
  __syncthreads();  // the gates' tiles are written
  sum_gates(s.gates, s.sums, s.prefixes, s.w, p, chunk, first);
}

}  // namespace gla_ext::cuda
