// Summaries with one gate a head: what each segment adds by itself to the state, or to the state's
// gradient:
//
//   S' = 2^b_C S + sum over j of k_j (to_end_j v_j)^T          from 0, first chunk first
//   dS = 2^b_C dS' + sum over i of q_i (from_start_i do_i)^T   from 0, last chunk first
//
// An operand that is multiplied by a factor is rounded to bf16. For the dots of backward's sweeps,
// the summaries must round the same operands as these sweeps (sweep.cuh): to_end_j k_j, and
// from_start_i q_i. Then keys and values change places, and the state is written transposed.
//
// grid    (summary, head, 128 values), times groups of 128 keys if transposed; a producer and two
//         consumer warpgroups
// reads   k [B, T, H, K], v [B, T, H, V] (q and do), HeadGates [B, entries, H]
// writes  segment_states (segment_state_grads) [B, states, H, K, V], and segment_decays [B, states,
//         H, K], the sum of a segment's gates, repeated for every channel, as the scan reads them
//
// The summary of a sweep's last segment is not made, as nothing reads it. The other sweep needs
// that segment's decay and makes it. Accumulation is fp32.
#include <utility>

#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/forward/fused/multiply.cuh"
#include "cuda/sm90/forward/parts.cuh"
#include "cuda/sm90/prepare/sweep.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "head_gates.h"
#include "operands.cuh"

namespace gla_ext::cuda::sm90 {
namespace head_gates::summaries {

constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreadsOfBlock = (1 + kConsumers) * kGroupThreads;
constexpr int kValues = kConsumers * kTile;  // values of a block
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

template <int kTiles>
struct Stage {
  Tile k[kTiles];      // [token][K]
  Tile v[kConsumers];  // [token][V]
};

template <int kTilesOfKeys, Time kTimeOfBlock, bool kTransposedStates>
struct Block : PreparedBlock<Stage<kTilesOfKeys>, 4, kConsumers> {
  static constexpr int kTiles = kTilesOfKeys;
  static constexpr Time kTime = kTimeOfBlock;
  static constexpr bool kTransposed = kTransposedStates;
  HeadGates gates[Block::kStages];
};

template <class BlockOfKernel>
__device__ __forceinline__ void produce(BlockOfKernel& s, const Problem& p, int block_k,
                                        int block_v) {
  using StageOfBlock = std::decay_t<decltype(s.stages[0])>;
  s.produce([&](int i, StageOfBlock& stage, uint64_t*) {
    const Segment& segment = s.segment;
    const int chunk = chunk_of<BlockOfKernel::kTime>(segment, i), thread = thread_index();
    copy_operand<BlockOfKernel::kTiles>(stage.k, p.k, segment, chunk, thread, p.K, block_k);
    copy_rows<kConsumers, kGroupThreads>(stage.v, p.v, segment, chunk, thread, block_v, p.V);
    copy_gates(s.gates[i % s.kStages], p, segment, chunk, thread);
  });
}

template <class BlockOfKernel>
__device__ __forceinline__ void consume(BlockOfKernel& s, const Problem& p, int group, int block_k,
                                        int block_v) {
  constexpr bool kTransposed = BlockOfKernel::kTransposed;
  const Segment& segment = s.segment;
  const int first_v = block_v + kTile * group;
  forward::Parts<BlockOfKernel::kTiles> state;
  state.for_each([&](auto& part, int i) {
    part.first_k = block_k + i * kGroupKeys;
    part.clear();
  });
  float sum = 0;  // sum of the gates
  for (int i = 0; i < segment.chunks; ++i) {
    const int number = i % s.kStages;
    auto& stage = s.stages[number];
    wait(&s.full[number], s.parity(i));
    const HeadGates& gates = s.gates[number];
    sum += gates.b[kChunk - 1][0] + gates.b[kChunk - 1][1];
    const float decay = gates.decay[0];
    state.for_each([&](auto& part, int) { part.scale(decay); });
    const ScaledValues v(stage.v[group], factors_of_values<BlockOfKernel::kTime>(gates));
    begin_products();
    state.for_each(
        [&](auto& part, int j) { forward::multiply_keys(part, v, stage.k + j * kKeyTiles); });
    commit_products();
    wait_for_products<0>();
    arrive(&s.empty[number]);
  }
  float* out = p.segment_states + segment.state * static_cast<int64_t>(p.K) * p.V;
  state.for_each([&](auto& part, int) {
    part.for_elements(p, first_v, thread_index(), [&](float y, int k, int v) {
      out[kTransposed ? v * p.K + k : k * p.V + v] = y;
    });
  });
  if (first_v != 0 || block_k != 0) return;
  const int keys = kTransposed ? p.V : p.K;
  for (int k = thread_index() % kGroupThreads; k < keys; k += kGroupThreads)
    p.segment_decays[segment.state * keys + k] = sum;
}

// The number of blocks of a summary along the keys.
template <class BlockOfKernel>
__host__ __device__ constexpr int key_blocks(const Problem& p) {
  return BlockOfKernel::kTransposed ? blocks_of(p.K, kGroupKeys) : 1;
}

template <class BlockOfKernel>
__global__ void __launch_bounds__(kThreadsOfBlock, 1) kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // A block that requests more registers than it is launched with waits for ever.
  static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kGroupThreads <=
                launch_registers(kThreadsOfBlock) * kThreadsOfBlock);
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<BlockOfKernel*>(s_bytes);
  const int v_blocks = blocks_of(p.V, kValues);
  const int block_v = static_cast<int>(blockIdx.x % v_blocks) * kValues;
  const int k_blocks = key_blocks<BlockOfKernel>(p);
  const int block_k = static_cast<int>(blockIdx.x / v_blocks % k_blocks) * kGroupKeys;
  s.template start</*kOfStates=*/true>(p, blockIdx.x / v_blocks / k_blocks, /*bulk_copies=*/0);
  const bool unread = BlockOfKernel::kTime == Time::kForward ? s.segment.last : s.segment.first;
  if (s.segment.tail || unread) return;
  const int group = warpgroup();
  if (group == 0) {
    give_registers<kProducerRegisters>();
    produce(s, p, block_k, block_v);
  } else {
    take_registers<kConsumerRegisters>();
    consume(s, p, group - 1, block_k, block_v);
  }
#endif
}

template <class BlockOfKernel>
void launch_blocks(const Problem& p, cudaStream_t stream) {
  static_assert(fits_multiprocessor(1, sizeof(BlockOfKernel)));
  static const DynamicShared shared(kernel<BlockOfKernel>, sizeof(BlockOfKernel));
  const int64_t blocks =
      segment_state_heads(p.grid, p.H) * key_blocks<BlockOfKernel>(p) * blocks_of(p.V, kValues);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kernel<BlockOfKernel>, blocks, kThreadsOfBlock, sizeof(BlockOfKernel), stream,
                   p);
}

template <Time kTime>
void launch_summaries(const Problem& p, cudaStream_t stream) {
  if (p.K > 3 * kTile)
    launch_blocks<Block<4, kTime, false>>(p, stream);
  else if (p.K > 2 * kTile)
    launch_blocks<Block<3, kTime, false>>(p, stream);
  else if (p.K > kTile)
    launch_blocks<Block<2, kTime, false>>(p, stream);
  else
    launch_blocks<Block<1, kTime, false>>(p, stream);
}

template <Time kTime>
void launch_transposed(const Problem& p, cudaStream_t stream) {
  Problem roles = p;
  std::swap(roles.k, roles.v);
  std::swap(roles.K, roles.V);
  if (roles.K > kTile)
    launch_blocks<Block<2, kTime, true>>(roles, stream);
  else
    launch_blocks<Block<1, kTime, true>>(roles, stream);
}

// With dg, the dots need transposed summaries.
template <Time kTime>
void launch(const Problem& p, cudaStream_t stream) {
  const bool for_dots = p.dg.data != nullptr;
  for_dots ? launch_transposed<kTime>(p, stream) : launch_summaries<kTime>(p, stream);
}

}  // namespace head_gates::summaries

void launch_head_gate_summaries(const Problem& p, cudaStream_t stream) {
  head_gates::summaries::launch<head_gates::Time::kForward>(p, stream);
}

void launch_head_gate_summaries_of_grads(const Problem& p, cudaStream_t stream) {
  Problem roles = p;
  roles.k = p.q;
  roles.v = p.d_o;
  roles.segment_states = p.segment_state_grads;
  head_gates::summaries::launch<head_gates::Time::kBackward>(roles, stream);
}

}  // namespace gla_ext::cuda::sm90
