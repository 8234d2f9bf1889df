// What a consumer of forward.cu does.
#pragma once

#include "shared.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// A consumer's part of the state, [64 values][K].
template <int K>
struct State {
  float x[K / 2];

  // f(x, key, value)
  template <class F>
  __device__ __forceinline__ void for_elements(const Problem& p, int first_v, F&& f) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < K / 2; ++i) {
      const int v = first_v + row + i / 2 % 2 * 8, k = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      if (v < p.V && k < p.K) f(x[i], k, v);
    }
  }

  __device__ __forceinline__ void load(const Problem& p, const Segment& segment, int first_v) {
#pragma unroll
    for (int i = 0; i < K / 2; ++i) x[i] = 0;
    const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
    if (segment.first && p.h0 != nullptr) {
      const float* h0 = p.h0 + (segment.n * p.H + segment.head) * matrix;
      for_elements(p, first_v, [&](float& y, int k, int v) {
        y = h0[p.state_v_first ? v * p.K + k : k * p.V + v];
      });
    } else if (!segment.first) {
      const float* entering = p.segment_states + segment.state * matrix;
      for_elements(p, first_v, [&](float& y, int k, int v) { y = entering[k * p.V + v]; });
    }
  }

  __device__ __forceinline__ void store(const Problem& p, const Segment& segment, int first_v) {
    if (!segment.last || p.ht == nullptr) return;
    float* ht = p.ht + (segment.n * p.H + segment.head) * static_cast<int64_t>(p.K) * p.V;
    for_elements(p, first_v, [&](float y, int k, int v) {
      ht[p.state_v_first ? v * p.K + k : k * p.V + v] = y;
    });
  }

  // By factors of the key channels.
  __device__ __forceinline__ void scale(const float* factors) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < K / 8; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * t);
      x[4 * j] *= f.x;
      x[4 * j + 1] *= f.y;
      x[4 * j + 2] *= f.x;
      x[4 * j + 3] *= f.y;
    }
  }
};

// o^T [64 values][64 tokens] of a warpgroup by way of the tile of its v, so that whole rows are
// written.
__device__ __forceinline__ void store_output(unsigned char* tile, const float (&o)[32], int group,
                                             const Problem& p, const Segment& segment, int chunk,
                                             int first_v) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, lane = thread % 32;
  group_barrier<kConsumerBarrier>(group);  // v is read
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int token = 8 * j + lane % 8 + lane / 16 * 8, part = thread / 32 * 2 + lane / 8 % 2;
    store_transposed(shared_address(tile) + swizzled(token, part), pack(o[4 * j], o[4 * j + 1]),
                     pack(o[4 * j + 2], o[4 * j + 3]), pack(o[4 * j + 4], o[4 * j + 5]),
                     pack(o[4 * j + 6], o[4 * j + 7]));
  }
  group_barrier<kConsumerBarrier>(group);  // o is written
  bf16* out = rows_at<bf16>(p.o, segment.row, segment.token_of(chunk), segment.head);
  const int length = segment.length_of(chunk);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = thread / 8 + 16 * i, part = thread % 8, column = first_v + 8 * part;
    if (token < length && column < p.V)
      *reinterpret_cast<uint4*>(out + token_offset(p.o, token) + column) =
          *reinterpret_cast<const uint4*>(tile + swizzled(token, part));
  }
}

// Zeros in the rows of o behind the last sequence of a packed batch.
__device__ __forceinline__ void write_tail(const Problem& p, const Segment& segment, int first_v) {
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  const int column = first_v + thread % 8 * 8;
  if (column >= p.V) return;
  bf16* o = rows_at<bf16>(p.o, 0, segment.start, segment.head) + column;
  const int64_t end =
      segment.chunks * kChunk < segment.length ? segment.chunks * kChunk : segment.length;
  for (int64_t token = thread / 8; token < end; token += kGroupThreads / 8)
    *reinterpret_cast<uint4*>(o + token * p.o.stride_t) = make_uint4(0, 0, 0, 0);
}

template <int K, int kMembers>
__device__ __forceinline__ void consume(Unit<K, kMembers>& s, const Problem& p, int group,
                                        int block_v) {
  constexpr auto kSummed = Contiguous::kSummed, kOther = Contiguous::kOther;
  const Segment& segment = s.segment;
  const int member = group % kMembers, first_v = block_v + kTile * member;
  if (segment.tail) return write_tail(p, segment, first_v);
  const bool writes_tiers = first_v == 0 && threadIdx.x % kGroupThreads == 0;
  State<K> state;
  state.load(p, segment, first_v);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int stage = chunk % kStages;
    auto& tiles = s.stages[stage];
    const uint32_t q = shared_address(tiles.q), k = shared_address(tiles.k);
    const uint32_t v = shared_address(tiles.v) + member * kTileBytes;
    if (chunk > 0) state.scale(s.leave[(chunk - 1) % (kStages + 1)]);
    wait(&s.full[stage], static_cast<uint32_t>(chunk / kStages) & 1);
    const bool exact = __any_sync(0xffffffffu, s.exact[stage]);

    state.scale(s.enter[stage]);
    uint32_t S_operand[K / 16][4];
#pragma unroll
    for (int i = 0; i < K / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        S_operand[i][e] = pack(state.x[8 * i + 2 * e], state.x[8 * i + 2 * e + 1]);
    if (exact) state.scale(s.middle[stage]);
    float o[32];  // [64 values][64 tokens]
    begin_products();
#pragma unroll
    for (int i = 0; i < K / 16; ++i)
      product(o, S_operand[i], descriptor(q + i / 4 * kTileBytes + i % 4 * kStepBytes, 0), i > 0);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<kOther, kSummed>(o, descriptor(v + 2048 * i, kTileBytes),
                               descriptor(shared_address(tiles.g) + kStepBytes * i, 0));
    commit_products();
#pragma unroll
    for (int i = 0; i < 4; ++i)
      product<kOther, kOther>(state.x, descriptor(v + 2048 * i, kTileBytes),
                              descriptor(k + 2048 * i, kTileBytes));
    commit_products();
    wait_for_products<0>();
    store_output(tiles.v + member * kTileBytes, o, group, p, segment, chunk, first_v);
    arrive(&s.empty[stage]);
    if (writes_tiers)
      *reinterpret_cast<uint64_t*>(p.tiers + segment.chunk_head(p, chunk) * kMaxTierBlocks) = exact;
  }
  if (segment.chunks > 0) state.scale(s.leave[(segment.chunks - 1) % (kStages + 1)]);
  state.store(p, segment, first_v);
}

}  // namespace
}  // namespace gla_ext::cuda::sm90
