// The whole forward of a segment and head in one sweep, as in forward.cu, for heads of at most 64
// keys and 64 values.
//
// grid    (segment, head); two producer warpgroups and a consumer, two blocks a multiprocessor
// reads   q, k, g [B, T, H, K], v [B, T, H, V], h0 or segment_states
// writes  o [B, T, H, V], ht, tiers [B, slots, H, blocks]
//
// The producers share every chunk, each with half of the key channels and then half of A's columns,
// and copy rows two chunks ahead. The consumer has the state of all values. Accumulation is fp32.
#include "../device/launch.cuh"
#include "dependent_launch.cuh"
#include "dynamic_shared.h"
#include "forward/consume.cuh"
#include "forward/gating.cuh"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

constexpr int kProducers = 2, kThreads = (kProducers + 1) * kGroupThreads;
constexpr int kBlocks = 2;  // of a multiprocessor
constexpr int kProducerRegisters = 64, kConsumerRegisters = 112;
constexpr int kWholeBarrier = 5;  // of both producers

using NarrowUnit = Unit<kTile, 1>;
using Block = SweepBlock<NarrowUnit, kThreads>;
static_assert(fits_multiprocessor(kBlocks, sizeof(Block)));
static_assert(kProducers * kProducerRegisters + kConsumerRegisters <=
              (kProducers + 1) * launch_registers(kBlocks * kThreads));

__device__ __forceinline__ void produce(NarrowUnit& s, const unsigned char* triangle,
                                        const Problem& p, int group) {
  constexpr int kAll = kProducers * kGroupThreads, kColumns = kTile / kProducers;
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x);
  const auto barrier = [group] { group_barrier<kProducerBarrier>(group); };
  const auto whole = [] { sync_threads<kWholeBarrier>(kAll); };
  const Gating<kTile, decltype(barrier), kColumns, decltype(whole)> gate{
      triangle, thread % kGroupThreads, barrier, whole, group * kColumns};
  const auto copier = [&](const Rows& r, int columns) {
    return RowCopier<1, kAll>(r, token_offset(r, 1), segment, 0, thread, 0, columns);
  };
  auto g = copier(p.g, p.K), q = copier(p.q, p.K), k = copier(p.k, p.K), v = copier(p.v, p.V);
  const auto copy = [&](int chunk) {
    if (chunk < segment.chunks) {
      const int stage = chunk % kStages, length = segment.length_of(chunk);
      if (chunk >= kStages) wait(&s.empty[stage], static_cast<uint32_t>(chunk / kStages - 1) & 1);
      auto& tiles = s.stages[stage];
      g.copy(tiles.g, length);
      q.copy(tiles.q, length);
      k.copy(tiles.k, length);
      v.copy(tiles.v, length);
      g.move(1), q.move(1), k.move(1), v.move(1);
    }
    commit_copies();
  };
  for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
  for (int chunk = 0; chunk < segment.chunks; ++chunk) {
    const int stage = chunk % kStages;
    auto& tiles = s.stages[stage];
    wait_for_copies<kStages - 2>();
    gate({tiles.q, tiles.k, tiles.g, s.enter[stage], s.middle[stage], s.leave[stage],
          &s.exact[stage], s.b_last[0], s.references[0]},
         p.scale);
    fence_for_products();
    arrive(&s.full[stage]);
    copy(chunk + kStages - 1);  // waits for the consumer of the chunk before
  }
}

__global__ void __launch_bounds__(kThreads, kBlocks) narrow_forward_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Block*>(s_bytes);
  start_block<kProducers, 1>(s, p, blockIdx.x, 1);
  const int group = warpgroup();
  if (group < kProducers) {
    give_registers<kProducerRegisters>();
    if (!s.unit.segment.tail) produce(s.unit, s.triangle, p, group);
  } else {
    take_registers<kConsumerRegisters>();
    consume(s.unit, p, 0, 0);
  }
#endif
}

}  // namespace

void narrow_forward(const Problem& p, cudaStream_t stream) {
  static const DynamicShared shared(narrow_forward_kernel, sizeof(Block));
  const int64_t blocks = segment_heads(p.grid, p.H);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(narrow_forward_kernel, blocks, kThreads, sizeof(Block), stream, p);
}

}  // namespace gla_ext::cuda::sm90
