// The forward of a segment and head in one sweep over prepared chunks, for bf16 on sm_90a and up to
// 256 key channels. It computes what the consumers of forward/fused compute.
//
//   o = A v + q^ S~      S~ = 2^from S      S' = 2^(b_C - from) (S~ + k^T v)
//
// grid    (segment, head, 128 values); a producer and two consumer warpgroups
// reads   prepared chunks [B, entries, H] (after cluster summaries these have A of strong chunks
//         only), v [B, T, H, V], h0 or segment_states; only k^, the factors and v of replayed
//         chunks
// writes  o [B, T, H, V], ht
//
// The producer copies the prepared chunk and its rows of v, and multiplies the factors for leaving
// a chunk by those for entering the next. After cluster summaries it makes A too. A consumer holds
// the state of 64 values transposed, [V][K], in groups of 128 key channels; the second group may
// have 64. Its loop resembles fused/consume.cuh, but here the producer, which gates nothing, makes
// the factors between chunks, and the state may take 128 registers. Accumulation is fp32.
#include <type_traits>

#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/prepare/sweep.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "cuda/sm90/tiles/scores.cuh"
#include "fused/multiply.cuh"
#include "fused/output.cuh"
#include "parts.cuh"

namespace gla_ext::cuda::sm90 {
namespace forward::prepared {

constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
constexpr int kValues = kConsumers * kTile;  // values of a block

template <class OperandsOfChunk>
struct Stage {
  OperandsOfChunk operands;
  Tile v[kConsumers];  // [token][V], replaced by o
};

// Shared by both kinds of blocks. kTilesOfKeys: two to four tiles of 64 key channels.
template <int kTilesOfKeys, class OperandsOfChunk, int kStagesOfBlock>
struct ForwardBlock : PreparedBlock<Stage<OperandsOfChunk>, kStagesOfBlock, kConsumers> {
  static_assert(kTilesOfKeys >= 2 && kTilesOfKeys <= 4);
  static constexpr int kTiles = kTilesOfKeys, kGroups = kGroupsOf<kTiles>;
  using Base = PreparedBlock<Stage<OperandsOfChunk>, kStagesOfBlock, kConsumers>;
  // leave: factors by which the state leaves a chunk. pass: those times the factors by which it
  // enters the next chunk.
  float leave[kGroups * kGroupKeys];
  alignas(16) float pass[Base::kStages][kGroups * kGroupKeys];
  uint64_t operands_full[Base::kStages];

  __device__ __forceinline__ void start(const Problem& p, int64_t index) {
    if (threadIdx.x == 0)
      for (uint64_t& barrier : operands_full) init_barrier(&barrier, 1);
    Base::start(p, index, /*bulk_copies=*/0);
  }
};

// For prepared chunks that are complete in memory.
template <int kTilesOfKeys>
struct ReadingBlock : ForwardBlock<kTilesOfKeys, PreparedChunk<kGroupsOf<kTilesOfKeys>>,
                                   kTilesOfKeys == kKeyTiles ? 3 : 2> {
  static constexpr bool kMakesA = false, kReplays = true;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  __device__ __forceinline__ Tile& scores(int chunk) {
    return this->stages[chunk % this->kStages].operands.A;
  }
};

struct alignas(1024) Unscored {
  KeyGroup groups[1];
  int strong;
};
static_assert(sizeof(Unscored) >= offsetof(Unscored, strong) + kFlagBytes);
// For prepared chunks after cluster summaries: the producer makes A. Memory has only A of strong
// chunks, which is ready when the scan is done.
struct MakingBlock : ForwardBlock<kKeyTiles, Unscored, 4> {
  static constexpr bool kMakesA = true, kReplays = false;
  static constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;
  static constexpr int kPlaces = 2;
  alignas(1024) Tile A[kPlaces];  // [token][token]
  __device__ __forceinline__ Tile& scores(int chunk) { return A[chunk % kPlaces]; }
};

// Copies bytes [first, end) of a prepared chunk; `full` must already expect them.
template <class OperandsOfChunk>
__device__ __forceinline__ void copy_bytes(OperandsOfChunk& to, const unsigned char* from,
                                           int first, int end, uint64_t* full) {
  bulk_copy_expected(reinterpret_cast<unsigned char*>(&to) + first, from + first, end - first,
                     full);
}

// Copies the flag of a strong chunk.
template <int kGroups, class OperandsOfChunk>
__device__ __forceinline__ void copy_strong(OperandsOfChunk& to, const unsigned char* from,
                                            uint64_t* full) {
  bulk_copy_expected(&to.strong, from + offsetof(PreparedChunk<kGroups>, strong), kFlagBytes, full);
}

// Copies a prepared chunk, except tiles without key channels. Called by one thread.
template <class BlockOfKernel, class OperandsOfChunk>
__device__ __forceinline__ void copy_operands(OperandsOfChunk& to, const unsigned char* from,
                                              uint64_t* full) {
  constexpr int kGroups = BlockOfKernel::kGroups;
  constexpr int kScores = offsetof(PreparedChunk<kGroups>, A),
                kEnd = PreparedChunk<kGroups>::kBytes;
  if constexpr (BlockOfKernel::kMakesA) {
    arrive_and_expect(full, kScores + kFlagBytes);
    copy_bytes(to, from, 0, kScores, full);
    copy_strong<kGroups>(to, from, full);
  } else if constexpr (BlockOfKernel::kTiles == kGroups * kKeyTiles) {
    bulk_copy(&to, from, kEnd, full);
  } else {  // without the last tile of q^ and of k^
    constexpr int kLast = (kGroups - 1) * sizeof(KeyGroup);
    arrive_and_expect(full, kEnd - 2 * kTileBytes);
    copy_bytes(to, from, 0, kLast + kTileBytes, full);
    copy_bytes(to, from, kLast + offsetof(KeyGroup, factors),
               kLast + offsetof(KeyGroup, k) + kTileBytes, full);
    copy_bytes(to, from, kScores, kEnd, full);
  }
}

// Copies k^, the factors and the flag of a replayed chunk. Called by one thread.
template <class BlockOfKernel, class OperandsOfChunk>
__device__ __forceinline__ void copy_keys(OperandsOfChunk& to, const unsigned char* from,
                                          uint64_t* full) {
  constexpr int kGroups = BlockOfKernel::kGroups;
  arrive_and_expect(full, kGroups * kFactorBytes + BlockOfKernel::kTiles * kTileBytes + kFlagBytes);
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int group = i * static_cast<int>(sizeof(KeyGroup));
    const int tiles = i + 1 < kGroups ? kKeyTiles : BlockOfKernel::kTiles - i * kKeyTiles;
    copy_bytes(to, from, group + offsetof(KeyGroup, factors),
               group + offsetof(KeyGroup, k) + tiles * kTileBytes, full);
  }
  copy_strong<kGroups>(to, from, full);
}

// Puts A of a chunk into its place. Runs on the producer.
__device__ __forceinline__ void make_scores(MakingBlock& s, const Problem& p, int chunk,
                                            int thread) {
  const int before = chunk - s.kPlaces;
  if (before >= 0) wait(&s.empty[before % s.kStages], s.parity(before));  // had this place
  const auto& operands = s.stages[chunk % s.kStages].operands;
  if (__any_sync(0xffffffffu, operands.strong)) {
    await_previous_kernel();  // waits for the scan, whose launch makes A of strong chunks
    constexpr int kEach = kTileBytes / sizeof(uint4) / kGroupThreads;
    const unsigned char* A =
        prepared_at(p, s.segment.chunk_head(p, chunk)) + offsetof(PreparedChunk<1>, A);
    uint4 words[kEach];  // all loads are issued before the first store
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      words[i] = reinterpret_cast<const uint4*>(A)[i * kGroupThreads + thread];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      reinterpret_cast<uint4*>(&s.scores(chunk))[i * kGroupThreads + thread] = words[i];
  } else {
    const auto& group = operands.groups[0];
    float A[kTile / 2];
    begin_scores<kGroupKeys, kTile>(A, group.q, group.k, 0);
    wait_for_products<0>();
    place_scores<kTile>(s.scores(chunk), A, kTile, 0, thread);
  }
}

template <class BlockOfKernel>
__device__ __forceinline__ void produce(BlockOfKernel& s, const Problem& p, int first_v) {
  using StageOfBlock = std::decay_t<decltype(s.stages[0])>;
  constexpr int kGroups = BlockOfKernel::kGroups;
  const Segment& segment = s.segment;
  const int thread = static_cast<int>(threadIdx.x);
  RowCopier<kConsumers, kGroupThreads> v(p.v, token_offset(p.v, 1), segment, 0, thread, first_v,
                                         p.V);
  const unsigned char* operands = prepared_at(p, segment.chunk_head(p, 0));
#pragma unroll
  for (int i = 0; i < kGroups; ++i) s.leave[i * kGroupKeys + thread] = 1.f;
  s.produce(
      [&](int i, StageOfBlock& stage, uint64_t*) {
        uint64_t* full = &s.operands_full[i % s.kStages];
        if (BlockOfKernel::kReplays && thread == 0 && i < segment.replayed)
          copy_keys<BlockOfKernel>(stage.operands, operands, full);
        else if (thread == 0)
          copy_operands<BlockOfKernel>(stage.operands, operands, full);
        operands += p.H * prepared_bytes(p.K);
        v.copy(stage.v, segment.length_of(i));
        v.move(1);
      },
      [&](int i) {
        const int number = i % s.kStages;
        wait(&s.operands_full[number], s.parity(i));
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const auto& factors = s.stages[number].operands.groups[group].factors;
          float& leave = s.leave[group * kGroupKeys + thread];
          s.pass[number][group * kGroupKeys + State<kGroupKeys>::quad_index(thread)] =
              factors[kEnter][thread] * leave;
          leave = factors[kLeave][thread];
        }
        if constexpr (BlockOfKernel::kMakesA) make_scores(s, p, i, thread);
      });
}

// Issues the products of the state, S~ + k^T v.
template <int kTiles, class Values, class OperandsOfChunk>
__device__ __forceinline__ void multiply_values(Parts<kTiles>& state, const Values& v,
                                                const OperandsOfChunk& operands) {
  state.for_each([&](auto& part, int i) { multiply_keys(part, v, operands.groups[i].k); });
  commit_products();
}

// Multiplies the state by one kind of factors of a chunk's key channels.
template <int kTiles, class OperandsOfChunk>
__device__ __forceinline__ void scale(Parts<kTiles>& state, const OperandsOfChunk& operands,
                                      Factor factor) {
  state.for_each([&](auto& part, int i) { part.scale(operands.groups[i].factors[factor]); });
}

// Sums the state over the replayed chunks.
template <class BlockOfKernel, int kTiles>
__device__ __forceinline__ void consume_replayed(BlockOfKernel& s, Parts<kTiles>& state,
                                                 int group) {
  for (int chunk = 0; chunk < s.segment.replayed; ++chunk) {
    const int number = chunk % s.kStages;
    const auto& stage = s.stages[number];
    wait(&s.full[number], s.parity(chunk));
    const bool strong = __any_sync(0xffffffffu, stage.operands.strong);
    state.for_each([&](auto& part, int i) { part.pass(s.pass[number] + i * kGroupKeys); });
    if (strong) scale(state, stage.operands, kMiddle);
    const ValueOperand<true> v(stage.v[group]);
    begin_products();
    multiply_values(state, v, stage.operands);
    wait_for_products<0>();
    fence_for_products();  // also for bulk copies
    arrive(&s.empty[number]);
  }
}

template <class BlockOfKernel>
__device__ __forceinline__ void consume(BlockOfKernel& s, const Problem& p, int group,
                                        int block_v) {
  const Segment& segment = s.segment;
  const int first_v = block_v + kTile * group;
  if (segment.tail) return write_tail(p, segment, first_v);
  Parts<BlockOfKernel::kTiles> state;
  state.for_each([&](auto& part, int i) {
    part.first_k = i * kGroupKeys;
    part.load(p, segment, first_v);
  });
  if constexpr (BlockOfKernel::kReplays) consume_replayed(s, state, group);
  for (int chunk = BlockOfKernel::kReplays ? segment.replayed : 0; chunk < segment.chunks;
       ++chunk) {
    const int number = chunk % s.kStages;
    auto& stage = s.stages[number];
    wait(&s.full[number], s.parity(chunk));
    const bool strong = __any_sync(0xffffffffu, stage.operands.strong);
    float o[32];  // [64 values][64 tokens]
    StateOperand operand;
    state.for_each([&](auto& part, int i) {
      multiply_state(o, part, s.pass[number] + i * kGroupKeys, stage.operands.groups[i].q, operand,
                     i == 0);
    });
    if (strong) {
      wait_for_products<0>();
      scale(state, stage.operands, kMiddle);
    }
    const ValueOperand<true> v(stage.v[group]);
    begin_products();
#pragma unroll
    for (int j = 0; j < 4; ++j)
      v.template multiply<Contiguous::kSummed>(o, j, sixteen_columns(s.scores(chunk), j));
    commit_products();
    multiply_values(state, v, stage.operands);
    // The state's products may still run while o is stored, because v is in registers.
    wait_for_products<1>();
    const OutputRows rows(stage.v[group], o, group);
    wait_for_products<0>();
    state.for_each([&](auto& part, int i) {
      keep_state(p, segment, chunk, part, first_v, stage.operands.groups[i].factors[kLeave]);
    });
    if (chunk + 1 == segment.chunks) scale(state, stage.operands, kLeave);
    fence_for_products();  // also for bulk copies; later it would wait for the rows' stores
    arrive(&s.empty[number]);
    rows.write(p, segment, chunk, first_v);
  }
  state.for_each([&](auto& part, int) { part.store(p, segment, first_v); });
}

template <class BlockOfKernel>
__global__ void __launch_bounds__(kThreads, 1) kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // A block that requests more registers than it is launched with waits for ever.
  constexpr int kProducerRegisters = BlockOfKernel::kProducerRegisters,
                kConsumerRegisters = BlockOfKernel::kConsumerRegisters;
  static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kGroupThreads <=
                launch_registers(kThreads) * kThreads);
  wait_for_all_but_scan(p.grid.segment_states > 0);
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<BlockOfKernel*>(s_bytes);
  const int v_blocks = blocks_of(p.V, kValues);
  const int block_v = static_cast<int>(blockIdx.x % v_blocks) * kValues;
  s.start(p, blockIdx.x / v_blocks);
  const int group = warpgroup();
  if (group == 0) {
    give_registers<kProducerRegisters>();
    if (!s.segment.tail) produce(s, p, block_v);
  } else {
    take_registers<kConsumerRegisters>();
    await_previous_kernel();  // waits for the scan
    consume(s, p, group - 1, block_v);
  }
#endif
}

template <class BlockOfKernel>
void launch(const Problem& p, cudaStream_t stream) {
  static_assert(fits_multiprocessor(1, sizeof(BlockOfKernel)));
  static const DynamicShared shared(kernel<BlockOfKernel>, sizeof(BlockOfKernel));
  const int64_t blocks = segment_heads(p.grid, p.H) * blocks_of(p.V, kValues);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kernel<BlockOfKernel>, blocks, kThreads, sizeof(BlockOfKernel), stream, p);
}

}  // namespace forward::prepared

void launch_forward_prepared_makes_A(const Problem& p, cudaStream_t stream) {
  forward::prepared::launch<forward::prepared::MakingBlock>(p, stream);
}

void launch_forward_prepared(const Problem& p, cudaStream_t stream) {
  if (p.K > 3 * kTile)
    forward::prepared::launch<forward::prepared::ReadingBlock<4>>(p, stream);
  else if (p.K > 2 * kTile)
    forward::prepared::launch<forward::prepared::ReadingBlock<3>>(p, stream);
  else
    forward::prepared::launch<forward::prepared::ReadingBlock<2>>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
