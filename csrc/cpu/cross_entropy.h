// What the host side hands to the CPU kernels of cross entropy.
#pragma once

#include "common/cross_entropy.h"
#include "host/params.h"

namespace gla_ext::cpu {

// T accumulates: float, or double for fp64 logits.
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

}  // namespace gla_ext::cpu
