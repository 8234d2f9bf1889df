// Forward step 2 and backward step 3 in one launch, for bf16 on sm_90a and K of at most 64: sweeps
// over the chunks of a segment with the state, or its gradient, in registers.
//
//   S' = 2^b_C S + (k 2^(b_C - b))^T v             first chunk first
//   dS = 2^b_C dS' + (scale q 2^b)^T do            last chunk first
//
// grid    (sweep, segment, head, 128 values); two producer and two consumer warpgroups. Where V is
//         at most 64: one consumer, and two blocks a multiprocessor. Summaries: a summary in place
//         of a segment.
// reads   g [B, T, H, K]; k v h0, or q do dht; segment_states, segment_state_grads
// writes  S entering every chunk, bf16 [B, chunks, H, K, V], and tiers; unless gradients are swept,
//         dS' leaving every chunk, and dh0. Summaries: only segment_states or segment_state_grads,
//         and segment_decays.
//
// The producers copy rows two chunks ahead and gate k or q in place, half of the key channels each.
// The consumers hold 64 values each. Accumulation is fp32.
#include "consume.cuh"
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "produce.cuh"

namespace gla_ext::cuda::sm90 {
namespace states::fused {

// Two blocks a multiprocessor if a block has three warpgroups.
template <int kConsumers>
constexpr int kBlocks = kConsumers == 1 ? 2 : 1;
template <int kConsumers>
constexpr int kProducerRegisters = kConsumers == 1 ? 72 : 88;
template <int kConsumers>
constexpr int kConsumerRegisters = kConsumers == 1 ? 96 : 168;

template <Sweep kSweep, Store kStore, int kConsumers, class Gate>
__device__ __forceinline__ void sweep(Block<kConsumers, Gate>& s, const Problem& p, int64_t index) {
  constexpr int kValues = Unit<kConsumers, Gate>::kValues;
  const int v_blocks = blocks_of(p.V, kValues);
  const int first_v = static_cast<int>(index % v_blocks) * kValues;
  start_block<kProducers, kConsumers, 0, kStore == Store::kSegment>(s, s.unit.segment, p, index,
                                                                    v_blocks);
  const int group = warpgroup();
  auto& unit = s.unit;
  // The last segment of a sweep has nothing to do for summaries: nothing reads its summary.
  const bool idle = unit.segment.tail || (kStore == Store::kSegment &&
                                          Fields<kSweep>::ends(unit.segment) && !p.grid.with_last);
  if (group < kProducers) {
    give_registers<kProducerRegisters<kConsumers>>();
    if (!idle) produce<kSweep, kStore>(unit, s.triangle, p, group, first_v);
  } else {
    take_registers<kConsumerRegisters<kConsumers>>();
    if (!idle) consume<kSweep, kStore>(unit, p, group - kProducers, first_v);
  }
}

template <int kConsumers, class Gate, Store kStore>
__global__ void __launch_bounds__(Block<kConsumers, Gate>::kThreads, kBlocks<kConsumers>)
    kernel(Problem p, int64_t states) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Block<kConsumers, Gate>*>(s_bytes);
  if (blockIdx.x < states)
    sweep<Sweep::kStates, kStore>(s, p, blockIdx.x);
  else
    sweep<Sweep::kStateGrads, kStore>(s, p, blockIdx.x - states);
#endif
}

template <int kConsumers, class Gate, Store kStore>
void launch(const Problem& p, bool states, bool state_grads, cudaStream_t stream) {
  using Shared = Block<kConsumers, Gate>;
  constexpr auto kKernel = kernel<kConsumers, Gate, kStore>;
  static_assert(fits_multiprocessor(kBlocks<kConsumers>, sizeof(Shared)));
  static_assert(
      kProducers * kProducerRegisters<kConsumers> + kConsumers * kConsumerRegisters<kConsumers> <=
      (kProducers + kConsumers) * launch_registers(kBlocks<kConsumers> * Shared::kThreads));
  static const DynamicShared shared(kKernel, sizeof(Shared));
  const int64_t segments =
      kStore == Store::kSegment ? segment_state_heads(p.grid, p.H) : segment_heads(p.grid, p.H);
  const int64_t sweep_blocks = segments * blocks_of(p.V, Unit<kConsumers, Gate>::kValues);
  const int64_t blocks = sweep_blocks * (states + state_grads);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kKernel, blocks, Shared::kThreads, sizeof(Shared), stream, p,
                   states ? sweep_blocks : 0);
}

template <class Gate, Store kStore>
void launch(const Problem& p, bool states, bool state_grads, cudaStream_t stream) {
  if (p.V > 64)
    launch<2, Gate, kStore>(p, states, state_grads, stream);
  else
    launch<1, Gate, kStore>(p, states, state_grads, stream);
}

template <Store kStore>
void launch(const Problem& p, bool states, bool state_grads, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat)
    launch<float, kStore>(p, states, state_grads, stream);
  else
    launch<bf16, kStore>(p, states, state_grads, stream);
}

}  // namespace states::fused

void launch_states_fused(const Problem& p, cudaStream_t stream) {
  // Launched for S and dS even if there are no tokens, since the sweep of dS also writes dh0.
  states::fused::launch<states::Store::kChunks>(p, true, true, stream);
}

void launch_states_fused_without_grads(const Problem& p, cudaStream_t stream) {
  states::fused::launch<states::Store::kChunks>(p, true, false, stream);
}

void launch_summaries_fused(const Problem& p, cudaStream_t stream) {
  states::fused::launch<states::Store::kSegment>(p, true, false, stream);
}

void launch_summaries_fused_both(const Problem& p, cudaStream_t stream) {
  states::fused::launch<states::Store::kSegment>(p, true, true, stream);
}

}  // namespace gla_ext::cuda::sm90
