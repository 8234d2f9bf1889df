// The gate's projection on CPU: the kernels' arguments, and how the host calls them.
#pragma once

#include "common/rows.h"
#include "cpu/host/params.h"

namespace gla_ext::cpu {

// Sums are accumulated in T: float, or double for fp64 inputs.
template <typename T>
struct GateProjection {
  int64_t rows = 0, rank = 0, width = 0;  // width is K, rank R
  int64_t rows_per_task = 1;              // follows from the shape alone
  DType dtype = DType::kFloat;            // of h, g and their gradients
  T per_normalizer = 1;                   // 1 / tau
  T clamp_min = 0;                        // -inf: none

  StridedRows h, dg;  // inputs [rows, R | K]
  int64_t h_inner_rows = 1, dg_inner_rows = 1;
  const T* weight = nullptr;         // [R, padded K], transposed
  const T* bias = nullptr;           // [padded K]
  void *g = nullptr, *dh = nullptr;  // outputs [rows, K | R], contiguous
  T* parts = nullptr;                // [tasks, R + 1, padded K], of dweight and dbias
};

// A task is some of the rows.
template <typename T>
struct GateProjectionKernels {
  using Task = void (*)(const GateProjection<T>&, T* workspace, int64_t task);
  int64_t (*workspace_size)(int64_t R, int64_t K);  // elements
  Task forward;                                     // h weight bias -> g
  Task backward;                                    // dg h weight bias -> dh parts
};

}  // namespace gla_ext::cpu
