// gradients/sweep for heads with K and V of at most 64 and bf16 gates. A block goes from the last
// chunk to the first with dS~ on chip, so that dS' is neither written to memory nor read from it.
// It makes q^ and k^ of a chunk once, for dS~ and for all gradients.
//
//   dS~ = 2^(b_C - to) dS'        dS = 2^from (2^(to - from) dS~ + q^T do)
//   x, y, dA, dq, dk, dv, dg as in gradients/chunk
//
// grid    (segment, head), two blocks a multiprocessor
// reads   q, k, g [B, T, H, K], v, do [B, T, H, V], tiers, S [K, V] of every chunk, dht,
//         segment_state_grads; for strong chunks A [B, T, H, C], dq_intra, dk_intra, dg_intra [B,
//         T, H, K]
// writes  dq, dk, dg [B, T, H, K], dv [B, T, H, V], dh0
//
// One warpgroup makes q^, k^ and dS~, one chunk ahead of the other, which makes the gradients. A
// and dA never leave the registers. Accumulation, b and dg are fp32.
#include "cuda/device/dynamic_shared.h"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "gradients.cuh"
#include "operands.cuh"

namespace gla_ext::cuda::sm90 {
namespace gradients::small_sweep {

constexpr int kSweepBlocks = 2;  // blocks a multiprocessor
constexpr int kOperandRegisters = 96, kGradientRegisters = 160;

__global__ void __launch_bounds__(kSweepThreads, kSweepBlocks) kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared*>(s_bytes);
  if (threadIdx.x == 0) start(s, p, blockIdx.x);
  __syncthreads();  // the barriers and the segment are written
  if (s.segment.tail) return clear_gradients<bf16, kSweepThreads>(p, s.segment);
  if (warpgroup() == kOperands) {
    give_registers<kOperandRegisters>();
    make_operands(s, p);
  } else {
    take_registers<kGradientRegisters>();
    make_gradients(s, p);
  }
#endif
}

void launch(const Problem& p, cudaStream_t stream) {
  static_assert(fits_multiprocessor(kSweepBlocks, sizeof(Shared)));
  static_assert(kOperandRegisters + kGradientRegisters <=
                kRoles * launch_registers(kSweepBlocks * kSweepThreads));
  static const DynamicShared shared(kernel, sizeof(Shared));
  const int64_t blocks = segment_heads(p.grid, p.H);
  if (blocks == 0) return;
  shared.allow();
  launch_dependent(kernel, blocks, kSweepThreads, sizeof(Shared), stream, p);
}

}  // namespace gradients::small_sweep

void launch_gradients_small_sweep(const Problem& p, cudaStream_t stream) {
  gradients::small_sweep::launch(p, stream);
}

}  // namespace gla_ext::cuda::sm90
