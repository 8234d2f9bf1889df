// The sweeps of states/fused over prepared chunks, with the state, or its gradient, in registers.
// (states/fused/consume.cuh lists the kernels that have a similar loop.)
//
//   S~ = 2^from S           S' = 2^(b_C - from) (S~ + k^T v)      first chunk first
//   dS~ = 2^(b_C - from) dS'      dS = 2^from (dS~ + q^T do)      last chunk first
//
// grid    (sweep, segment, head, 128 key channels (K of 129 to 192: all), 128 values); a producer
//         and two or three consumer warpgroups. Summaries: a summary in place of a segment.
// reads   prepared chunks [B, entries, H]; v h0, or do dht; segment_states, segment_state_grads
// writes  S~ and, unless gradients are swept, dS~ of every chunk, as tiles [B, chunks, H]; with
//         chunk pairs S~ of the first and dS~ of the second chunk, [B, pairs, H]; with dS~ also
//         dh0. Summaries: only segment_states or segment_state_grads, and segment_decays.
//
// A consumer holds 64 key channels. Accumulation is fp32.
#include <type_traits>

#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/prepare/sweep.cuh"
#include "cuda/sm90/segments/chunk_pairs.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "fused/state.cuh"
#include "fused/sweeps.cuh"
#include "tiles.cuh"

namespace gla_ext::cuda::sm90 {
namespace states::prepared {

constexpr int kValueTiles = 2;
constexpr int kValues = kValueTiles * kTile;

// Part of a KeyGroup: the factors and the tiles of k^, or the tiles of q^ and the factors.
template <int kTiles>
using GroupBytes = unsigned char[kFactorBytes + kTiles * kTileBytes];
// Each of two consumers uses one of a group's tiles; a third consumer uses the only tile of the
// next group.
struct TwoTiles {
  GroupBytes<kKeyTiles> operands;
  Tile x[kValueTiles];  // v or do [token][V]
};
struct ThreeTiles {
  GroupBytes<kKeyTiles> operands;
  Tile x[kValueTiles];
  GroupBytes<1> last;
};
static_assert(sizeof(TwoTiles) % 1024 == 0 && sizeof(ThreeTiles) % 1024 == 0, "tiles are aligned");
static_assert(offsetof(ThreeTiles, x) % 1024 == 0 && offsetof(ThreeTiles, last) % 1024 == 0);
// A consumer's tiles of the state, from which it is stored after a chunk.
using StateTiles = Tile[kValueTiles];
template <int kConsumersOfBlock>
struct Block : PreparedBlock<std::conditional_t<kConsumersOfBlock == 3, ThreeTiles, TwoTiles>, 4,
                             kConsumersOfBlock> {
  static constexpr int kConsumers = kConsumersOfBlock;
  static constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
  static constexpr int kKeyGroups = kGroupsOf<kConsumers>;
  // Tiles of two chunks, where there is room.
  static constexpr int kOutStages = kConsumers == 3 ? 1 : 2;
  alignas(1024) StateTiles states[kConsumers][kOutStages];
};

// Offsets in bytes of k^ or q^ and of the factors. kTiles: tiles of the group.
template <Sweep kSweep, int kTiles>
struct Places {
  static constexpr bool kStates = kSweep == Sweep::kStates;
  // In the KeyGroup: the start of the copied part.
  static constexpr int kFirst = kStates ? offsetof(KeyGroup, factors) : 0;
  // In GroupBytes: k^ or q^, and the factors.
  static constexpr int kOperand = kStates ? kFactorBytes : 0;
  static constexpr int kFactors = kStates ? 0 : kTiles * kTileBytes;
};

// Writes the sum of the gates of the thread's channel in a segment, log2 units.
__device__ __forceinline__ void write_decay(const Problem& p, const Segment& segment, int first_k,
                                            int first_v, float total) {
  const int channel = first_k + static_cast<int>(threadIdx.x);
  if (first_v == 0 && channel < p.K) p.segment_decays[segment.state * p.K + channel] = total;
}

// Writes the decay of the last segment. Nothing reads this segment's summary of S, but the scan of
// dS needs the decay.
__device__ __forceinline__ void sum_last_segment(const Problem& p, const Segment& segment,
                                                 int first_k, int first_v) {
  const unsigned char* group = prepared_at(p, segment.chunk_head(p, 0), first_k / kGroupKeys);
  float total = 0;
#pragma unroll 8
  for (int i = 0; i < segment.chunks; ++i, group += p.H * prepared_bytes(p.K))
    total += reinterpret_cast<const KeyGroup*>(group)->factors[kSum][threadIdx.x];
  write_decay(p, segment, first_k, first_v, total);
}

// Copies k^ or q^ of a chunk's first group, with the factors.
template <Sweep kSweep>
__device__ __forceinline__ void copy_operands(TwoTiles& stage, const unsigned char* group,
                                              uint64_t* full) {
  bulk_copy(stage.operands, group + Places<kSweep, kKeyTiles>::kFirst, sizeof(stage.operands),
            full);
}
// The same for stages with three tiles: also copies the single tile of the next group, with its
// factors.
template <Sweep kSweep>
__device__ __forceinline__ void copy_operands(ThreeTiles& stage, const unsigned char* group,
                                              uint64_t* full) {
  using Last = Places<kSweep, 1>;
  arrive_and_expect(full, sizeof(stage.operands) + sizeof(stage.last));
  bulk_copy_expected(stage.operands, group + Places<kSweep, kKeyTiles>::kFirst,
                     sizeof(stage.operands), full);
  group += sizeof(KeyGroup);
  if constexpr (Last::kStates) {
    bulk_copy_expected(stage.last, group + Last::kFirst, sizeof(stage.last), full);
  } else {
    bulk_copy_expected(stage.last, group + Last::kFirst, kTileBytes, full);
    bulk_copy_expected(stage.last + Last::kFactors, group + offsetof(KeyGroup, factors),
                       kFactorBytes, full);
  }
}

// Offsets in bytes, in a stage, of a consumer's tile of k^ or q^ and of the factors of its group.
struct OperandPlace {
  int tile, factors;
};
template <Sweep kSweep, class StageOfBlock>
__device__ __forceinline__ OperandPlace operand_place(int consumer) {
  using First = Places<kSweep, kKeyTiles>;
  const OperandPlace first{First::kOperand + consumer * kTileBytes, First::kFactors};
  if constexpr (std::is_same_v<StageOfBlock, ThreeTiles>) {
    using Last = Places<kSweep, 1>;
    constexpr int kLast = offsetof(ThreeTiles, last);
    if (consumer == kKeyTiles) return {kLast + Last::kOperand, kLast + Last::kFactors};
  }
  return first;
}

template <Sweep kSweep, Store kStore, class BlockOfKernel>
__device__ __forceinline__ void produce(BlockOfKernel& s, const Problem& p, int first_k,
                                        int first_v) {
  using F = Fields<kSweep>;
  constexpr int kGroups = BlockOfKernel::kKeyGroups;
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x);
  constexpr int kStep = kSweep == Sweep::kStates ? 1 : -1;
  const int start = F::chunk(segment, 0);
  RowCopier<kValueTiles, kGroupThreads> x(F::x(p), token_offset(F::x(p), 1), segment, start, thread,
                                          first_v, p.V);
  const unsigned char* group = prepared_at(p, segment.chunk_head(p, start), first_k / kGroupKeys);
  const int64_t step = kStep * p.H * prepared_bytes(p.K);
  float totals[kGroups] = {};  // sums of the gates of channel `thread` of each group, log2 units
  s.produce([&](int i, auto& stage, uint64_t* full) {
    if (thread == 0) copy_operands<kSweep>(stage, group, full);
    x.copy(stage.x, segment.length_of(F::chunk(segment, i)));
    if constexpr (kStore == Store::kSegment) {
#pragma unroll
      for (int j = 0; j < kGroups; ++j)
        totals[j] += reinterpret_cast<const KeyGroup*>(group)[j].factors[kSum][thread];
    }
    group += step;
    x.move(kStep);
  });
  // The sweep of dS adds the gates in another order, so it writes the decays only if `sums_decays`.
  if (kStore == Store::kSegment && (kSweep == Sweep::kStates || p.sums_decays)) {
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
      write_decay(p, segment, first_k + j * kGroupKeys, first_v, totals[j]);
  }
}

// Stores a consumer's state as bf16 to a chunk's tiles in memory, by way of `tiles`. Before the
// call no store may still read `tiles`, except, with one stage, that of the previous chunk.
template <Sweep kSweep, class BlockOfKernel>
__device__ __forceinline__ void store_chunk(const Problem& p, const State<kGroupKeys>& state,
                                            StateTiles& tiles, int64_t index, int group) {
  constexpr bool kOnePlace = BlockOfKernel::kOutStages == 1;
  const auto barrier = [&] { group_barrier<kConsumerBarrier, BlockOfKernel::kConsumers>(group); };
  const Fragments fragments;
  const bool stores = threadIdx.x % kGroupThreads == 0;
  if constexpr (kOnePlace) {
    if (stores) wait_for_bulk_stores();
    barrier();  // the tiles are read
  }
#pragma unroll
  for (int i = 0; i < kValueTiles; ++i) store_tile(fragments, tiles[i], state.x + 32 * i);
  fence_for_products();                              // also for bulk stores
  if (!kOnePlace && stores) wait_for_bulk_stores();  // of the previous chunk, whose stage is next
  barrier();                                         // the tiles are written
  if (!stores) return;
#pragma unroll
  for (int i = 0; i < kValueTiles; ++i) {
    const int v = state.first_v + i * kTile;
    if (state.first_k < p.K && v < p.V)
      bulk_store(state_tile_at(p, Fields<kSweep>::chunk_states(p), index, v / kTile,
                               state.first_k / kTile),
                 &tiles[i], kTileBytes);
  }
  commit_bulk_stores();
}

template <Sweep kSweep, Store kStore, class BlockOfKernel>
__device__ __forceinline__ void consume(BlockOfKernel& s, const Problem& p, int group, int block_k,
                                        int first_v) {
  using F = Fields<kSweep>;
  const Segment& segment = s.segment;
  const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
  const int64_t boundary = (segment.n * p.H + segment.head) * matrix;
  const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
  // Index of the thread's first factor; it also uses that of row + 8.
  const int row = group % kKeyTiles * kTile + thread / 32 * 16 + thread % 32 / 4;
  State<kGroupKeys> state(group, block_k, first_v);
  state.clear();
  if constexpr (kStore == Store::kChunks) {
    await_previous_kernel();  // waits for the scan
    load_entering<kSweep>(state, p, segment);
  }
  const auto scale = [&](float first, float second) {
#pragma unroll
    for (int e = 0; e < state.kValues / 2; ++e) state.x[e] *= e / 2 % 2 == 0 ? first : second;
  };
  constexpr Factor kIn = kSweep == Sweep::kStates ? kEnter : kLeave;
  constexpr Factor kOut = kSweep == Sweep::kStates ? kLeave : kEnter;
  const ChunksOfPairs pairs(p, segment);
  const auto at = operand_place<kSweep, std::decay_t<decltype(s.stages[0])>>(group);
  int place = 0;              // the stage from which the next chunk's state is stored
  float out[2] = {1.f, 1.f};  // factor still to be applied to the state when it leaves a chunk
  for (int i = 0; i < segment.chunks; ++i) {
    const int number = i % s.kStages;
    auto& stage = s.stages[number];
    wait(&s.full[number], s.parity(i));
    // Everything that is read without wgmma is read here. `middle` is read last, because its first
    // use waits for all these loads: a load still queued after `arrive`, e.g. behind stores, could
    // find the stage refilled.
    const auto* factors = reinterpret_cast<const volatile float (*)[kGroupKeys]>(
        reinterpret_cast<const unsigned char*>(&stage) + at.factors);
    const float in[2] = {factors[kIn][row] * out[0], factors[kIn][row + 8] * out[1]};
    out[0] = factors[kOut][row], out[1] = factors[kOut][row + 8];
    const float middle[2] = {factors[kMiddle][row], factors[kMiddle][row + 8]};
    const bool strong = __any_sync(0xffffffffu, middle[0] != 1.f || middle[1] != 1.f);
    scale(in[0], in[1]);
    if constexpr (kStore == Store::kChunks) {
      const int chunk = F::chunk(segment, i);
      const bool leaves =
          kSweep == Sweep::kStates ? pairs.leave_state(chunk) : pairs.leave_state_grad(chunk);
      if (leaves) {
        store_chunk<kSweep, BlockOfKernel>(p, state, s.states[group][place],
                                           pairs.state(chunk) * p.H + segment.head, group);
        place = (place + 1) % s.kOutStages;
      }
    }
    if (strong) scale(middle[0], middle[1]);
    const Operand y(shared_address(&stage) + at.tile), x = stage.x[0];
    begin_products();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      product<Contiguous::kOther, Contiguous::kOther>(state.x, sixteen_rows(y, j),
                                                      sixteen_rows(x, j));
    commit_products();
    wait_for_products<0>();
    fence_for_products();  // also for bulk copies
    arrive(&s.empty[number]);
  }
  if (thread == 0) wait_for_bulk_stores();  // the block must not end earlier
  scale(out[0], out[1]);
  if constexpr (kStore == Store::kSegment)
    state.store(p, F::segment_states(p) + segment.state * matrix, false);
  else if (F::ends(segment) && F::final(p) != nullptr)
    state.store(p, F::final(p) + boundary, p.state_v_first);
}

template <Sweep kSweep, Store kStore, class BlockOfKernel>
__device__ __forceinline__ void sweep(BlockOfKernel& s, const Problem& p, int64_t index) {
  const int v_blocks = blocks_of(p.V, kValues),
            k_blocks = static_cast<int>(prepared_key_blocks(p.K));
  const int first_v = static_cast<int>(index % v_blocks) * kValues;
  index /= v_blocks;
  const int first_k = static_cast<int>(index % k_blocks) * kGroupKeys;
  s.template start<kStore == Store::kSegment>(p, index / k_blocks);
  const int group = warpgroup();
  if (s.segment.tail) return;
  if (kStore == Store::kSegment && Fields<kSweep>::ends(s.segment) && !p.grid.with_last) {
    const bool has_decay = kSweep == Sweep::kStates && !s.segment.first && s.segment.chunks > 0;
    if (has_decay && first_v == 0 && group == 0)
      for (int i = 0; i < BlockOfKernel::kKeyGroups; ++i)
        sum_last_segment(p, s.segment, first_k + i * kGroupKeys, first_v);
    return;
  }
  if (group == 0)
    produce<kSweep, kStore>(s, p, first_k, first_v);
  else
    consume<kSweep, kStore>(s, p, group - 1, first_k, first_v);
}

template <class BlockOfKernel, Store kStore>
__global__ void __launch_bounds__(BlockOfKernel::kThreads, 1) kernel(Problem p, int64_t states) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_all_but_scan(kStore == Store::kChunks && p.grid.segment_states > 0);
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<BlockOfKernel*>(s_bytes);
  if (blockIdx.x < states)
    sweep<Sweep::kStates, kStore>(s, p, blockIdx.x);
  else
    sweep<Sweep::kStateGrads, kStore>(s, p, blockIdx.x - states);
#endif
}

template <class BlockOfKernel, Store kStore>
void launch(const Problem& p, bool states, bool state_grads, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(BlockOfKernel);
  static_assert(fits_multiprocessor(1, kSharedBytes));
  static const DynamicShared shared(kernel<BlockOfKernel, kStore>, kSharedBytes);
  const int64_t segments =
      kStore == Store::kSegment ? segment_state_heads(p.grid, p.H) : segment_heads(p.grid, p.H);
  const int64_t sweep_blocks = segments * prepared_key_blocks(p.K) * blocks_of(p.V, kValues);
  const int64_t blocks = sweep_blocks * (states + state_grads);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kernel<BlockOfKernel, kStore>, blocks, BlockOfKernel::kThreads, kSharedBytes,
                   stream, p, states ? sweep_blocks : 0);
}

template <Store kStore>
void launch(const Problem& p, bool states, bool state_grads, cudaStream_t stream) {
  if (p.K > kGroupKeys && prepared_key_blocks(p.K) == 1)
    launch<Block<3>, kStore>(p, states, state_grads, stream);
  else
    launch<Block<2>, kStore>(p, states, state_grads, stream);
}

}  // namespace states::prepared

void launch_states_prepared(const Problem& p, cudaStream_t stream) {
  // dS~ includes dh0, so this is launched even if there are no tokens.
  states::prepared::launch<states::Store::kChunks>(p, true, true, stream);
}

void launch_states_prepared_without_grads(const Problem& p, cudaStream_t stream) {
  states::prepared::launch<states::Store::kChunks>(p, true, false, stream);
}

void launch_states_prepared_chunk_pairs(const Problem& p, cudaStream_t stream) {
  launch_states_prepared(told(p, &Problem::chunk_pairs), stream);
}

void launch_summaries_prepared(const Problem& p, cudaStream_t stream) {
  states::prepared::launch<states::Store::kSegment>(p, true, false, stream);
}

void launch_summaries_prepared_both(const Problem& p, cudaStream_t stream) {
  states::prepared::launch<states::Store::kSegment>(p, true, true, stream);
}

void launch_summaries_prepared_grads(const Problem& p, cudaStream_t stream) {
  states::prepared::launch<states::Store::kSegment>(p, false, true, stream);
}

void launch_summaries_prepared_grads_and_decays(const Problem& p, cudaStream_t stream) {
  launch_summaries_prepared_grads(told(p, &Problem::sums_decays), stream);
}

}  // namespace gla_ext::cuda::sm90
