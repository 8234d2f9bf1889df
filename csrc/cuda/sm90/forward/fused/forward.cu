// The whole forward of a segment and head in one sweep, for bf16 on sm_90a; g may be fp32 if K is
// at most 64. With q^ = scale q 2^(b - r) and k^ = k 2^(r - b) a chunk is ordinary linear
// attention,
//
//   A = tril(q^ k^T)      o = A v + q^ S~      S~ = 2^r S      S' = 2^(b_C - r) (S~ + k^T v)
//
// and the state stays in registers.
//
// grid    (segment, head, 128 values); two producer and two consumer warpgroups. Heads with K and V
//         of at most 64 and bf16 gates use forward/small.cu.
// reads   q, k, g [B, T, H, K], v [B, T, H, V], h0 or segment_states; only g, k and v of replayed
//         chunks
// writes  o [B, T, H, V], ht, tiers [B, entries, H, blocks]; for backward prepared chunks [B,
// entries,
//         H], without A of strong ones
//
// The producers take the chunks in turn and do everything that does not need the state: a producer
// copies a chunk's rows into shared memory, sums the gates, turns q and k into q^ and k^ in place
// and multiplies them. A consumer holds the state of 64 values transposed, [V][K], so that its bf16
// form is an operand that never leaves the registers; it multiplies by A, q^ and k^. Accumulation
// is fp32.
//
// A channel out of tier 1's range uses q 2^b and k 2^(b_C - b) with the state, which is exact at
// any gate. A of such a strong chunk is left out; tiers records this, and strong/output.cu adds A
// v.
#include "consume.cuh"
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "produce.cuh"

namespace gla_ext::cuda::sm90 {
namespace forward::fused {

template <int K, class Gate>
using Block = SweepBlock<Unit<K, kGroups, 1, Gate>, kBlockThreads>;

// kForBackward: also stores the prepared chunks (q^, k^ and their factors; see
// prepare/prepared.cuh) for backward. Used where K > 64 and V <= 128. kPastAlone: see
// tiles/gating.cuh.
template <int K, class Gate, bool kForBackward, bool kPastAlone>
__global__ void __launch_bounds__(kBlockThreads, 1) kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Block<K, Gate>*>(s_bytes);
  const int v_blocks = blocks_of(p.V, s.unit.kValues);
  const int block_v = static_cast<int>(blockIdx.x % v_blocks) * s.unit.kValues;
  const Segment& segment = s.unit.segments[0];
  start_block<1, kGroups, kForBackward>(s, s.unit.segments[0], p, blockIdx.x, v_blocks);
  const int group = warpgroup();
  if (group < kGroups) {
    give_registers<96>();
    if (!segment.tail) produce<kForBackward, kPastAlone>(s.unit, s.triangle, p, group, block_v);
  } else {
    take_registers<160>();
    consume(s.unit, p, segment, 0, group - kGroups, block_v);
  }
#endif
}

template <int K, class Gate, bool kForBackward, bool kPastAlone>
void launch(const Problem& p, cudaStream_t stream) {
  using Shared = Block<K, Gate>;
  static_assert(fits_multiprocessor(1, sizeof(Shared)));
  constexpr auto kKernel = kernel<K, Gate, kForBackward, kPastAlone>;
  static const DynamicShared shared(kKernel, sizeof(Shared));
  const int64_t blocks = segment_heads(p.grid, p.H) * blocks_of(p.V, Unit<K, kGroups>::kValues);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kKernel, blocks, kBlockThreads, sizeof(Shared), stream, p);
}

template <bool kPastAlone>
void launch(const Problem& p, cudaStream_t stream) {
  if (p.K > kTile)
    launch<kGroupKeys, bf16, false, kPastAlone>(p, stream);
  else if (p.g.dtype == DType::kFloat)
    launch<kTile, float, false, kPastAlone>(p, stream);
  else
    launch<kTile, bf16, false, kPastAlone>(p, stream);
}

}  // namespace forward::fused

void launch_forward_fused(const Problem& p, cudaStream_t stream) {
  if (p.past_alone)
    forward::fused::launch<true>(p, stream);
  else
    forward::fused::launch<false>(p, stream);
}

void launch_forward_fused_for_backward(const Problem& p, cudaStream_t stream) {
  forward::fused::launch<kGroupKeys, bf16, true, false>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
