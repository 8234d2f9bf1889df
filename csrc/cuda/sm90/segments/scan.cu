// Turns summaries (what each segment adds to the state by itself) into the state that enters each
// segment. For gradients: into the gradient of the state that leaves each segment, last segment
// first.
//
//   S_(n + 1) = 2^decay_n S_n + summary_n
//
// grid    (scan, sequence, head, 1,024 elements of the state), four values of a channel a thread;
//         packed: only sequences that may have several segments
// reads   segment_decays [B, states, H, K]; h0, the pool or dht; the summaries, from summaries or
//         summary_grads if set, else in place from segment_states or segment_state_grads [B,
//         states, H, K, V]
// writes  segment_states or segment_state_grads
//
// All in fp32. A sequence of one segment has no summaries. scan_and_strong_A follows
// summaries_cluster in forward. It has further blocks, which make A of strong chunks (forward steps
// 3 and 4) and write it to the prepared chunks:
//
// grid    that of for_strong_chunks, after the blocks of the scan
// reads   q, k, g [B, T, H, K], tiers
// writes  A of prepared chunks [B, entries, H]
#include "cuda/device/gates.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/sm90/sm90.h"
#include "cuda/sm90/strong/intra.cuh"
#include "cuda/sm90/tiles/dependent_launch.cuh"
#include "segment.cuh"

namespace gla_ext::cuda::sm90 {
namespace scan {

constexpr int kEach = 4;
constexpr int kAtOnce = 8;  // segments whose summaries are loaded at once

// The states of sequence n in segment_states: [first, first + count).
__device__ __forceinline__ void find_states(const Problem& p, int64_t n, int64_t& first,
                                            int64_t& count) {
  const Sequence sequence = find_sequence(p, n);
  const int64_t chunks = blocks_of(sequence.length, kChunk);
  first = sequence.first_state;
  const int64_t each = p.grid.packed ? p.grid.totals->summary_chunks : p.grid.segment_chunks;
  count = chunks > p.grid.segment_chunks ? blocks_of(chunks, each) : 0;
}

// The work of block number `block` of a scan.
__device__ __forceinline__ void scan_segments(const Problem& p, int64_t block, bool backwards) {
  const int matrix = p.K * p.V, blocks = blocks_of(matrix, kThreads * kEach);
  const int64_t index = block / blocks;
  const int at =
      static_cast<int>(block % blocks) * kThreads * kEach + static_cast<int>(threadIdx.x) * kEach;
  if (at >= matrix) return;
  int64_t n = index / p.H;
  const int64_t head = index - n * p.H;
  if (p.grid.packed) {
    if (n >= p.grid.totals->cut) return;
    n = p.cut_sequences[n];
  }
  const int k = at / p.V;
  int64_t first, count;
  find_states(p, n, first, count);
  if (count == 0) return;
  float4 x = load_boundary(p, backwards ? matrix_of(p, p.dht, n, head) : initial_state(p, n, head),
                           k, at - k * p.V);
  float* entering = backwards ? p.segment_state_grads : p.segment_states;
  const float* summaries = backwards ? p.summary_grads : p.summaries;
  if (summaries == nullptr) summaries = entering;
  const auto entry_of = [&](int64_t i) {
    return (first + (backwards ? count - 1 - i : i)) * p.H + head;
  };
  const auto summary_of = [&](int64_t i) {
    return *reinterpret_cast<const float4*>(summaries + entry_of(i) * matrix + at);
  };
  for (int64_t start = 0; start < count; start += kAtOnce) {
    float4 own[kAtOnce];
    float decays[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool summed = start + i < count - 1;
      own[i] = summed ? summary_of(start + i) : make_float4(0.f, 0.f, 0.f, 0.f);
      decays[i] = summed ? p.segment_decays[entry_of(start + i) * p.K + k] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i >= count) return;
      *reinterpret_cast<float4*>(entering + entry_of(start + i) * matrix + at) = x;
      const float decay = exp2_ftz(decays[i]);
      x = make_float4(decay * x.x + own[i].x, decay * x.y + own[i].y, decay * x.z + own[i].z,
                      decay * x.w + own[i].w);
    }
  }
}

// The number of blocks of one scan.
int64_t scan_blocks(const Problem& p) {
  const int64_t sequences = p.grid.packed ? most_followed(p.grid, p.grid.N) : p.grid.N;
  return sequences * p.H * blocks_of(p.K * p.V, kThreads * kEach);
}

__global__ void __launch_bounds__(kThreads) kernel(Problem p, int64_t states) {
  wait_before_next_kernel();
  const bool backwards = blockIdx.x >= states;
  scan_segments(p, blockIdx.x - (backwards ? states : 0), backwards);
}

namespace and_strong_A {

__global__ void __launch_bounds__(kThreads, 2) kernel(Problem p, int64_t states) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_before_next_kernel();
  if (blockIdx.x < states) return scan_segments(p, blockIdx.x, false);
  __shared__ __align__(16) StrongScores s;
  __shared__ Chunk chunk;
  const auto finish = [&] { finish_scores(s, p, chunk); };
  for_strong_chunks(p, chunk, finish, blockIdx.x - static_cast<unsigned>(states));
#endif
}

}  // namespace and_strong_A

void launch(const Problem& p, bool states, bool state_grads, cudaStream_t stream) {
  const int64_t blocks = scan_blocks(p);
  if (blocks == 0) return;
  launch_dependent(kernel, blocks * (states + state_grads), kThreads, 0, stream, p,
                   states ? blocks : 0);
}

void launch_with_strong_A(const Problem& p, cudaStream_t stream) {
  const int64_t states = scan_blocks(p), blocks = states + strong_grid(p, 1);
  if (blocks > 0) launch_dependent(and_strong_A::kernel, blocks, kThreads, 0, stream, p, states);
}

}  // namespace scan

void launch_scan(const Problem& p, cudaStream_t stream) { scan::launch(p, true, false, stream); }

void launch_scan_both(const Problem& p, cudaStream_t stream) {
  scan::launch(p, true, true, stream);
}

void launch_scan_grads(const Problem& p, cudaStream_t stream) {
  scan::launch(p, false, true, stream);
}

void launch_scan_and_strong_A(const Problem& p, cudaStream_t stream) {
  scan::launch_with_strong_A(p, stream);
}

}  // namespace gla_ext::cuda::sm90
