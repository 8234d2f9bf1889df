// The state that enters a rank's part of a sequence, computed from the summaries of all ranks by
// the fold of fold.h.
//
// grid    256 elements of x in the layout [rows, H, K, V], an element a thread; then the decays to
//         be kept, 256 of them, one a thread
#include "cuda/device/gates.cuh"
#include "cuda_kernels.h"

namespace gla_ext::cuda {
namespace fold {

__device__ __forceinline__ float decayed(float x, float decay) {
  const float factor = exp2_ftz(decay * kLog2E);
  return factor == 0.f ? 0.f : factor * x;
}

__device__ __forceinline__ float fold_element(const Fold<float>& p, int64_t row, int64_t head,
                                              int64_t k, int64_t v) {
  if (!p.is_entered(row))
    return p.boundary == nullptr ? 0.f : p.boundary[p.element(row, head, k, v)];
  float x = 0;
#pragma unroll 4
  for (int64_t i = 0; i < p.reach; ++i) {
    const Fold<float>::Source s = p.source(row, i);
    if (p.key_gated) x = decayed(x, p.decays[p.key_decay(s, head) + k]);
    if (p.value_gated) x = decayed(x, p.decays[p.value_decay(s, head) + v]);
    x += p.states[p.state(s, head) + k * p.V + v];
  }
  return x;
}

__global__ void __launch_bounds__(kThreads) kernel(Fold<float> p) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t elements = p.rows * p.H * p.K * p.V;
  if (i < elements) {
    const int64_t v = i % p.V, k = i / p.V % p.K, matrix = i / (p.V * p.K);
    const int64_t head = matrix % p.H, row = matrix / p.H;
    p.x[p.element(row, head, k, v)] = fold_element(p, row, head, k, v);
    return;
  }
  i -= elements;
  if (i >= p.kept_elements()) return;
  const int64_t rank = i / p.decays_each();
  p.kept[i] = p.decays[rank * p.decay_stride + i % p.decays_each()];
}

}  // namespace fold

void fold_ranks(const Fold<float>& p, cudaStream_t stream) {
  const int64_t elements = p.rows * p.H * p.K * p.V + p.kept_elements();
  const int64_t blocks = (elements + kThreads - 1) / kThreads;
  if (blocks > 0) fold::kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
}

}  // namespace gla_ext::cuda
