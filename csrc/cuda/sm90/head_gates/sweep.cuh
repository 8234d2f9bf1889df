// One sweep over the chunks of a segment and head with one gate a head, for bf16 on sm_90a. The
// rows of q, k and v are multiplied as they are in memory: the gates are a mask of the scores, a
// factor of each token, and one factor of the state. None of these is above 1 (times scale). From
// the first chunk to the last:
//
//   A_ij = scale 2^(b_i - b_j) q_i . k_j   o_i = sum over j <= i of A_ij v_j + from_start_i S^T q_i
//   S' = 2^b_C S + sum over j of k_j (to_end_j v_j)^T
//
// and from the last to the first, where S' is the state that the later chunks have summed:
//
//   A_ij = scale 2^(b_i - b_j) k_i . q_j   o_j = sum over i >= j of A_ij v_i + to_end_j S'^T q_j
//   S = 2^b_C S' + sum over i of k_i (from_start_i v_i)^T
//
// All gradients except that of the gates are such sweeps over other tensors, because the mask does
// not depend on a channel. dq is forward's sweep over do, v and k. The sweeps backward in time make
// dv from k, q and do, and dk from v, do and q.
//
// grid    (segment, head, 128 values; 64 where kConsumers = 1); a producer and kConsumers consumer
//         warpgroups
// reads   q, k [B, T, H, K], v [B, T, H, V], h0 or segment_states, HeadGates [B, entries, H]
// writes  o [B, T, H, V], ht
//
// A sweep "with dots" also writes, in fp32, the terms of the gates' gradient: w_i . o_i of every
// token for the part of o_i that comes from the state. Two such sweeps add one number, the same to
// fp32, for a pair of tokens: w_i from_start_i (or w_j to_end_j) is rounded as in the operand that
// is added to the other sweep's state, and the state's operand has two bf16 terms. The pairs inside
// a chunk need only one sweep, the one forward in time: A_ij (w_i . v_j) for j < i, which the
// producer sums after it has released A. A token's pair with itself passes no gate.
//
// The producer copies rows and the sums of gates, and makes A. A consumer holds the state of 64
// values transposed, [V][K], in registers, as forward/ does. v times its tokens' factors, in
// registers, is added to the state; v in shared memory is multiplied by A. Accumulation is fp32.
#pragma once

#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/forward/fused/multiply.cuh"
#include "cuda/sm90/forward/fused/output.cuh"
#include "cuda/sm90/forward/parts.cuh"
#include "cuda/sm90/prepare/sweep.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "dots.cuh"
#include "operands.cuh"
#include "produce.cuh"

namespace gla_ext::cuda::sm90::head_gates {

template <int kTiles, int kConsumers, bool kDots>
struct Stage {
  Tile q[kTiles];      // [token][K]
  Tile k[kTiles];      // [token][K]
  Tile v[kConsumers];  // [token][V], replaced by o
};
template <int kTiles, int kConsumers>
struct Stage<kTiles, kConsumers, true> : Stage<kTiles, kConsumers, false> {
  Tile w[kConsumers];  // [token][V]
};

// As many stages as shared memory has room for. Narrow blocks run two a multiprocessor.
constexpr int stages_of(int tiles, int consumers, bool dots) {
  if (consumers == 1) return dots ? 2 : 3;
  if (dots) return tiles <= 2 ? 5 - tiles : 2;
  return tiles <= 2 ? 4 : 6 - tiles;
}

// kTilesOfKeys: one to four tiles of 64 key channels.
template <int kTilesOfKeys, int kConsumersOfBlock, Time kTimeOfBlock, bool kDotsOfBlock>
struct Block
    : PreparedBlock<Stage<kTilesOfKeys, kConsumersOfBlock, kDotsOfBlock>,
                    stages_of(kTilesOfKeys, kConsumersOfBlock, kDotsOfBlock), kConsumersOfBlock> {
  static constexpr int kTiles = kTilesOfKeys, kConsumers = kConsumersOfBlock;
  static constexpr Time kTime = kTimeOfBlock;
  static constexpr bool kMakesDots = kDotsOfBlock;
  static constexpr bool kMakesPairs = kMakesDots && kTime == Time::kForward;
  static constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
  static constexpr int kBlocksEach = kConsumers == 1 ? 2 : 1;  // blocks a multiprocessor
  static constexpr int kValues = kConsumers * kTile;
  static constexpr int kProducerRegisters = kConsumers == 1 ? 96 : kTiles == 4 ? 56 : 88;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 160 : kTiles == 4 ? 224 : 208;
  static constexpr int kPlaces = 2;
  static constexpr int kColumns = kTiles == 4 ? kTile / 2 : kTile;  // columns of A made at once

  static constexpr bool kKeysFirst = kMakesDots && Block::kStages == 2;  // see produce.cuh

  alignas(1024) Tile A[kPlaces];  // [token][token]
  HeadGates gates[Block::kStages];
  std::conditional_t<kKeysFirst, uint64_t[Block::kStages], Nothing> multiplied;  // q, k, gates
  alignas(8) std::conditional_t<kMakesDots, float[kConsumers][kGroupThreads / 32][kTile],
                                Nothing> dots;  // read as pairs
  std::conditional_t<kMakesPairs, PairSums<Block::kStages>, Nothing> pairs;

  // Finds the segment and sets up the barriers. Backward in time, a sequence starts with its last
  // segment.
  __device__ __forceinline__ void start(const Problem& p, int64_t index) {
    if (threadIdx.x == 0) {
      Segment found = find_segment(p, index);
      if (kTime == Time::kBackward) {
        const bool last = found.last;
        found.last = found.first;
        found.first = last;
        found.state = found.last_state;
      }
      this->segment = found;
      init_stages<1, kConsumers>(*this);
      if constexpr (kKeysFirst)
        for (uint64_t& barrier : multiplied) init_barrier(&barrier, kConsumers * kGroupThreads);
      if constexpr (kMakesPairs)
        for (uint64_t& barrier : pairs.made) init_barrier(&barrier, kGroupThreads);
    }
    fence_for_products();
    __syncthreads();  // the barriers and the segment are written
  }
};

// The tokens' factors for the part of o that comes from the state.
template <Time kTime>
__device__ __forceinline__ const float* factors_of_outputs(const HeadGates& g) {
  return kTime == Time::kForward ? g.from_start : g.to_end;
}

// Issues the products o += v^T A. v, A: see `Stage` and `Block`.
template <Time kTime>
__device__ __forceinline__ void multiply_scores(float (&o)[32], const Tile& v, const Tile& A) {
  const forward::ValueOperand<false> values(v);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if constexpr (kTime == Time::kForward)
      values.template multiply<Contiguous::kSummed>(o, i, sixteen_columns(A, i));
    else
      values.template multiply<Contiguous::kOther>(o, i, sixteen_rows(A, i));
}

template <class BlockOfKernel>
__device__ __forceinline__ void consume(BlockOfKernel& s, const Problem& p, bool transposed,
                                        int group, int block_v) {
  constexpr Time kTime = BlockOfKernel::kTime;
  constexpr bool kMakesDots = BlockOfKernel::kMakesDots;
  const Segment& segment = s.segment;
  const int first_v = block_v + kTile * group;
  if (segment.tail) return forward::write_tail(p, segment, first_v);
  forward::Parts<BlockOfKernel::kTiles> state;
  state.for_each([&](auto& part, int i) {
    part.first_k = i * kGroupKeys;
    part.load(p, segment, first_v, thread_index(), transposed);
  });
  const auto keep = [&](int chunk) {
    if constexpr (kTime == Time::kForward && !kMakesDots)
      state.for_each([&](auto& part, int) {
        part.write(p, checkpoint_after(p, segment, chunk), first_v, thread_index(),
                   [](int) { return 1.f; });
      });
  };
  for (int i = 0; i < segment.chunks; ++i) {
    keep(i - 1);  // here, it takes no registers of the rest of the loop
    const int number = i % s.kStages;
    auto& stage = s.stages[number];
    Tile& values = stage.v[group];
    wait(&s.full[number], s.parity(i));
    const HeadGates& gates = s.gates[number];
    float o[32];  // [64 values][64 tokens]
    const forward::Leaving leaving{gates.decay[0]};
    std::conditional_t<kMakesDots, TwoTermOperand<BlockOfKernel::kTiles>, forward::StateOperand>
        operand;
    state.for_each([&](auto& part, int j) {
      const Tile* q = stage.q + j * kKeyTiles;
      if constexpr (kMakesDots)
        multiply_two_terms<BlockOfKernel::kTiles>(o, part, leaving, q, operand, j == 0);
      else
        forward::multiply_state(o, part, leaving, q, operand, j == 0);
    });
    const ScaledValues v(values, factors_of_values<kTime>(gates));
    begin_products();
    state.for_each(
        [&](auto& part, int j) { forward::multiply_keys(part, v, stage.k + j * kKeyTiles); });
    commit_products();
    wait_for_products<1>();  // the state's part of o is complete
    if constexpr (kMakesDots)
      sum_dots(s.dots[group][thread_index() % kGroupThreads / 32], o, stage.w[group],
               factors_of_outputs<kTime>(gates));
    scale_columns(o, factors_of_outputs<kTime>(gates) + 2 * (thread_index() % 4));
    begin_products();
    multiply_scores<kTime>(o, values, s.A[i % s.kPlaces]);
    commit_products();
    if constexpr (BlockOfKernel::kKeysFirst) {
      wait_for_products<1>();  // the state's products
      arrive(&s.multiplied[number]);
    }
    wait_for_products<0>();
    if constexpr (BlockOfKernel::kMakesPairs) wait(&s.pairs.made[number], s.parity(i));
    group_barrier<forward::kConsumerBarrier>(group);  // v is read, the warps' sums are written
    forward::store_transposed_tile(values, o,
                                   kMakesDots ? thread_index() : static_cast<int>(threadIdx.x));
    const int chunk = chunk_of<kTime>(segment, i);
    if constexpr (kMakesDots) store_dots(s, p, chunk, block_v, group);
    group_barrier<forward::kConsumerBarrier>(group);  // o is written, the sums are read
    const forward::OutputPart part{thread_index() % kGroupThreads};
    part.write(p, segment, chunk, first_v, [&](int row) { return part.row(values, row); });
    arrive(&s.empty[number]);
  }
  keep(segment.chunks - 1);
  state.for_each([&](auto& part, int) { part.store(p, segment, first_v, thread_index()); });
  if constexpr (kMakesDots && kTime == Time::kForward) store_last_dot(s, p, state, block_v, group);
}

template <class BlockOfKernel>
__global__ void __launch_bounds__(BlockOfKernel::kThreads, BlockOfKernel::kBlocksEach)
    kernel(Problem p, bool transposed) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // A block that requests more registers than it is launched with waits for ever.
  constexpr int kProducerRegisters = BlockOfKernel::kProducerRegisters,
                kConsumerRegisters = BlockOfKernel::kConsumerRegisters;
  static_assert((kProducerRegisters + BlockOfKernel::kConsumers * kConsumerRegisters) *
                    kGroupThreads <=
                launch_registers(BlockOfKernel::kBlocksEach * BlockOfKernel::kThreads) *
                    BlockOfKernel::kThreads);
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<BlockOfKernel*>(s_bytes);
  const int v_blocks = blocks_of(p.V, BlockOfKernel::kValues);
  const int block_v = static_cast<int>(blockIdx.x % v_blocks) * BlockOfKernel::kValues;
  s.start(p, blockIdx.x / v_blocks);
  const int group = warpgroup();
  if (group == 0) {
    give_registers<kProducerRegisters>();
    if (!s.segment.tail) produce(s, p, block_v);
  } else {
    take_registers<kConsumerRegisters>();
    consume(s, p, transposed, group - 1, block_v);
  }
#endif
}

template <class BlockOfKernel>
void launch_blocks(const Problem& p, bool transposed, cudaStream_t stream) {
  static_assert(fits_multiprocessor(BlockOfKernel::kBlocksEach, sizeof(BlockOfKernel)));
  static const DynamicShared shared(kernel<BlockOfKernel>, sizeof(BlockOfKernel));
  const int64_t blocks = segment_heads(p.grid, p.H) * blocks_of(p.V, BlockOfKernel::kValues);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kernel<BlockOfKernel>, blocks, BlockOfKernel::kThreads, sizeof(BlockOfKernel),
                   stream, p, transposed);
}

// transposed: segment_states are stored as [V][K], in terms of this sweep's keys and values. This
// is so where they have changed places with those of the call.
template <Time kTime, bool kMakesDots>
void launch_sweep(const Problem& p, bool transposed, cudaStream_t stream) {
  if (p.K > 3 * kTile)
    launch_blocks<Block<4, 2, kTime, kMakesDots>>(p, transposed, stream);
  else if (p.K > 2 * kTile)
    launch_blocks<Block<3, 2, kTime, kMakesDots>>(p, transposed, stream);
  else if (p.K > kTile)
    launch_blocks<Block<2, 2, kTime, kMakesDots>>(p, transposed, stream);
  else if (p.V > kTile)
    launch_blocks<Block<1, 2, kTime, kMakesDots>>(p, transposed, stream);
  else
    launch_blocks<Block<1, 1, kTime, kMakesDots>>(p, transposed, stream);
}

}  // namespace gla_ext::cuda::sm90::head_gates
