// Multiplies values and output gradients by their decays for the products with the states, if there
// are gates on values:
//
//   v_out = v 2^(bv_C - bv)        do_in = do 2^bv
//
// grid    (row, chunk, head, 64 values)
// reads   v, bv (bv_suffix) and, for backward, do [B, T, H, V]
// writes  v_out and, for backward, do_in [B, T, H, V], of the operand type of products
// With gates <= 0 every exponent is <= 0, so gates may be arbitrarily strong.
#include "cuda/device/launch.cuh"

namespace gla_ext::cuda {
namespace {

template <Access kAccess, class In, Decay kDecay>
__device__ __forceinline__ void gate_rows(const Rows& in, const Rows& out,
                                          const Problem& value_side, const Chunk& chunk,
                                          int first) {
  const float* b = rows_at<const float>(value_side.b, chunk);
  const float* suffix = suffix_at<In>(value_side, chunk.row, chunk.start, chunk.head);
  const bool to_end = kDecay == Decay::kToEnd, with_suffix = to_end && suffix != nullptr;
  const In* x_base = rows_at<const In>(in, chunk);
  In* out_base = rows_at<In>(out, chunk);
  for_eights<kTile, kTile>([&](int, int row, int column) {
    const int channel = first + column, length = chunk.length;
    const auto x = load_row<kAccess>(x_base, in, row, length, channel, value_side.K);
    const auto e = load_row<kAccess>(with_suffix ? suffix : b,
                                     with_suffix ? value_side.b_suffix : value_side.b, row, length,
                                     channel, value_side.K);
    const auto b_last =
        load_row<kAccess>(b, value_side.b, length - 1, length, channel, value_side.K);
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      y[i] = x[i] * exp2_ftz(to_end && !with_suffix ? b_last[i] - e[i] : e[i]);
    store8<kAccess>(out_base + token_offset(out, row) + channel, y,
                    row < length ? value_side.K - channel : 0);
  });
}

}  // namespace

namespace steps {

template <Access kAccess, class In>
__global__ void __launch_bounds__(kThreads) gate_values(Problem p, Problem value_side) {
  const int blocks = blocks_of(value_side.K, kTile);
  const int first = static_cast<int>(blockIdx.x % blocks) * kTile;
  const Chunk chunk = find_chunk(value_side, blockIdx.x / blocks);
  if (chunk.length == 0 || chunk.tail) return;
  gate_rows<kAccess, In, Decay::kToEnd>(value_side.k, p.v, value_side, chunk, first);
  if (p.d_o.data != nullptr)
    gate_rows<kAccess, In, Decay::kFromStart>(value_side.q, p.d_o, value_side, chunk, first);
}

}  // namespace steps

void launch_gate_values(const Problem& p, const Problem& value_side, cudaStream_t stream) {
  with_gated_access(p, value_side, [&](auto type, auto access) {
    launch(steps::gate_values<decltype(access)::value, typename decltype(type)::type>,
           chunk_heads(p) * blocks_of(value_side.K, kTile), kThreads, p, value_side, stream);
  });
}

}  // namespace gla_ext::cuda
