// The short convolution on CUDA: the kernels' arguments, and how the host calls them.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/indices.h"
#include "cuda/host/params.h"

namespace gla_ext::cuda {

constexpr int kUnrolledTaps = 4;  // the largest W that is known when compiling

// [B, T, D] whose channels are contiguous; strides in elements.
struct TokenRows {
  const void* data = nullptr;
  int64_t stride_b = 0, stride_t = 0;
};

// How the tokens of a batch row are divided among threads: `count` runs of `tokens` each.
struct TokenRuns {
  int64_t tokens = 1, count = 0;
};

// Makes at most `places * k` runs over all rows for a small k, so that threads, which take run
// after run, end at the same time. A run has at least `fewest` tokens if the row has that many.
TokenRuns plan_token_runs(int64_t B, int64_t T, int64_t places, int64_t fewest);

// Absent tensors are null; all but x and dy are contiguous.
struct Convolution {
  int64_t B = 0, T = 0, N = 0, D = 0, W = 0;
  DType dtype = DType::kFloat;         // of x, dy, y, dx, the caches and their gradients
  DType weight_dtype = DType::kFloat;  // of weight and dweight
  DType bias_dtype = DType::kFloat;    // of bias and dbias
  // D is a multiple of 8; weight and every row of x and dy start at a multiple of 16 bytes.
  bool aligned = false;
  TokenRuns runs;

  TokenRows x, dy;
  const void* weight = nullptr;  // [D, W]
  const void* bias = nullptr;    // [D]
  const void* cache = nullptr;   // [N, D, W]
  Indices cu_seqlens;            // [N + 1], packed only
  void* y = nullptr;             // [B, T, D]
  void* state = nullptr;         // [N, D, W]

  const void* dstate = nullptr;  // [N, D, W]
  void* dx = nullptr;            // [B, T, D]
  void* dcache = nullptr;        // [N, D, W]
  void* dweight = nullptr;       // [D, W]
  void* dbias = nullptr;         // [D]
  float* dz = nullptr;           // [B, T, D], W above kUnrolledTaps alone
  float* partials = nullptr;     // [plan's blocks, W + 1, D], partial sums of dweight and dbias
};

// x weight bias cache -> y, state
void convolution_forward(Convolution p, int multiprocessors, cudaStream_t stream);

// The number of blocks that share a channel, each of which leaves a partial sum of dweight; and the
// number of floats in dz.
struct ConvolutionBackwardPlan {
  TokenRuns runs;
  int64_t blocks = 0, dz = 0;
};
ConvolutionBackwardPlan plan_convolution_backward(const Convolution& p, int multiprocessors);
// dy dstate x weight bias cache -> dx dcache dweight dbias
void convolution_backward(Convolution p, const ConvolutionBackwardPlan& plan, cudaStream_t stream);

// Caches in a pool [P, D, W], of which sequence n reads one and writes one. A slot may be outside
// [0, P): a read slot then means that y = 0 and nothing is written, a write slot that nothing is
// written.
struct ConvolutionPool {
  void* state = nullptr;
  int64_t slots_in_pool = 0, stride = 0;    // P, and elements from a cache to the next
  Indices slots, write_slots;               // [N], or absent
  const bool* has_initial_state = nullptr;  // [N]: false: from 0
};
// convolution_forward on a pool, for rows of a few tokens, in one launch.
bool takes_convolution_step(const Convolution& p);
void convolution_step(const Convolution& p, const ConvolutionPool& pool, cudaStream_t stream);
// Before and after convolution_forward: take the sequences' caches [N, D, W] from the pool, and put
// the new ones there. y of sequences without a cache, and of tokens after the last one, becomes 0.
void gather_caches(const Convolution& p, const ConvolutionPool& pool, void* cache,
                   cudaStream_t stream);
void scatter_caches(const Convolution& p, const ConvolutionPool& pool, cudaStream_t stream);

// For W above kUnrolledTaps. Backward makes only dx and the partial sums, with as many blocks.
void convolution_forward_by_taps(Convolution p, int multiprocessors, cudaStream_t stream);
void convolution_backward_by_taps(const Convolution& p, const ConvolutionBackwardPlan& plan,
                                  cudaStream_t stream);

}  // namespace gla_ext::cuda
