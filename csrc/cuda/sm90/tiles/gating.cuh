// Gating of a chunk whose rows are in shared memory, by the producers of the forward sweeps and of
// states/cluster.cu: makes q^, k^ and A in place, and the state's factors.
//
// Other code gates too, but keeps the data elsewhere or has fewer registers: prepare/prepare.cu and
// gradients/chunk/operands.cuh (sums by channel pairs), states/fused/produce.cuh (unscaled states,
// without references), gradients/small_sweep/operands.cuh (half of the columns at a time).
//
// Past alone (see device/gates.cuh): A of a strong chunk's first rows needs k 2^-b of all channels,
// but the state k 2^(b_C - b) of those out of range. The latter takes the place of the gates until
// A is made. k 2^-b may be inf or NaN in strong rows, which only scores that are left out read.
#pragma once

#include "channels.cuh"
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
  int* strong;         // whether the chunk has strong gates; past alone, kStrong<> of these
  float* b_last;       // log2 units
  float2* references;  // x, y of a channel: q^ = q 2^(b - x) and k^ = k 2^(x + y - b)
};

// After the first number of `strong` follow, past alone, one for each warp that gates a chunk: how
// many rows there are from the warp's first strong row on.
template <int kGroupsOfChunk>
constexpr int kStrong = 1 + kGroupsOfChunk * kGroupThreads / 32;
template <int kNumbers>
__device__ __forceinline__ int strong_rows(const int (&strong)[kNumbers]) {
  int rows = 0;
#pragma unroll
  for (int i = 1; i < kNumbers; ++i) rows = max(rows, strong[i]);
  return rows;
}

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
template <int K, class Barrier, class Gate = bf16, bool kPastAlone = false, int kColumns = kTile,
          class Whole = Barrier>
struct Gating {
  static_assert((kColumns == kTile && kGateTiles<Gate> == 1) || K == kTile);
  const Tile& triangle;
  int thread;
  Barrier barrier;
  Whole whole = barrier;
  int first = 0;

  // Gates the chunk and makes A. On return the stores of A to shared memory have been issued,
  // without a barrier after them. Returns how many of the last rows are strong, whose A is left
  // out.
  template <class Between = NothingBetween>
  __device__ __forceinline__ int operator()(const GatedChunk& chunk, float scale,
                                            const Between& between = {}) const {
    gate_operands(chunk, scale, between);
    float A[kColumns / 2];
    begin_scores<K, kColumns>(A, chunk.q, chunk.k, first);
    const bool strong = __any_sync(0xffffffffu, *chunk.strong);
    wait_for_products<0>();
    int rows = strong ? kTile : 0;
    if (kPastAlone && strong) {
      rows = strong_rows(*reinterpret_cast<const int (*)[kStrong<kTile / kColumns>]>(chunk.strong));
      take_keys_of_state(chunk);
    }
    place_scores<kColumns>(*chunk.g, A, kTile - rows, first, thread);
    return rows;
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
  static constexpr float kRange = kPastAlone ? kPastTierRange : kTierRange / 2;  // of b - from

  template <bool kQueries, class Between>
  __device__ __forceinline__ void gate_rows(const GatedChunk& chunk, float scale,
                                            const Between& between) const {
    if (thread == 0 && first == 0) *chunk.strong = 0;
    whole();  // the rows have arrived, `strong` is cleared
    if (kPastAlone && thread % 32 == 0) *strong_rows_of_warp(chunk, thread) = 0;
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
    const bool strong = !(fabsf(b_last) <= (kPastAlone ? kPastTierRange : kTierRange));
    const float from = strong || kPastAlone ? 0.f : reference_of(b_last);
    const float to = strong ? b_last : from;
    chunk.references[channel] = make_float2(from, to - from);
    chunk.enter[channel] = exp2_ftz(from);
    chunk.middle[channel] = strong ? exp2_ftz(b_last) : 1.f;
    chunk.leave[channel] = strong ? 1.f : exp2_ftz(b_last - from);
    if (strong) *chunk.strong = 1;
  }

  __device__ __forceinline__ int* strong_rows_of_warp(const GatedChunk& chunk, int thread) const {
    return chunk.strong + 1 + first / kColumns * (kGroupThreads / 32) + thread / 32;
  }

  // Notes the warp's first row that is out of range. out: whether the thread's are, and it has rows
  // lane / 4 and lane / 4 + 8 of the warp's.
  __device__ __forceinline__ void note_strong_rows(const GatedChunk& chunk, bool out,
                                                   bool out_below) const {
    const uint32_t rows = __ballot_sync(0xffffffffu, out);
    const uint32_t rows_below = __ballot_sync(0xffffffffu, out_below);
    const int thread = thread_index() % kGroupThreads;
    if ((rows | rows_below) == 0 || thread % 32 > 0) return;
    const int row = rows != 0 ? (__ffs(static_cast<int>(rows)) - 1) / 4
                              : (__ffs(static_cast<int>(rows_below)) - 1) / 4 + 8;
    int* noted = strong_rows_of_warp(chunk, thread);
    *noted = max(*noted, kTile - thread / 32 * 16 - row);
  }

  // Past alone, whether one of 16 channels is out of range.
  __device__ __forceinline__ bool has_strong(const float2* references) const {
    return __any_sync(0xffffffffu, references[thread_index() % 16].y != 0.f);
  }

  // Puts k^ of channels out of range in the place of their gates.
  __device__ __forceinline__ void keep_keys_of_state(const Operand& to, const Operand& tile_k,
                                                     const float2* references,
                                                     const float (&b)[kColumns / 2]) const {
    const Fragments fragments(thread_index());
    const float2* pairs = references + 2 * (thread_index() % 4);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      if (!has_strong(references + 16 * i)) continue;
      uint32_t k[4];
      fragments.load(k, tile_k, first / 16 + i);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int j = 2 * i + x / 2, at = 4 * j + x % 2 * 2;
        const auto r = *reinterpret_cast<const float4*>(pairs + 8 * j);
        const float2 pair = unpack(k[x]);
        k[x] = pack(pair.x * exp2_ftz(r.y - b[at] * kLog2E),
                    pair.y * exp2_ftz(r.w - b[at + 1] * kLog2E));
      }
      fragments.store(to, first / 16 + i, k);
    }
  }

  // Replaces k 2^-b of channels out of range by k^, once A is made.
  __device__ __forceinline__ void take_keys_of_state(const GatedChunk& chunk) const {
    whole();  // k^ is read
    const Fragments fragments;
#pragma unroll 1
    for (int tile = 0; tile < K / 64; ++tile) {
#pragma unroll 1
      for (int i = first / 16; i < (first + kColumns) / 16; ++i) {
        if (!has_strong(chunk.references + 64 * tile + 16 * i)) continue;
        uint32_t k[4];
        fragments.load(k, chunk.g[tile], i);
        fragments.store(chunk.k[tile], i, k);
      }
    }
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
    const float2* references = chunk.references + 64 * tile + first;
    const Fragments fragments;
    const Operand tile_q = chunk.q[tile], tile_k = chunk.k[tile];
    constexpr bool kApart = kPastAlone && kQueries;  // keys of A are not those of the state
    if constexpr (kApart) keep_keys_of_state(chunk.g[tile], tile_k, references, b);
    bool out[2] = {};          // whether rows `row` and `row` + 8 are out of range
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
          float4 r = make_float4(0.f, 0.f, 0.f, 0.f);
          if constexpr (!kApart) r = *reinterpret_cast<const float4*>(references + 8 * j + 2 * t);
          const float e0 = b[at] * kLog2E - r.x, e1 = b[at + 1] * kLog2E - r.z;
          const float2 k_pair = unpack(k[i][x]);
          if constexpr (kQueries) {
            out[x % 2] |= !(fabsf(e0) <= kRange) || !(fabsf(e1) <= kRange);
            const float2 q_pair = unpack(q[i][x]);
            q[i][x] = pack(q_pair.x * (scale * exp2_ftz(e0)), q_pair.y * (scale * exp2_ftz(e1)));
          }
          k[i][x] = pack(k_pair.x * exp2_ftz(r.y - e0), k_pair.y * exp2_ftz(r.w - e1));
        }
        if constexpr (kQueries) fragments.store(tile_q, first / 16 + batch + i, q[i]);
        fragments.store(tile_k, first / 16 + batch + i, k[i]);
      }
    }
    if (out[0] || out[1]) *chunk.strong = 1;
    if constexpr (kApart) note_strong_rows(chunk, out[0], out[1]);
  }
};

}  // namespace gla_ext::cuda::sm90
