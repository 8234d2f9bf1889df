// The short convolution on CPU: the kernels' arguments, and how the host calls them.
#pragma once

#include "cpu/host/params.h"

namespace gla_ext::cpu {

// [B, T, D] whose channels are contiguous; strides in elements.
struct TokenRows {
  void* data = nullptr;
  int64_t stride_b = 0, stride_t = 0;
};

// The tokens of a task that belong to one sequence, whose tokens are [start, end).
struct ConvolutionPiece {
  int64_t row, n;          // batch row; of cache and state, -1: the sequence has none
  int64_t start, end;      // tokens of the sequence
  int64_t from, to;        // tokens of the piece
  int64_t channel, width;  // channels of the piece
  int64_t part;            // which of dweight_parts
};

// Absent tensors are null. Sums are accumulated in T: float, or double for fp64 inputs.
template <typename T>
struct Convolution {
  int64_t D = 0, W = 0;
  DType dtype = DType::kFloat;  // of x, dy, y, dx, the caches and their gradients

  TokenRows x, dy;
  TokenRows y, dx;
  const T* weight = nullptr;     // [W, padded D], the taps in the order of their tokens
  const T* bias = nullptr;       // [padded D], or zeros
  const void* cache = nullptr;   // [N, D, W]
  const void* dstate = nullptr;  // [N, D, W]
  void* dcache = nullptr;        // [N, D, W]
  T* dweight_parts = nullptr;    // [parts, W + 1, padded D], the last row of the bias
};

// Workspaces are for pieces of up to `width` channels.
template <typename T>
struct ConvolutionKernels {
  using Task = void (*)(const Convolution<T>&, T* workspace, const ConvolutionPiece&);
  int64_t (*workspace_size)(int64_t W, int64_t width);  // elements
  Task forward;                                         // x weight bias cache -> y
  Task backward;  // dy dstate x weight bias cache -> dx dcache dweight_parts
};

}  // namespace gla_ext::cpu
