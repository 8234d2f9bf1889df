// Segments of sequences that are too few to fill the GPU. Their summaries are sweeps of
// state_sweep.cuh from 0; the scan turns them into what each segment starts from. For gradients it
// goes from the last segment to the first.
//
//   S_(n + 1) = 2^decay_n S_n + summary_n
//
// grid    (scan, sequence, head, 256 elements of the state), an element a thread
// reads   segment_decays [B, segments, H, K]; h0, the pool or dht; the summaries
// writes  in place of the summaries, segment_states or segment_state_grads [B, segments, H, K, V]
#include "cuda/device/gates.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/states.cuh"

namespace gla_ext::cuda {

namespace steps {

constexpr int kAtOnce = 8;  // segments whose summaries are loaded at once

__global__ void __launch_bounds__(kThreads) segment_scan(Problem p, int64_t blocks) {
  const bool backwards = blockIdx.x >= blocks;
  const int64_t matrix = static_cast<int64_t>(p.K) * p.V, segments = p.grid.segments;
  const int64_t matrix_blocks = blocks_of(matrix, kThreads);
  const int64_t index = blockIdx.x - (backwards ? blocks : 0), of_head = index / matrix_blocks;
  const int64_t at = index % matrix_blocks * kThreads + threadIdx.x;
  if (at >= matrix) return;
  const int64_t n = of_head / p.H, head = of_head % p.H, k = at / p.V, v = at - k * p.V;
  float x = 0;
  const StateMatrix boundary = backwards ? matrix_of(p, p.dht, n, head) : initial_state(p, n, head);
  if (boundary.data != nullptr)
    boundary.with_elements(
        [&](const auto* elements) { x = to_float(elements[p.state_v_first ? v * p.K + k : at]); });
  float* states = backwards ? p.segment_state_grads : p.segment_states;
  const auto entry_of = [&](int64_t i) {
    return (n * segments + (backwards ? segments - 1 - i : i)) * p.H + head;
  };
  for (int64_t start = 0; start < segments; start += kAtOnce) {
    float summaries[kAtOnce], decays[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool has_summary = start + i < segments - 1;
      summaries[i] = has_summary ? states[entry_of(start + i) * matrix + at] : 0.f;
      decays[i] = has_summary ? p.segment_decays[entry_of(start + i) * p.K + k] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (start + i >= segments) return;
      states[entry_of(start + i) * matrix + at] = x;
      x = exp2_ftz(decays[i]) * x + summaries[i];
    }
  }
}

}  // namespace steps

namespace {

Problem summarizing(Problem p) {
  p.summarizes = true;
  p.pool.checkpoint_chunks = 0;
  return p;
}

}  // namespace

void launch_chunk_states_summaries(const Problem& p, cudaStream_t stream) {
  launch_chunk_states(summarizing(p), stream);
}

void launch_state_grads_summaries(const Problem& p, cudaStream_t stream) {
  launch_state_grads(summarizing(p), stream);
}

void launch_states_and_state_grads_summaries(const Problem& p, cudaStream_t stream) {
  launch_states_and_state_grads(summarizing(p), stream);
}

void launch_segment_scan(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = p.grid.N * p.H * blocks_of(int64_t{p.K} * p.V, kThreads);
  const int64_t scans = p.segment_state_grads != nullptr ? 2 : 1;
  steps::segment_scan<<<static_cast<unsigned>(scans * blocks), kThreads, 0, stream>>>(p, blocks);
}

}  // namespace gla_ext::cuda
