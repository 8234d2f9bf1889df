// gradients/chunk: dq, dk and dg from the accumulators.
#pragma once

#include "products.cuh"

namespace gla_ext::cuda::sm90::gradients::chunk {

// Stores x and y as fp32 tiles.
template <int kTiles>
__device__ __forceinline__ void store_accumulators(float (&to)[2][kTiles][kTile * kTile],
                                                   Accumulators<kTiles>& acc) {
  const Place at;
  acc.for_tiles([&](const float (&d)[32], bool is_x, int tile) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        pair_at(to[!is_x][tile], swizzled_float(at.row + 8 * e, 8 * j + 2 * at.t)) =
            make_float2(d[4 * j + 2 * e], d[4 * j + 2 * e + 1]);
  });
}

// The channel pair's elements in successive tokens.
template <class T>
struct ChannelPairRow {
  T* at;
  int64_t stride;

  template <int kGroups>
  __device__ __forceinline__ ChannelPairRow(const Rows& r, const Chunk& chunk,
                                            const ChannelPair<kGroups>& pair, int token = 0)
      : at(own_rows_at<T>(r, chunk) + token_offset(r, pair.first + token) + pair.channel),
        stride(r.stride_t) {}
  __device__ __forceinline__ void move(int tokens) { at += tokens * stride; }
  __device__ __forceinline__ void write(float2 x) const { store2<Access::kFast>(at, x.x, x.y, 2); }
};

// Reads a channel pair of a chunk's rows.
template <class T>
__device__ __forceinline__ float2 read_pair(const T* rows, const Rows& r, int token, int channel) {
  return load2<Access::kFast>(rows + token_offset(r, token) + channel, 2);
}
template <class T>
__device__ __forceinline__ float2 read_own_pair(const Rows& r, const Chunk& chunk, int token,
                                                int channel) {
  return read_pair(own_rows_at<const T>(r, chunk), r, token, channel);
}

// Writes dq and dk from x and y; a thread has a channel pair in a sub-chunk. terms: what dg sums
// over tokens. In tier 1 the terms are formed from the rounded operands, because the pairs that
// must cancel were made of these; in strong chunks from q and k.
template <bool kStrong, class Gate, int kTiles>
__device__ __forceinline__ void write_inputs(float2 (&terms)[kSubChunk], Shared<kTiles>& s,
                                             const ChannelPairColumn<Gate>& gates, const Problem& p,
                                             const Chunk& chunk) {
  const ChannelPair<kGroupsFor<kTiles>> pair;
  if (kHasAbsent<kTiles> && pair.channel >= kTiles * kTile) return;
  auto [b, last] = cumsum(s.sums().gates, pair);
  const bool strong_x = kStrong && !(kReady<kTiles> && fabsf(last.x) <= kTierRange);
  const bool strong_y = kStrong && !(kReady<kTiles> && fabsf(last.y) <= kTierRange);
  const References rx(last.x, strong_x), ry(last.y, strong_y);
  const int tile = pair.channel / kTile, column = pair.channel % kTile;
  ChannelPairRow<bf16> dq_row(p.dq, chunk, pair), dk_row(p.dk, chunk, pair);
  float2 sum = make_float2(0.f, 0.f), inter = sum;
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i, dq_row.move(1), dk_row.move(1)) {
    const int token = pair.first + i, at = pair.offset(token);
    const bool there = pair.channel < p.K && token < chunk.length;
    b = b + to_log2(gates[i]);
    const float2 x = pair_at(s.gradients[0][tile], swizzled_float(token, column)),
                 y = pair_at(s.gradients[1][tile], swizzled_float(token, column));
    float2 dq = make_float2(p.scale * exp2_ftz(b.x - rx.from), p.scale * exp2_ftz(b.y - ry.from));
    float2 dk = make_float2(exp2_ftz(rx.to - b.x), exp2_ftz(ry.to - b.y));
    dq = dq * x;
    dk = dk * y;
    float2 to_q, to_k;  // the terms of dg
    if constexpr (kStrong) {
      const float2 none = make_float2(0.f, 0.f);
      to_q = there ? read_own_pair<bf16>(p.q, chunk, token, pair.channel) * dq : none;
      to_k =
          there ? read_pair(rows_at<const bf16>(p.k, chunk), p.k, token, pair.channel) * dk : none;
      inter = inter + to_k;
    } else {
      to_q = unpack(in_tile<uint32_t>(*s.q, at)) * x;
      to_k = unpack(in_tile<uint32_t>(*s.k, at)) * y;
    }
    terms[i] = to_q - to_k;
    sum = sum + terms[i];
    if (!there) continue;
    if constexpr (kStrong) {
      dq = dq + read_own_pair<float>(p.dq_intra, chunk, token, pair.channel);
      dk = dk + read_own_pair<float>(p.dk_intra, chunk, token, pair.channel);
    }
    dq_row.write(dq);
    dk_row.write(dk);
  }
  pair_at(s.sums().dg[pair.sub_chunk], pair.channel) = sum;
  if (kStrong) pair_at(s.sums().inter[pair.sub_chunk], pair.channel) = inter;
}

// Writes dg, by the same threads from their terms, last token first. kScaled: rowsum(S dS') was
// made from scaled states, so it lacks 2^b_C in channels out of range.
template <bool kStrong, bool kScaled, class Gate, int kTiles>
__device__ __forceinline__ void write_gates(const float2 (&terms)[kSubChunk], Shared<kTiles>& s,
                                            const ChannelPairColumn<Gate>& gates, const Problem& p,
                                            const Chunk& chunk) {
  constexpr int kLast = static_cast<int>(kSubChunk) - 1;
  const ChannelPair<kGroupsFor<kTiles>> pair;
  if (pair.channel >= p.K) return;
  const float2 last = cumsum(s.sums().gates, pair).last,
               states = pair_at(s.sums().states, pair.channel);
  float2 sum = states;
  if (!kReady<kTiles> || (kStrong && kScaled && !(fabsf(last.x) <= kTierRange)))
    sum.x *= exp2_ftz(last.x);
  if (!kReady<kTiles> || (kStrong && kScaled && !(fabsf(last.y) <= kTierRange)))
    sum.y *= exp2_ftz(last.y);
#pragma unroll
  for (int part = 0; part < kSubChunks; ++part)
    sum = sum + pair_at(s.sums().inter[part], pair.channel);
  for (int part = kSubChunks - 1; part > pair.sub_chunk; --part)
    sum = sum + pair_at(s.sums().dg[part], pair.channel);
  ChannelPairRow<Gate> dg_row(p.dg, chunk, pair, kLast);
#pragma unroll
  for (int i = kLast; i >= 0; --i) {
    const int token = pair.first + i;
    sum = sum + terms[i];
    if (token < chunk.length) {
      const float2 x = to_log2(gates[i]);
      float2 dg = sum;
      if (kStrong) dg = dg + read_own_pair<float>(p.dg_intra, chunk, token, pair.channel);
      dg_row.write(make_float2(x.x <= kReset ? 0.f : dg.x, x.y <= kReset ? 0.f : dg.y));
    }
    dg_row.move(-1);
  }
}

template <bool kStrong, bool kScaled = true, class Gate, int kTiles>
__device__ __forceinline__ void write_gradients(Shared<kTiles>& s,
                                                const ChannelPairColumn<Gate>& gates,
                                                const Problem& p) {
  const Chunk chunk = s.chunk;
  float2 terms[kSubChunk];
  write_inputs<kStrong>(terms, s, gates, p, chunk);
  __syncthreads();  // the sums for dg are written
  write_gates<kStrong, kScaled>(terms, s, gates, p, chunk);
}

}  // namespace gla_ext::cuda::sm90::gradients::chunk
