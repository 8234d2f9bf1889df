// The norm with its gate on CUDA: the kernels' arguments, and how the host calls them.
#pragma once

#include <cuda_runtime_api.h>

#include "common/activation.h"
#include "common/rows.h"
#include "cuda/host/params.h"

namespace gla_ext::cuda {

// Absent tensors are null.
struct Norm {
  int64_t rows = 0, inner_rows = 1, width = 0;  // width is V
  DType dtype = DType::kFloat;                  // of all rows but the stream's and its gradients'
  DType stream_dtype = DType::kFloat;           // of these: dtype or fp32
  DType weight_dtype = DType::kFloat;           // of weight and dweight
  Activation activation = Activation::kSwish;
  bool aligned =
      false;  // V a multiple of 8; every row, and weight, starts at a multiple of 16 bytes
  float per_width = 0;  // 1 / V
  float eps = 0;

  // Inputs. In backward with a residual x is the stream, and dstream its gradient from elsewhere.
  StridedRows x, gate, dy, residual, dstream;
  // Outputs [rows, V], contiguous. In backward y, if given, gets what forward made.
  void *y = nullptr, *dx = nullptr, *dgate = nullptr;
  void *stream = nullptr, *dresidual = nullptr;  // the same of a residual
  const void* weight = nullptr;                  // [V]
  float* rstd = nullptr;                         // [rows]
  float* partials = nullptr;  // [norm_backward_blocks(), V], partial sums of dweight
  void* dweight = nullptr;    // [V]
};

// The properties of a GPU that determine the number of blocks.
struct NormGpu {
  int multiprocessors = 1;
  int major = 0;  // of the compute capability
};

// x weight gate -> y, rstd; or x residual weight -> y, stream, rstd
void norm_forward(const Norm& p, const NormGpu& gpu, cudaStream_t stream);

// Blocks of threads; each leaves a partial sum of dweight.
int64_t norm_backward_blocks(const Norm& p, const NormGpu& gpu);
// dy x weight gate rstd -> dx, dgate, dweight and, if given, y; or dy dstream x weight rstd ->
// dresidual, dweight and, if given, dx
void norm_backward(const Norm& p, const NormGpu& gpu, cudaStream_t stream);

}  // namespace gla_ext::cuda
