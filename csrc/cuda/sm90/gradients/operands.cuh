// gradients.cu: q^, k^ and k_out of a chunk, from raw gates.
#pragma once

#include "copies.cuh"

namespace gla_ext::cuda::sm90 {

// A thread has a pair of channels in a part of the tokens.
template <int kGroups>
struct Pair {
  int channel, first;  // key channel, token
  int part;

  __device__ __forceinline__ Pair() : Pair(thread_index()) {}
  __device__ __forceinline__ explicit Pair(int thread)
      : channel(2 * (thread % (kGroups * kTile / 2))),
        first(thread / (kGroups * kTile / 2) * static_cast<int>(kSubChunk)),
        part(thread / (kGroups * kTile / 2)) {}
  // Byte offset in the tiles of q^, k^ and k_out.
  __device__ __forceinline__ int offset(int token) const {
    return channel / kTile * kTileBytes + swizzled(token, channel % kTile / 8) + channel % 8 * 2;
  }
};

// The pair's elements of a row a token, as they lie in memory, on their way.
template <class T>
struct PairColumn {
  using Word = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;
  Word x[kSubChunk];

  __device__ __forceinline__ PairColumn(const Rows& r, const Problem& p, const Chunk& chunk,
                                        int first, int channel) {
    const T* at = rows_at<const T>(r, chunk) + token_offset(r, first) + channel;
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i, at += r.stride_t)
      x[i] =
          channel < p.K && first + i < chunk.length ? *reinterpret_cast<const Word*>(at) : Word{};
  }
  __device__ __forceinline__ float2 operator[](int i) const { return unpack(x[i]); }
};

__device__ __forceinline__ float2 to_log2(float2 g) {
  return make_float2(cuda::to_log2(g.x), cuda::to_log2(g.y));
}
// The pair's b before its part of the tokens, and after the last.
struct Cumsum {
  float2 b = make_float2(0.f, 0.f), last = b;
};
template <class Gate, int kGroups>
__device__ __forceinline__ void sum_gates(Shared<kGroups>& s, const PairColumn<Gate>& gates,
                                          const Pair<kGroups>& pair) {
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) sum = sum + to_log2(gates[i]);
  pair_at(s.sums.gates[pair.part], pair.channel) = sum;
}
template <int kGroups>
__device__ __forceinline__ Cumsum cumsum(Shared<kGroups>& s, const Pair<kGroups>& pair) {
  Cumsum c;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float2 x = pair_at(s.sums.gates[part], pair.channel);
    if (part < pair.part) c.b = c.b + x;
    c.last = c.last + x;
  }
  return c;
}

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
  sum_gates(s, gates, pair);
  __syncthreads();  // s.sums.gates is written
  auto [b, last] = cumsum(s, pair);
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
