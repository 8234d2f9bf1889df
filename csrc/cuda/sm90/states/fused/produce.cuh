// The producer of states/fused. Its Gating resembles that of tiles/gating.cuh, but states are
// unscaled here: it makes only one operand per sweep (k 2^(b_C - b), or scale q 2^b), without
// references, factors or A.
#pragma once

#include "cuda/device/gates.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90::states::fused {

// Gates k or q of a chunk in place; each producer has kColumns of the key channels.
template <int kConsumers, class Gate, Sweep kSweep>
struct Gating {
  static constexpr int kColumns = kTile / kProducers;
  Unit<kConsumers, Gate>& s;
  const Tile& triangle;
  int group, thread, first;
  float total = 0;  // sum of the gates of channel `thread` in the segment, log2 units

  __device__ __forceinline__ void barrier() const { group_barrier<kProducerBarrier>(group); }

  __device__ __forceinline__ void run(int stage, float scale) {
    auto& tiles = s.stages[stage];
    clamp_gates<Gate, kColumns>(tiles.g, first, thread);
    fence_for_products();
    barrier();  // the gates are clamped
    float b[kColumns / 2];
    sum_gates<Gate>(b, triangle, tiles.g[0], first);
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4, t = lane % 4;
    float* last = s.b_last[stage] + first;
    if (row + 8 == kTile - 1) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
        *reinterpret_cast<float2*>(last + 8 * j + 2 * t) =
            make_float2(kLog2E * b[4 * j + 2], kLog2E * b[4 * j + 3]);
    }
    barrier();  // b_last is written
    if (thread < kColumns) total += last[thread];
    bool out = false;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const auto b_last = *reinterpret_cast<const float2*>(last + 8 * j + 2 * t);
      const int y = swizzled(row, first / 8 + j) + 4 * t;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto& word = in_tile<uint32_t>(tiles.y, y + e * 8 * kRowBytes);
        const float2 pair = unpack(word);
        const float b0 = b[4 * j + 2 * e] * kLog2E, b1 = b[4 * j + 2 * e + 1] * kLog2E;
        if constexpr (kSweep == Sweep::kStates) {
          out |= out_of_tier1(b0, b_last.x) || out_of_tier1(b1, b_last.y);
          word = pack(pair.x * exp2_ftz(b_last.x - b0), pair.y * exp2_ftz(b_last.y - b1));
        } else {
          word = pack(pair.x * (scale * exp2_ftz(b0)), pair.y * (scale * exp2_ftz(b1)));
        }
      }
    }
    if (out) s.strong[stage] = 1;
  }
};

template <Sweep kSweep, Store kStore, int kConsumers, class Gate>
__device__ __forceinline__ void produce(Unit<kConsumers, Gate>& s, const Tile& triangle,
                                        const Problem& p, int group, int first_v) {
  using F = Fields<kSweep>;
  constexpr int kThreads = kProducers * kGroupThreads, kStages = Unit<kConsumers, Gate>::kStages;
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  Gating<kConsumers, Gate, kSweep> gating{s, triangle, group, thread % kGroupThreads,
                                          group * (kTile / kProducers)};
  const int start = F::chunk(segment, 0);
  const Rows &y_rows = F::y(p), &x_rows = F::x(p);
  RowCopier<1, kThreads, Gate> g(p.g, token_offset(p.g, 1), segment, start, thread, 0, p.K);
  RowCopier<1, kThreads> y(y_rows, token_offset(y_rows, 1), segment, start, thread, 0, p.K);
  RowCopier<kConsumers, kThreads> x(x_rows, token_offset(x_rows, 1), segment, start, thread,
                                    first_v, p.V);
  const auto copy = [&](int i) {
    if (i < segment.chunks) {
      const int stage = i % kStages, length = segment.length_of(F::chunk(segment, i));
      if (i >= kStages) wait(&s.empty[stage], static_cast<uint32_t>(i / kStages - 1) & 1);
      g.copy(s.stages[stage].g, length);
      y.copy(&s.stages[stage].y, length);
      x.copy(s.stages[stage].x, length);
      constexpr int kStep = kSweep == Sweep::kStates ? 1 : -1;
      g.move(kStep), y.move(kStep), x.move(kStep);
    }
    commit_copies();
  };
  for (int i = 0; i < kStages - 1; ++i) copy(i);
  for (int i = 0; i < segment.chunks; ++i) {
    const int stage = i % kStages;
    wait_for_copies<kStages - 2>();
    if (thread == 0) s.strong[stage] = 0;
    sync_threads<kProducersBarrier>(kThreads);  // the rows have arrived, s.strong is cleared
    gating.run(stage, p.scale);
    fence_for_products();
    arrive(&s.full[stage]);
    copy(i + kStages - 1);  // waits for the consumers, which are one chunk behind
  }
  // The sweep of dS would add the gates in another order. It therefore writes only the decay that
  // the sweep of S skips.
  const int channel = gating.first + gating.thread;
  const bool writes = kStore == Store::kSegment &&
                      (kSweep == Sweep::kStates || (segment.last && !p.grid.with_last));
  if (writes && first_v == 0 && gating.thread < gating.kColumns && channel < p.K)
    p.segment_decays[segment.state * p.K + channel] = gating.total;
}

}  // namespace gla_ext::cuda::sm90::states::fused
