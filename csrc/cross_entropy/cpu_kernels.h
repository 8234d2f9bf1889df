// Cross entropy on CPU: the kernels' arguments, and how the host calls them.
#pragma once

#include "common/cross_entropy.h"
#include "cpu/host/params.h"

namespace gla_ext::cpu {

// Sums are accumulated in T: float, or double for fp64 logits.
template <typename T>
struct CrossEntropy {
  int64_t rows = 0, width = 0;  // N, V
  int64_t rows_per_task = 1;    // follows from the shape alone
  DType dtype = DType::kFloat;  // of logits and dlogits
  CrossEntropyOptions options;

  const void* logits = nullptr;  // [N, V]; strides in elements, along V 1
  int64_t stride = 0;
  const int64_t* target = nullptr;                       // [N]
  T *loss = nullptr, *z_loss = nullptr, *lse = nullptr;  // [N]
  const T* dloss = nullptr;                              // [N]
  void* dlogits = nullptr;                               // [N, V], may be the logits
  int64_t dlogits_stride = 0;
};

// A task is some of the rows.
template <typename T>
struct CrossEntropyKernels {
  using Task = void (*)(const CrossEntropy<T>&, T* workspace, int64_t task);
  int64_t (*workspace)(int64_t V);  // elements
  Task forward;                     // logits target -> loss z_loss lse
  Task backward;                    // dloss logits target lse -> dlogits
};

}  // namespace gla_ext::cpu
