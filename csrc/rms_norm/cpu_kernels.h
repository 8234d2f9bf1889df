// The norm on CPU: the kernels' arguments, and how the host calls them.
#pragma once

#include "common/activation.h"
#include "common/rows.h"
#include "cpu/host/params.h"

namespace gla_ext::cpu {

// One tensor [rows, V] whose last dimension is contiguous.
struct NormRows {
  void* data = nullptr;
  DType dtype = DType::kFloat;
  RowStrides strides;
};

// Absent tensors are null. Sums are accumulated in T: float, or double for fp64 inputs.
template <typename T>
struct Norm {
  int64_t rows = 0, inner_rows = 1, width = 0;  // width is V
  int64_t rows_per_task = 1;                    // follows from the shape alone
  Activation activation = Activation::kSwish;
  double eps = 0;

  NormRows x, gate, dy;         // inputs
  NormRows y, dx, dgate;        // outputs
  NormRows residual, stream;    // a residual to add x to, and the sum
  NormRows dstream, dresidual;  // of the sum from elsewhere, and of both
  const T* weight = nullptr;    // [padded V], zeros after V
  T* rstd = nullptr;            // [rows]
  T* dweight_parts = nullptr;   // [tasks, padded V]
};

// A task is some of the rows.
template <typename T>
struct NormKernels {
  using Task = void (*)(const Norm<T>&, T* workspace, int64_t task);
  int64_t (*workspace_size)(int64_t V);  // elements
  Task forward;                          // x weight gate -> y rstd
  Task backward;                         // dy x weight gate rstd -> dx dgate dweight_parts
};

}  // namespace gla_ext::cpu
