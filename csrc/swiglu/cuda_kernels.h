// SwiGLU on CUDA: the kernels' arguments, and how the host calls them.
#pragma once

#include <cuda_runtime_api.h>

#include "common/rows.h"
#include "cuda/host/params.h"

namespace gla_ext::cuda {

// Absent tensors are null.
struct Swiglu {
  int64_t rows = 0, inner_rows = 1, width = 0;
  DType dtype = DType::kFloat;  // of all rows
  bool aligned = false;         // every row starts at a multiple of 16 bytes

  StridedRows gate, up, dy;                             // inputs [rows, width]
  void *y = nullptr, *dgate = nullptr, *dup = nullptr;  // outputs [rows, width], contiguous
};

// gate up -> y
void swiglu_forward(const Swiglu& p, cudaStream_t stream);
// dy gate up -> dgate, dup and, if given, y
void swiglu_backward(const Swiglu& p, cudaStream_t stream);

}  // namespace gla_ext::cuda
