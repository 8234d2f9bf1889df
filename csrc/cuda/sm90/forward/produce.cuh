// What a producer of forward.cu does.
#pragma once

#include "../../device/gates.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// What a producer does with a chunk whose rows are there.
template <int K, int kMembers>
struct Gating {
  Unit<K, kMembers>& s;
  const unsigned char* triangle;
  int member, group, thread;

  __device__ __forceinline__ void barrier() const { group_barrier<kProducerBarrier>(group); }

  // The references of a channel and what they are to the state.
  __device__ __forceinline__ void set_channel(int chunk, int channel) const {
    const int stage = chunk % kStages;
    const float b_last = s.b_last[member][channel];
    const bool exact = !(fabsf(b_last) <= kTierRange);
    const float from = exact ? 0.f : reference_of(b_last), to = exact ? b_last : from;
    s.references[member][channel] = make_float2(from, to - from);
    s.enter[stage][channel] = exp2_ftz(from);
    s.middle[stage][channel] = exact ? exp2_ftz(b_last) : 1.f;
    s.leave[chunk % (kStages + 1)][channel] = exact ? 1.f : exp2_ftz(b_last - from);
    if (exact) s.exact[stage] = 1;
  }

  // q^ and k^ of 64 channels.
  __device__ __forceinline__ void gate(int chunk, int tile, float scale) const {
    auto& tiles = s.stages[chunk % kStages];
    float b[32];
    sum_gates(b, triangle, tiles.g + tile * kTileBytes, 0);
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4, t = lane % 4;
    float* b_last = s.b_last[member] + 64 * tile;
    if (row + 8 == kTile - 1) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<float2*>(b_last + 8 * j + 2 * t) =
            make_float2(kLog2E * b[4 * j + 2], kLog2E * b[4 * j + 3]);
    }
    barrier();  // b_last is written
    if (thread < 64) set_channel(chunk, 64 * tile + thread);
    barrier();  // the references are written
    bool out = false;
    const float2* references = s.references[member] + 64 * tile;
    const Fragments fragments;
    const uint32_t tile_q = shared_address(tiles.q) + tile * kTileBytes;
    const uint32_t tile_k = shared_address(tiles.k) + tile * kTileBytes;
    constexpr int kBatch = 2;  // sixteens of channels on their way at once
#pragma unroll
    for (int batch = 0; batch < 4; batch += kBatch) {
      uint32_t q[kBatch][4], k[kBatch][4];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        fragments.load(q[i], tile_q, batch + i);
        fragments.load(k[i], tile_k, batch + i);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int j = 2 * (batch + i) + x / 2, at = 4 * j + x % 2 * 2;
          const auto r = *reinterpret_cast<const float4*>(references + 8 * j + 2 * t);
          const float e0 = b[at] * kLog2E - r.x, e1 = b[at + 1] * kLog2E - r.z;
          out |= !(fabsf(e0) <= kTierRange / 2) || !(fabsf(e1) <= kTierRange / 2);
          const float2 q_pair = unpack(q[i][x]), k_pair = unpack(k[i][x]);
          q[i][x] = pack(q_pair.x * (scale * exp2_ftz(e0)), q_pair.y * (scale * exp2_ftz(e1)));
          k[i][x] = pack(k_pair.x * exp2_ftz(r.y - e0), k_pair.y * exp2_ftz(r.w - e1));
        }
        fragments.store(tile_q, batch + i, q[i]);
        fragments.store(tile_k, batch + i, k[i]);
      }
    }
    if (out) s.exact[chunk % kStages] = 1;
  }

  // Issues A = q^ k^T.
  __device__ __forceinline__ void begin_scores(float (&A)[32], int stage) const {
    const auto& tiles = s.stages[stage];
    constexpr auto kSummed = Contiguous::kSummed;
    const uint32_t q = shared_address(tiles.q), k = shared_address(tiles.k);
    begin_products();
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      const uint32_t step = i / 4 * kTileBytes + i % 4 * kStepBytes;
      product<kSummed, kSummed>(A, descriptor(q + step, 0), descriptor(k + step, 0), i > 0);
    }
    commit_products();
  }

  // Zero above the diagonal, or everywhere where the chunk is outside tier 1.
  __device__ __forceinline__ void store_scores(unsigned char* scores, const float (&A)[32],
                                               bool exact) const {
    const Fragments fragments;
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int j = 2 * i + x / 2, e = x % 2, below = row + 8 * e - (8 * j + column);
        words[x] = pack(!exact && below >= 0 ? A[4 * j + 2 * e] : 0.f,
                        !exact && below >= 1 ? A[4 * j + 2 * e + 1] : 0.f);
      }
      fragments.store(shared_address(scores), i, words);
    }
  }
};

template <int K, int kMembers>
__device__ __forceinline__ void produce(Unit<K, kMembers>& s, const unsigned char* triangle,
                                        const Problem& p, int group, int block_v) {
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, member = group % kMembers;
  const Gating<K, kMembers> gating{s, triangle, member, group, thread};
  const auto copy = [&](int chunk) {
    if (chunk >= segment.chunks) return;
    const int stage = chunk % kStages;
    if (chunk >= kStages) wait(&s.empty[stage], static_cast<uint32_t>(chunk / kStages - 1) & 1);
    auto& tiles = s.stages[stage];
    copy_rows<K / 64, kGroupThreads>(tiles.g, p.g, segment, chunk, thread, 0, p.K);
    copy_rows<K / 64, kGroupThreads>(tiles.q, p.q, segment, chunk, thread, 0, p.K);
    copy_rows<K / 64, kGroupThreads>(tiles.k, p.k, segment, chunk, thread, 0, p.K);
    copy_rows<kMembers, kGroupThreads>(tiles.v, p.v, segment, chunk, thread, block_v, p.V);
    commit_copies();
  };
  copy(member);
  for (int chunk = member; chunk < segment.chunks; chunk += kMembers) {
    const int stage = chunk % kStages;
    auto& tiles = s.stages[stage];
    wait_for_copies<0>();
    if (thread == 0) s.exact[stage] = 0;
    gating.barrier();  // the rows are there, s.exact is cleared
#pragma unroll
    for (int tile = 0; tile < K / 64; ++tile)
      clamp_gates<64>(tiles.g + tile * kTileBytes, 0, thread);
    fence_for_products();
    gating.barrier();  // the gates are clamped
#pragma unroll 1
    for (int tile = 0; tile < K / 64; ++tile) gating.gate(chunk, tile, p.scale);
    fence_for_products();
    gating.barrier();  // q^ and k^ are written, the gates read
    float A[32];
    gating.begin_scores(A, stage);
    const bool exact = __any_sync(0xffffffffu, s.exact[stage]);
    wait_for_products<0>();
    gating.store_scores(tiles.g, A, exact);
    fence_for_products();
    arrive(&s.full[stage]);
    copy(chunk + kMembers);  // waits for consumers, of the chunk before if there are two producers
  }
}

}  // namespace
}  // namespace gla_ext::cuda::sm90
