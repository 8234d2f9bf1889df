// Backward step 6: the gradients through the scores of a chunk.
//
//   dq_i = sum_(j <= i) dA_ij k_j 2^(b_i - b_j)
//   dk_j = sum_(i >= j) dA_ij q_i 2^(b_i - b_j)
//   dg_t = sum_(i >= t) [q_i dq_i - k_i dk_i]
//
// dg is formed from the operands that were multiplied: a pair (i, j) adds the same number to both
// sums, so that what must cancel does, up to the rounding of the sums.
//
// grid    (row, chunk, head, kColumns key channels)
// reads   q, k, b [B, T, H, K], dA [B, T, H, C], tiers; for strong chunks g if given
// writes  dq_intra, dk_intra and, if there are gates, dg_intra [B, T, H, K] fp32
//
// There are two kernels, each of which skips the other's chunks. For tier-1 chunks, tiles are
// multiplied, with fp32 accumulation; strong chunks are summed in fp32 (strong/intra_grads.cuh).
#include "cuda/device/launch.cuh"
#include "strong/intra_grads.cuh"

namespace gla_ext::cuda {
namespace {

template <class Op>
struct Tier1Tiles {
  Op q[kTile * kPitch<Op, kColumns<Op>>];
  Op k[kTile * kPitch<Op, kColumns<Op>>];
  float rows[kTile][kColumns<Op> + 8];  // [token][K]: products, to be written as whole rows
  float sums[kSubChunks][kColumns<Op>];
};

// The gradients of a tier-1 chunk for kColumns of its key channels.
template <Access kAccess, class Op, class In>
__device__ __forceinline__ void tier1(Tier1Tiles<Op>& s, const Op* s_dA, const Problem& p,
                                      const Chunk& chunk, int first) {
  constexpr int kN = kColumns<Op>, kPitchX = kPitch<Op, kN>, kPitchA = kPitch<Op, kTile>;
  constexpr int kC = static_cast<int>(kSubChunk);
  load_tier1_operands<kAccess, Op, In, kN>(s.q, s.k, p, chunk, first);
  __syncthreads();  // the tiles are written
  const WarpTile<kN> warp;
  float acc_q[2][WarpTile<kN>::kN][4], acc_k[2][WarpTile<kN>::kN][4];  // [token, K]
  clear(acc_q);
  clear(acc_k);
  product<Stored::kAsIs, Stored::kAsIs, kPitchA, kPitchX>(acc_q, s_dA + warp.m * kPitchA,
                                                          s.k + warp.n, kTile, takes_tf32<In>(p));
  product<Stored::kTransposed, Stored::kAsIs, kPitchA, kPitchX>(acc_k, s_dA + warp.m, s.q + warp.n,
                                                                kTile, takes_tf32<In>(p));
  const float* b = rows_at<const float>(p.b, chunk);
  // dq = 2^(b - r) rows and dk = 2^(r - b) rows. The terms of dg remain in db.
  Eight<float> b_last;
  float db[kPasses<kTile, kN>][8];
  const auto finish = [&](const Rows& out, float sign, const Op* operand) {
    float* base = rows_at<float>(out, chunk);
    for_eights<kTile, kN>([&](int pass, int row, int column) {
      const int channel = first + column, valid = row < chunk.length ? p.K - channel : 0;
      const auto b_row = load_row<kAccess>(b, p.b, row, chunk.length, channel, p.K);
      if (pass == 0)
        b_last = load_row<kAccess>(b, p.b, chunk.length - 1, chunk.length, channel, p.K);
      const auto x = load8_aligned(&s.rows[row][column]);
      const auto y = load8_aligned(operand + row * kPitchX + column);
      float result[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        result[i] = x[i] * exp2_ftz(sign * (b_row[i] - reference_of(b_last[i])));
        // An explicit mul and fma, so that the rounding does not depend on kAccess.
        db[pass][i] = sign > 0 ? __fmul_rn(x[i], y[i]) : __fmaf_rn(-x[i], y[i], db[pass][i]);
      }
      store8<kAccess>(base + token_offset(out, row) + channel, result, valid);
    });
  };
  store_product<kN>(s.rows, acc_q);
  __syncthreads();  // the rows are written
  finish(p.dq_intra, 1.f, s.q);
  __syncthreads();  // the rows are read
  store_product<kN>(s.rows, acc_k);
  __syncthreads();  // the rows are written
  finish(p.dk_intra, -1.f, s.k);
  if (p.dg_intra.data == nullptr) return;
  for_eights<kTile, kN>([&](int pass, int row, int column) {
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      *reinterpret_cast<float4*>(&s.rows[row][column + i]) =
          make_float4(db[pass][i], db[pass][i + 1], db[pass][i + 2], db[pass][i + 3]);
  });
  __syncthreads();  // db is written

  const int column = static_cast<int>(threadIdx.x) % kN, sub = static_cast<int>(threadIdx.x) / kN;
  float sums[kC];
#pragma unroll
  for (int i = 0; i < kC; ++i) sums[i] = sub < kSubChunks ? s.rows[sub * kC + i][column] : 0.f;
  suffix_sum(sums, s.sums, sub, column);
  store_column(p.dg_intra, sums, p, chunk, sub, first + column);
}

template <Access kAccess, class In>
__device__ __forceinline__ void load_dA(Operand<In>* s_dA, const Problem& p, const Chunk& chunk) {
  using Op = Operand<In>;
  const int64_t base = offset_at(p.dA, chunk);
  for_eights<kTile, kTile>([&](int, int row, int column) {
    store8(
        s_dA + row * kPitch<Op, kTile> + column,
        load8_operands<kAccess, Op>(p.dA.data, p.dA.dtype, base + token_offset(p.dA, row) + column,
                                    row < chunk.length ? 8 : 0, takes_tf32<In>(p)));
  });
}

}  // namespace

namespace steps {

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, 2) intra_grads(Problem p) {
  using Op = Operand<In>;
  __shared__ __align__(16) Op s_dA[kTile * kPitch<Op, kTile>];
  __shared__ __align__(16) Tier1Tiles<Op> s_tiles;
  const int blocks = blocks_of(p.K, kColumns<Op>);
  const int first = static_cast<int>(blockIdx.x % blocks) * kColumns<Op>;
  const Chunk chunk = find_chunk(p, blockIdx.x / blocks);
  if (chunk.length == 0) return;
  if (chunk.tail) {
    const int end = min(first + kColumns<Op>, p.K);
    write_zeros<kThreads>(p.dq_intra, chunk, first, end);
    write_zeros<kThreads>(p.dk_intra, chunk, first, end);
    if (p.dg_intra.data != nullptr) write_zeros<kThreads>(p.dg_intra, chunk, first, end);
    return;
  }
  if (!in_tier1(p, chunk)) return;
  load_dA<kAccess, In>(s_dA, p, chunk);
  tier1<kAccess, Op, In>(s_tiles, s_dA, p, chunk, first);
}

template <class In>
__global__ void __launch_bounds__(kThreads, sizeof(Operand<In>) == 2 ? 2 : 1)
    strong_intra_grads(Problem p) {
  using Op = Operand<In>;
  __shared__ __align__(16) Op s_dA[kTile * kPitch<Op, kTile>];
  __shared__ __align__(16) StrongTiles<Op> s_tiles;
  const int blocks = blocks_of(p.K, kColumns<Op>);
  for_strong_chunks(p, blocks, [&](const Chunk& chunk, int block) {
    load_dA<Access::kGeneral, In>(s_dA, p, chunk);
    strong<Op, In>(s_tiles, s_dA, p, chunk, block * kColumns<Op>);
  });
}

}  // namespace steps

void launch_intra_grads(const Problem& p, cudaStream_t stream) {
  with_dtype_and_access(p, [&](auto type, auto access) {
    using In = typename decltype(type)::type;
    const int64_t blocks = blocks_of(p.K, kColumns<Operand<In>>);
    launch(steps::intra_grads<decltype(access)::value, In>, chunk_heads(p) * blocks, kThreads, p,
           stream);
  });
}

void launch_strong_intra_grads(const Problem& p, cudaStream_t stream) {
  with_dtype(p.dtype, [&](auto type) {
    using In = typename decltype(type)::type;
    const int64_t blocks = blocks_of(p.K, kColumns<Operand<In>>);
    launch(steps::strong_intra_grads<In>, strong_grid(p, blocks), kThreads, p, stream);
  });
}

}  // namespace gla_ext::cuda
