// The summary of a whole sequence, from those of its segments: what it adds to the state that
// enters it, or to the gradient of the state that leaves it. A rank passes this to the others
// (context parallelism).
//
// x <- 2^decay_n x + summary_n      first segment first; for gradients, last segment first
//
// grid    (sequence, head, 1,024 elements of the state), four values of a channel a thread;
//         and_strong_A appends the blocks of scan_and_strong_A, which do the same here
// reads   segment_decays [B, states, H, K]; segment_states or segment_state_grads [B, states, H, K,
//         V], which hold the summaries of all segments, the last one included; h0 or dht
// writes  folded [N, H, K, V]; for the state also folded_decays [N, H, K], the sum of the gates in
//         natural log
//
// All in fp32, in the order of the tokens whatever the grid. A decay of 0 is an exact reset: x may
// be infinite there.
#include "cuda/device/gates.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/strong/intra.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "segment.cuh"

namespace gla_ext::cuda::sm90 {
namespace fold {

constexpr int kEach = 4;
constexpr int kAtOnce = 8;  // segments whose summaries are loaded at once

template <Sweep kSweep>
__device__ __forceinline__ void fold_segments(const Problem& p, int64_t block) {
  constexpr bool kBackwards = kSweep == Sweep::kStateGrads;
  const int matrix = p.K * p.V, blocks = blocks_of(matrix, kThreads * kEach);
  const int64_t index = block / blocks;
  const int at =
      static_cast<int>(block % blocks) * kThreads * kEach + static_cast<int>(threadIdx.x) * kEach;
  if (at >= matrix) return;
  const int64_t n = index / p.H, head = index - n * p.H;
  const int k = at / p.V;
  const int64_t count = p.grid.segments;
  const float* summaries = kBackwards ? p.segment_state_grads : p.segment_states;
  const float* boundary = kBackwards ? p.dht : p.h0;
  const auto entry_of = [&](int64_t i) {
    return (n * count + (kBackwards ? count - 1 - i : i)) * p.H + head;
  };
  float4 x = load_boundary(p, matrix_of(p, boundary, n, head), k, at - k * p.V);
  float total = 0;  // log2 units
  for (int64_t start = 0; start < count; start += kAtOnce) {
    float4 own[kAtOnce];
    float decays[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool there = start + i < count;
      own[i] = there
                   ? *reinterpret_cast<const float4*>(summaries + entry_of(start + i) * matrix + at)
                   : make_float4(0.f, 0.f, 0.f, 0.f);
      decays[i] = there ? p.segment_decays[entry_of(start + i) * p.K + k] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i >= count) break;
      const float decay = exp2_ftz(decays[i]);
      if (decay == 0.f) x = make_float4(0.f, 0.f, 0.f, 0.f);
      x = make_float4(decay * x.x + own[i].x, decay * x.y + own[i].y, decay * x.z + own[i].z,
                      decay * x.w + own[i].w);
      total += decays[i];
    }
  }
  *reinterpret_cast<float4*>(p.folded + index * matrix + at) = x;
  if (!kBackwards && at % p.V == 0) p.folded_decays[index * p.K + k] = total / kLog2E;
}

int64_t fold_blocks(const Problem& p) {
  return p.grid.N * p.H * blocks_of(p.K * p.V, kThreads * kEach);
}

template <Sweep kSweep>
__global__ void __launch_bounds__(kThreads) kernel(Problem p) {
  wait_before_next_kernel();  // like the scan, which a single segment does not have
  fold_segments<kSweep>(p, blockIdx.x);
}

template <Sweep kSweep>
void launch(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = fold_blocks(p);
  if (blocks > 0) launch_dependent(kernel<kSweep>, blocks, kThreads, 0, stream, p);
}

namespace and_strong_A {

template <Sweep kSweep>
__global__ void __launch_bounds__(kThreads, 2) kernel(Problem p, int64_t states) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_before_next_kernel();  // like the scan, which a single segment does not have
  if (blockIdx.x < states) return fold_segments<kSweep>(p, blockIdx.x);
  __shared__ __align__(16) StrongScores s;
  __shared__ Chunk chunk;
  const auto finish = [&] { finish_scores(s, p, chunk); };
  for_strong_chunks(p, chunk, finish, blockIdx.x - static_cast<unsigned>(states));
#endif
}

template <Sweep kSweep>
void launch(const Problem& p, cudaStream_t stream) {
  const int64_t states = fold_blocks(p), blocks = states + strong_grid(p, 1);
  if (blocks > 0) launch_dependent(kernel<kSweep>, blocks, kThreads, 0, stream, p, states);
}

}  // namespace and_strong_A
}  // namespace fold

void launch_fold(const Problem& p, cudaStream_t stream) { fold::launch<Sweep::kStates>(p, stream); }

void launch_fold_grads(const Problem& p, cudaStream_t stream) {
  fold::launch<Sweep::kStateGrads>(p, stream);
}

void launch_fold_and_strong_A(const Problem& p, cudaStream_t stream) {
  fold::and_strong_A::launch<Sweep::kStates>(p, stream);
}

void launch_fold_grads_and_strong_A(const Problem& p, cudaStream_t stream) {
  fold::and_strong_A::launch<Sweep::kStateGrads>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
