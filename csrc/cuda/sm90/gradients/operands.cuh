// gradients.cu: q^, k^ and k_out of a chunk, from raw gates.
#pragma once

#include "copies.cuh"

namespace gla_ext::cuda::sm90 {

// q^, k^, k_out and b_C, while the first values are on their way.
template <class Gate, int kGroups>
__device__ __forceinline__ void gate_operands(Shared<kGroups>& s, const Problem& p,
                                              const Chunk& chunk, bool exact) {
  const Pair<kGroups> pair;
  const PairColumn<Gate> gates(p.g, p, chunk, pair.first, pair.channel);
  const PairColumn<bf16> q(p.q, p, chunk, pair.first, pair.channel);
  const PairColumn<bf16> k(p.k, p, chunk, pair.first, pair.channel);
  const int64_t state = chunk.state * p.K * p.V;
  const Bases bases{rows_at<const bf16>(p.d_o, chunk), rows_at<const bf16>(p.v, chunk),
                    static_cast<const bf16*>(p.S) + state, static_cast<const bf16*>(p.dS) + state,
                    rows_at<bf16>(p.dv, chunk)};
  copy_values(s, p, bases, chunk.length, 0);
  if (threadIdx.x == 0) {
    s.chunk = chunk;
    s.bases = bases;
  }
  sum_gates(s.sums.gates, gates, pair);
  __syncthreads();  // s.sums.gates is written
  auto [b, last] = cumsum(s.sums.gates, pair);
  if (pair.part == 0) pair_at(s.b_last, pair.channel) = last;
  const References rx(last.x, exact), ry(last.y, exact);
  const float out_x = exp2_ftz(last.x - rx.to), out_y = exp2_ftz(last.y - ry.to);
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) {
    b = b + to_log2(gates[i]);
    const int at = pair.offset(pair.first + i);
    const float k_x = k[i].x * exp2_ftz(rx.to - b.x), k_y = k[i].y * exp2_ftz(ry.to - b.y);
    word(s.q[0], at) = pack(q[i].x * p.scale * exp2_ftz(b.x - rx.from),
                            q[i].y * p.scale * exp2_ftz(b.y - ry.from));
    word(s.k[0], at) = pack(k_x, k_y);
    word(s.operands.k_out[0], at) = pack(k_x * out_x, k_y * out_y);
  }
}

}  // namespace gla_ext::cuda::sm90
