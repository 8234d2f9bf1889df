// Backward step 7 with gates on values, for the keys,
//
//   dq_i = dq_intra_i + scale 2^b_i (S do_in_i)
//   dk_j = dk_intra_j + 2^(b_C - b_j) (dS' v_out_j)
//   dg_t = .. + 2^b_C rowsum_V(S 2^bv_C dS')
//
// and the same on the value side, with o_inter = 2^bv (scale q 2^b) S, the state's contribution to
// o:
//
//   dv_j  = dv_intra_j + 2^(bv_C - bv_j) ((k_j 2^(b_C - b_j)) dS')
//   dgv_t = dgv_intra_t + sum_(i >= t) do_i o_inter_i + sum_(j < t) v_j dv_inter_j
//           + 2^bv_C colsum_K(2^b_C S dS'), and 0 at a reset
//
// grid    (row, chunk, head, 64 key channels); (row, chunk, head, 64 values)
// reads   q, k, b (b_suffix, g), do_in, v_out, S, dS' of the chunk and the outputs of step 6; on
//         the value side do, v, bv (bv_suffix), gv and the outputs of its step 6
// writes  dq, dk and, if there are gates, dg [B, T, H, K]; dv, dgv [B, T, H, V]
// Accumulation, dg and dgv are fp32; kValues values or kKeys keys at a time.
#include "cuda/steps/merge.cuh"

namespace gla_ext::cuda {
namespace {

template <class Op>
constexpr int kKeys = kValues<Op>;  // key channels at a time; the limit is kValues'

template <class Op>
struct KeyTiles {
  static constexpr int kPitchK = kPitch<Op, kKeys<Op>>, kPitchV = kPitch<Op, kTile>;
  Op q[kTile * kPitchK], k[kTile * kPitchK];           // [token][K]
  Op S[kKeys<Op> * kPitchV], dS[kKeys<Op> * kPitchV];  // [K][V]
  float b_last[kMaxHeadDim];                           // [K], zero up to a whole tile
  float parts[kThreads / kTile][kTile];                // sums over part of K
};

// Loads kKeys channels of q or k, multiplied by their decays for the products with the states.
template <Access kAccess, class In, Decay kDecay, class Op>
__device__ __forceinline__ void load_keys(Op* tile, const KeyTiles<Op>& s, const Problem& p,
                                          const Rows& in, const Chunk& chunk, int first_k) {
  const float* b = rows_at<const float>(p.b, chunk);
  const float* suffix = suffix_at<In>(p, chunk.row, chunk.start, chunk.head);
  const In* base = rows_at<const In>(in, chunk);
  for_eights<kTile, kKeys<Op>>([&](int, int row, int column) {
    StateOperand<kAccess, In, kDecay> x;
    x.load(p, base, in, b, suffix, row, chunk.length, first_k + column);
    store8(tile + row * KeyTiles<Op>::kPitchK + column,
           x.template operands<Op>(p, load8_aligned(s.b_last + first_k + column), has_suffix<In>(p),
                                   row < chunk.length));
  });
}

// Loads kKeys rows and 64 columns of S or dS'.
template <Access kAccess, class In, class Op>
__device__ __forceinline__ void load_states(Op* tile, const Problem& p, const void* states,
                                            DType dtype, int64_t state, int first_k, int first_v) {
  for_eights<kKeys<Op>, kTile>([&](int, int row, int column) {
    const int k = first_k + row, v = first_v + column;
    store8(tile + row * KeyTiles<Op>::kPitchV + column,
           load8_operands<kAccess, Op>(states, dtype, state + k * p.V + v, k < p.K ? p.V - v : 0,
                                       takes_tf32<In>(p)));
  });
}

// acc_o = (scale q 2^b) S, acc_v = (k 2^(b_C - b)) dS'; colsum_K(2^b_C S dS') of 64 values goes to
// s_w.
template <Access kAccess, class In, class Op>
__device__ __forceinline__ void multiply_keys(float (&acc_o)[2][2][4], float (&acc_v)[2][2][4],
                                              KeyTiles<Op>& s, float* s_w, const Problem& p,
                                              const Chunk& chunk, int first_v) {
  constexpr int kN = kKeys<Op>, kPitchK = KeyTiles<Op>::kPitchK, kPitchV = KeyTiles<Op>::kPitchV;
  constexpr int kParts = kThreads / kTile;
  const WarpTile<kTile> warp;
  const int64_t state = chunk.state * p.K * p.V;
  const int column = static_cast<int>(threadIdx.x) % kTile;
  const int part = static_cast<int>(threadIdx.x) / kTile;
  float w = 0;  // of one value, over part of the rows
  const float* b_last = rows_at<const float>(p.b, chunk) + token_offset(p.b, chunk.length - 1);
  for (int k = static_cast<int>(threadIdx.x); k < blocks_of(p.K, kTile) * kTile; k += kThreads)
    s.b_last[k] = k < p.K ? b_last[k] : 0.f;
#pragma unroll 1
  for (int first_k = 0; first_k < p.K; first_k += kN) {
    __syncthreads();  // s.b_last is written, the previous tiles are read
    load_keys<kAccess, In, Decay::kFromStart>(s.q, s, p, p.q, chunk, first_k);
    load_keys<kAccess, In, Decay::kToEnd>(s.k, s, p, p.k, chunk, first_k);
    load_states<kAccess, In>(s.S, p, p.S, p.S_dtype, state, first_k, first_v);
    load_states<kAccess, In>(s.dS, p, p.dS, p.dS_dtype, state, first_k, first_v);
    __syncthreads();  // the tiles are written
    product<Stored::kAsIs, Stored::kAsIs, kPitchK, kPitchV>(acc_o, s.q + warp.m * kPitchK,
                                                            s.S + warp.n, kN, takes_tf32<In>(p));
    product<Stored::kAsIs, Stored::kAsIs, kPitchK, kPitchV>(acc_v, s.k + warp.m * kPitchK,
                                                            s.dS + warp.n, kN, takes_tf32<In>(p));
    for (int row = part; row < kN; row += kParts)
      w += exp2_ftz(s.b_last[first_k + row]) * to_float(s.S[row * kPitchV + column]) *
           to_float(s.dS[row * kPitchV + column]);
  }
  s.parts[part][column] = w;
  __syncthreads();  // the partial sums are written
  if (part > 0) return;
  for (int other = 1; other < kParts; ++other) w += s.parts[other][column];
  s_w[column] = w;
}

}  // namespace

namespace steps {

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, 2) merge_key_grads(Problem p, Problem value_side) {
  using Op = Operand<In>;
  __shared__ __align__(16) MergeShared<ProductTiles<Op>> s;
  merge_block<kAccess, In>(s, p, [&](auto& acc_q, auto& acc_k, const Chunk& chunk, int first) {
    multiply<kAccess, Op, In, /*kValueGated=*/true>(acc_q, acc_k, s.products, s.w, p, chunk, first,
                                                    &value_side.b);
  });
}

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads, 2) merge_value_grads(Problem p, Problem value_side) {
  using Op = Operand<In>;
  __shared__ __align__(16) MergeShared<KeyTiles<Op>> s;
  merge_block<kAccess, In, /*kOfValues=*/true>(
      s, value_side, [&](auto& acc_o, auto& acc_v, const Chunk& chunk, int first) {
        multiply_keys<kAccess, In>(acc_o, acc_v, s.products, s.w, p, chunk, first);
      });
}

}  // namespace steps

void launch_merge_key_grads(const Problem& p, const Problem& value_side, cudaStream_t stream) {
  with_gated_access(p, value_side, [&](auto type, auto access) {
    launch(steps::merge_key_grads<decltype(access)::value, typename decltype(type)::type>,
           chunk_heads(p) * blocks_of(p.K, kTile), kThreads, p, value_side, stream);
  });
}

void launch_merge_value_grads(const Problem& p, const Problem& value_side, cudaStream_t stream) {
  with_gated_access(p, value_side, [&](auto type, auto access) {
    launch(steps::merge_value_grads<decltype(access)::value, typename decltype(type)::type>,
           chunk_heads(p) * blocks_of(p.V, kTile), kThreads, p, value_side, stream);
  });
}

}  // namespace gla_ext::cuda
