// Gating of a chunk whose rows are in shared memory, by the producers of the forward sweeps and of
// states/cluster.cu: makes q^, k^ and A in place, and the state's factors.
//
// Other code gates too, but keeps the data elsewhere or has fewer registers: prepare/prepare.cu and
// gradients/chunk/operands.cuh (sums by channel pairs), states/fused/produce.cuh (unscaled states,
// without references), gradients/small_sweep/operands.cuh (half of the columns at a time).
#pragma once

#include "cuda/device/gates.cuh"
#include "cumsum.cuh"
#include "scores.cuh"

namespace gla_ext::cuda::sm90 {

// A chunk in shared memory while it is gated.
struct GatedChunk {
  Tile *q, *k;  // rows [token][K], replaced by q^ and k^
  Tile* g;      // [token][K] (fp32: two tiles), replaced by A [token][token]
  // Factors of the state's key channels. enter: 2^r, as the state enters the chunk. middle: 1, or
  // 2^b_C for a channel out of range, before the product is added. leave: 2^(b_C - r), or 1 for a
  // channel out of range.
  float *enter, *middle, *leave;
  int* strong;         // whether the chunk has strong gates
  float* b_last;       // log2 units
  float2* references;  // x, y of a channel: q^ = q 2^(b - x) and k^ = k 2^(x + y - b)
};

// Hooks that all threads of a producer call. begin(): the rows of gates have arrived, and a barrier
// separates them from the previous work. await_rows(): called before the barrier after which rows
// of q and k are read. ready(): everything but A is written; not called by gate_keys.
struct NothingBetween {
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void await_rows() const {}
  __device__ __forceinline__ void ready() const {}
};

// Runs on a warpgroup; `barrier` is a barrier of its threads. If kColumns < 64 = K, several
// warpgroups share a chunk: each has kColumns key channels, starting at `first`, and as many
// columns of A, and `whole` is a barrier of all these warpgroups.
template <int K, class Barrier, class Gate = bf16, int kColumns = kTile, class Whole = Barrier>
struct Gating {
  static_assert((kColumns == kTile && kGateTiles<Gate> == 1) || K == kTile);
  const Tile& triangle;
  int thread;
  Barrier barrier;
  Whole whole = barrier;
  int first = 0;

  // Gates the chunk and makes A. On return the stores of A to shared memory have been issued,
  // without a barrier after them.
  template <class Between = NothingBetween>
  __device__ __forceinline__ void operator()(const GatedChunk& chunk, float scale,
                                             const Between& between = {}) const {
    gate_operands(chunk, scale, between);
    float A[kColumns / 2];
    begin_scores<K, kColumns>(A, chunk.q, chunk.k, first);
    const bool strong = __any_sync(0xffffffffu, *chunk.strong);
    wait_for_products<0>();
    place_scores<kColumns>(*chunk.g, A, strong, first, thread);
  }
  // Makes everything but A.
  template <class Between>
  __device__ __forceinline__ void gate_operands(const GatedChunk& chunk, float scale,
                                                const Between& between) const {
    gate_rows</*kQueries=*/true>(chunk, scale, between);
    fence_for_products();
    whole();  // q^ and k^ are written, the gates read
    between.ready();
  }
  // Makes only k^ and the factors. `strong` then tells only whether b_C of a channel is out of
  // range, without regard to the other tokens: the state needs no more.
  template <class Between>
  __device__ __forceinline__ void gate_keys(const GatedChunk& chunk, const Between& between) const {
    gate_rows</*kQueries=*/false>(chunk, 1.f, between);
  }

 private:
  template <bool kQueries, class Between>
  __device__ __forceinline__ void gate_rows(const GatedChunk& chunk, float scale,
                                            const Between& between) const {
    if (thread == 0 && first == 0) *chunk.strong = 0;
    whole();  // the rows have arrived, `strong` is cleared
    between.begin();
#pragma unroll
    for (int tile = 0; tile < K / 64; ++tile)
      clamp_gates<Gate, kColumns>(chunk.g + tile, first, thread);
    fence_for_products();
    barrier();  // the gates are clamped
#pragma unroll 1
    for (int tile = 0; tile < K / 64; ++tile) gate<kQueries>(chunk, tile, scale, between);
  }

  // Sets a channel's references and the factors of the state that follow from them.
  __device__ __forceinline__ void set_channel(const GatedChunk& chunk, int channel) const {
    const float b_last = chunk.b_last[channel];
    const bool strong = !(fabsf(b_last) <= kTierRange);
    const float from = strong ? 0.f : reference_of(b_last), to = strong ? b_last : from;
    chunk.references[channel] = make_float2(from, to - from);
    chunk.enter[channel] = exp2_ftz(from);
    chunk.middle[channel] = strong ? exp2_ftz(b_last) : 1.f;
    chunk.leave[channel] = strong ? 1.f : exp2_ftz(b_last - from);
    if (strong) *chunk.strong = 1;
  }

  // Makes k^, and if kQueries q^, for the channels of a tile.
  template <bool kQueries, class Between>
  __device__ __forceinline__ void gate(const GatedChunk& chunk, int tile, float scale,
                                       const Between& between) const {
    float b[kColumns / 2];
    sum_gates<Gate>(b, triangle, chunk.g[tile], first);
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4, t = lane % 4;
    float* b_last = chunk.b_last + 64 * tile + first;
    if (row + 8 == kTile - 1) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
        *reinterpret_cast<float2*>(b_last + 8 * j + 2 * t) =
            make_float2(kLog2E * b[4 * j + 2], kLog2E * b[4 * j + 3]);
    }
    barrier();  // b_last is written
    if (thread < kColumns) set_channel(chunk, 64 * tile + first + thread);
    between.await_rows();
    barrier();  // the references are written
    bool out = false;
    const float2* references = chunk.references + 64 * tile + first;
    const Fragments fragments;
    const Operand tile_q = chunk.q[tile], tile_k = chunk.k[tile];
    constexpr int kBatch = 2;  // groups of 16 channels that are in flight at once
#pragma unroll
    for (int batch = 0; batch < kColumns / 16; batch += kBatch) {
      uint32_t q[kBatch][4], k[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if constexpr (kQueries) fragments.load(q[i], tile_q, first / 16 + batch + i);
        fragments.load(k[i], tile_k, first / 16 + batch + i);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int j = 2 * (batch + i) + x / 2, at = 4 * j + x % 2 * 2;
          const auto r = *reinterpret_cast<const float4*>(references + 8 * j + 2 * t);
          const float e0 = b[at] * kLog2E - r.x, e1 = b[at + 1] * kLog2E - r.z;
          const float2 k_pair = unpack(k[i][x]);
          if constexpr (kQueries) {
            out |= !(fabsf(e0) <= kTierRange / 2) || !(fabsf(e1) <= kTierRange / 2);
            const float2 q_pair = unpack(q[i][x]);
            q[i][x] = pack(q_pair.x * (scale * exp2_ftz(e0)), q_pair.y * (scale * exp2_ftz(e1)));
          }
          k[i][x] = pack(k_pair.x * exp2_ftz(r.y - e0), k_pair.y * exp2_ftz(r.w - e1));
        }
        if constexpr (kQueries) fragments.store(tile_q, first / 16 + batch + i, q[i]);
        fragments.store(tile_k, first / 16 + batch + i, k[i]);
      }
    }
    if (out) *chunk.strong = 1;
  }
};

}  // namespace gla_ext::cuda::sm90
