// gradients/chunk as a sweep from the last chunk to the first with dS~ on chip. dS' is neither
// written to memory nor read from it, and q^, k^, v and do are read once for both.
//
//   dS~ = 2^(b_C - from) dS'      dS = 2^from (dS~ + q^T do)
//   x, y, dA, dq, dk, dv, dg as in gradients/chunk, with A of prepare.cu
//
// grid    (segment, head) by a cluster of two blocks, 64 key channels each
// reads   prepared chunks [B, entries, H], g [B, T, H, K], v, do [B, T, H, V], S~ of every chunk as
//         tiles, dht, segment_state_grads; for strong chunks q, k and dq_intra, dk_intra, dg_intra
//         [B, T, H, K]
// writes  dq, dk, dg [B, T, H, K], dv [B, T, H, V], dh0
//
// Value channels are processed 64 at a time; 64 of them are a slice. A block makes dv of every
// other slice, for which the other block sends it its dS~ of these values. The warpgroups are a
// producer; the state, which holds dS~ in fp32 and passes it on in bf16; and two consumers, which
// take the chunks in turn, so that the products of one run while the other works on gates.
// Accumulation, b and dg are fp32.
#include "consume.cuh"
#include "cuda/device/dynamic_shared.h"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/tiles/cluster.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "values.cuh"

namespace gla_ext::cuda::sm90 {
namespace gradients::sweep {

template <class Gate, int kSlices>
__global__ void __launch_bounds__(kSweepThreads, 1) kernel(Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_previous_kernel();
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  auto& s = *reinterpret_cast<Shared<Gate>*>(s_bytes);
  const int rank = static_cast<int>(blockIdx.x % kClusterBlocks);
  if (threadIdx.x == 0) start(s, p, blockIdx.x / kClusterBlocks);
  sync_cluster();  // the barriers and the segment are written
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
    Consumer<kSlices, Shared<Gate>>(s, p, rank).run(group - kConsumer);
  }
  sync_cluster();  // nothing is sent between the blocks any more
#endif
}

template <class Gate, int kSlices>
void launch(const Problem& p, cudaStream_t stream) {
  static_assert(fits_multiprocessor(1, sizeof(Shared<Gate>)));
  static const DynamicShared shared(kernel<Gate, kSlices>, sizeof(Shared<Gate>));
  const int64_t items = segment_heads(p.grid, p.H);
  if (items == 0) return;
  shared.allow();
  launch_dependent<kClusterBlocks>(kernel<Gate, kSlices>, kClusterBlocks * items, kSweepThreads,
                                   sizeof(Shared<Gate>), stream, p);
}

template <class Gate>
void launch(const Problem& p, cudaStream_t stream) {
  if (p.V <= 2 * kTile)
    launch<Gate, 2>(p, stream);
  else
    launch<Gate, 4>(p, stream);
}

}  // namespace gradients::sweep

void launch_gradients_sweep(const Problem& p, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat)
    gradients::sweep::launch<float>(p, stream);
  else
    gradients::sweep::launch<bf16>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
