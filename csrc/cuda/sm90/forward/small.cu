// The whole forward of a segment and head in one sweep, as in forward/fused, for heads with K and V
// of at most 64 and bf16 gates.
//
// grid    (segment, head), up to four of these in sequence; two producer warpgroups and a consumer,
//         two blocks a multiprocessor
// reads   q, k, g [B, T, H, K], v [B, T, H, V], h0 or segment_states
// writes  o [B, T, H, V], ht, tiers [B, entries, H, blocks]
//
// The producers share every chunk: each has half of the key channels, then half of A's columns.
// They copy rows two chunks ahead, also those of the next segment. The consumer has the state of
// all values. Accumulation is fp32.
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "cuda/sm90/tiles/gating.cuh"
#include "cuda/sm90/tiles/mover.cuh"
#include "fused/consume.cuh"

namespace gla_ext::cuda::sm90 {
namespace forward::small {

constexpr int kProducers = 2, kThreads = (kProducers + 1) * kGroupThreads;
constexpr int kBlocks = 2;  // blocks a multiprocessor
constexpr int kProducerRegisters = 64, kConsumerRegisters = 112;

// If there are more segments and heads than resident blocks, a block takes several in sequence.
using SmallUnit = Unit<kTile, 1, kMostItems>;
constexpr int kStages = SmallUnit::kStages;
struct Shared : SweepBlock<SmallUnit, kThreads> {
  int items;
};
static_assert(fits_multiprocessor(kBlocks, sizeof(Shared)));
static_assert(kProducers * kProducerRegisters + kConsumerRegisters <=
              (kProducers + 1) * launch_registers(kBlocks * kThreads));

__device__ __forceinline__ int chunks_of(const Segment& segment) {
  return segment.tail ? 0 : segment.chunks;
}

// Copies the rows of the block's chunks, one chunk at a time, by the producers' threads.
class Asked {
 public:
  __device__ __forceinline__ explicit Asked(Shared& s) : s_(s) { find(); }

  // Issues the copies of the next chunk's rows, if there is one, once its stage is free.
  __device__ __forceinline__ void copy(const Problem& p) {
    if (item_ < s_.items) {
      const Segment& segment = s_.unit.segments[item_];
      const Mover<kProducers> at(static_cast<int>(threadIdx.x));
      if (chunk_ == 0) {
        const auto first = [&](const Rows& r) {
          return rows_at<const bf16>(r, segment.row, segment.start, segment.head) +
                 token_offset(r, at.row) + at.column;
        };
        g_ = first(p.g), q_ = first(p.q), k_ = first(p.k), v_ = first(p.v);
      }
      const int stage = number_ % kStages, length = segment.length_of(chunk_);
      if (number_ >= kStages)
        wait(&s_.unit.empty[stage], static_cast<uint32_t>(number_ / kStages - 1) & 1);
      const auto copy_tile = [&](const Tile* tile, const bf16*& rows, const Rows& r, int columns) {
        const int32_t stride = token_offset(r, 1);
        at.template copy<kTile>(tile, rows, stride, length, at.column < columns);
        rows += static_cast<int64_t>(stride) * kTile;
      };
      auto& tiles = s_.unit.stages[stage];
      copy_tile(tiles.g, g_, p.g, p.K);
      copy_tile(tiles.q, q_, p.q, p.K);
      copy_tile(tiles.k, k_, p.k, p.K);
      copy_tile(tiles.v, v_, p.v, p.V);
      ++number_;
      if (++chunk_ == segment.chunks) {
        ++item_;
        find();
      }
    }
    commit_copies();
  }

 private:
  // Skips to the first chunk of the next item that has chunks.
  __device__ __forceinline__ void find() {
    while (item_ < s_.items && chunks_of(s_.unit.segments[item_]) == 0) ++item_;
    chunk_ = 0;
  }
  Shared& s_;
  int item_ = 0, chunk_ = 0, number_ = 0;
  const bf16 *g_, *q_, *k_, *v_;  // this thread's first elements of the next chunk
};

template <bool kPastAlone>
__device__ __forceinline__ void produce(Shared& block, const Problem& p, int group) {
  SmallUnit& s = block.unit;
  constexpr int kColumns = kTile / kProducers;
  const auto barrier = [group] { group_barrier<kProducerBarrier>(group); };
  const auto whole = [] { sync_threads<kProducersBarrier>(kProducers * kGroupThreads); };
  const Gating<kTile, decltype(barrier), bf16, kPastAlone, kColumns, decltype(whole)> gate{
      block.triangle, static_cast<int>(threadIdx.x) % kGroupThreads, barrier, whole,
      group * kColumns};
  Asked asked(block);
  for (int i = 0; i < kStages - 1; ++i) asked.copy(p);
  int chunks = 0;
  for (int i = 0; i < block.items; ++i) chunks += chunks_of(s.segments[i]);
  for (int number = 0; number < chunks; ++number) {
    const int stage = number % kStages;
    auto& tiles = s.stages[stage];
    wait_for_copies<kStages - 2>();
    gate({tiles.q, tiles.k, tiles.g, s.enter[stage], s.middle[stage], s.leave[stage],
          s.strong[stage], s.b_last[0], s.references[0]},
         p.scale);
    fence_for_products();
    arrive(&s.full[stage]);
    asked.copy(p);  // waits for the consumer of the previous chunk
  }
}

template <bool kPastAlone>
__global__ void __launch_bounds__(kThreads, kBlocks) kernel(Problem p, int64_t items) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared*>(s_bytes);
  SmallUnit& unit = s.unit;
  // The block's work items are numbers blockIdx.x, blockIdx.x + gridDim.x, ...
  if (threadIdx.x < kMostItems) {
    const auto i = threadIdx.x;
    const int64_t item = blockIdx.x + static_cast<int64_t>(i) * gridDim.x;
    if (item < items) unit.segments[i] = find_segment(p, item);
  }
  if (threadIdx.x == 0) {
    s.items = static_cast<int>((items - blockIdx.x + gridDim.x - 1) / gridDim.x);
    init_stages<kProducers, 1>(unit);
  }
  fill_triangle<kThreads>(s.triangle);
  fence_for_products();
  __syncthreads();  // the barriers, the segments and the triangle are written
  const int group = warpgroup();
  if (group < kProducers) {
    give_registers<kProducerRegisters>();
    produce<kPastAlone>(s, p, group);
  } else {
    take_registers<kConsumerRegisters>();
    for (int i = 0, before = 0; i < s.items; ++i) {
      consume(unit, p, unit.segments[i], before, 0, 0);
      before += chunks_of(unit.segments[i]);
    }
  }
#endif
}

template <bool kPastAlone>
void launch(const Problem& p, cudaStream_t stream) {
  static const DynamicShared shared(kernel<kPastAlone>, sizeof(Shared));
  const int64_t items = segment_heads(p.grid, p.H);
  if (items == 0) return;
  shared.allow();
  launch_dependent(kernel<kPastAlone>, blocks_of(items, p.items_each), kThreads, sizeof(Shared),
                   stream, p, items);
}

}  // namespace forward::small

void launch_forward_small(const Problem& p, cudaStream_t stream) {
  if (p.past_alone)
    forward::small::launch<true>(p, stream);
  else
    forward::small::launch<false>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
