// What gradients.cu does, in a sweep from the last chunk to the first with dS~ on chip: dS' is
// neither written to memory nor read from it, and q^, k^, v and do are read once for both.
//
//   dS~ = 2^(b_C - from) dS'      dS = 2^from (dS~ + q^T do)
//   x, y, dA, dq, dk, dv, dg as in gradients.cu, with A of operands.cu
//
// grid    (segment, head) by a cluster of two blocks, of 64 key channels each
// reads   operands [B, slots, H], g [B, T, H, K], v, do [B, T, H, V], S of every chunk, as tiles or
//         saved [K, V], dht, segment_state_grads; outside tier 1 q, k and dq_intra, dk_intra,
//         dg_intra [B, T, H, K]
// writes  dq, dk, dg [B, T, H, K], dv [B, T, H, V], dh0
//
// The values pass 64 at a time, a slice. dv of every other slice is one block's, which the other
// sends its dS~ of these values. Warpgroups: a producer; the state, which holds dS~ in fp32 and
// hands it on in bf16; two consumers, which take the chunks in turn, so that the products of one
// pass beside the gates of the other. Accumulation, b and dg are fp32.
#include "../device/launch.cuh"
#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "dynamic_shared.h"
#include "gradient_sweep/consume.cuh"
#include "gradient_sweep/values.cuh"
#include "sm90.h"

namespace gla_ext::cuda::sm90 {
namespace {

template <class Gate, int kSlices>
__global__ void __launch_bounds__(kSweepThreads, 1) gradient_sweep_kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared<Gate>*>(s_bytes);
  const int rank = static_cast<int>(blockIdx.x % kPair);
  if (threadIdx.x == 0) start(s, p, blockIdx.x / kPair);
  sync_cluster();  // the barriers and the segment are there
  if (s.segment.tail) {
    if (rank == 0) clear_gradients<Gate, kSweepThreads>(p, s.segment);
    return;
  }
  const int group = warpgroup();
  if (group == kProducer) {
    give_registers<32>();
    produce<kSlices>(s, p, rank);
  } else if (group == kState) {
    take_registers<160>();
    sweep_state<kSlices>(s, p, rank);
  } else {
    take_registers<160>();
    consume<kSlices>(s, p, group - kConsumer, rank);
  }
  sync_cluster();  // the other block sends nothing any more, and is sent nothing
#endif
}

template <class Gate, int kSlices>
void launch_gradient_sweep(const Problem& p, cudaStream_t stream) {
  static_assert(sizeof(Shared<Gate>) <= 227 << 10);
  static const DynamicShared shared(gradient_sweep_kernel<Gate, kSlices>, sizeof(Shared<Gate>));
  const int64_t pieces = segment_heads(p.grid, p.H);
  if (pieces == 0) return;
  shared.allow();
  launch_dependent<kPair>(gradient_sweep_kernel<Gate, kSlices>, kPair * pieces, kSweepThreads,
                          sizeof(Shared<Gate>), stream, p);
}

template <class Gate>
void launch_gradient_sweep(const Problem& p, cudaStream_t stream) {
  if (p.V <= 2 * kTile)
    launch_gradient_sweep<Gate, 2>(p, stream);
  else
    launch_gradient_sweep<Gate, 4>(p, stream);
}

}  // namespace

void gradients_sweep(const Problem& p, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat)
    launch_gradient_sweep<float>(p, stream);
  else
    launch_gradient_sweep<bf16>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
