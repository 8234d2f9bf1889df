// Cross entropy on CUDA: the kernels' arguments, and how the host calls them.
#pragma once

#include <cuda_runtime_api.h>

#include "common/cross_entropy.h"
#include "cuda/host/params.h"

namespace gla_ext::cuda {

// Absent tensors are null.
struct CrossEntropy {
  int64_t rows = 0, width = 0;  // N, V
  DType dtype = DType::kFloat;  // of logits and dlogits
  bool aligned = false;         // every row of both starts at a multiple of 16 bytes
  int64_t ignored = -100;
  float smoothing = 0, scale = 1, cap = 0, square = 0;
  float per_cap = 0, per_width = 0;  // 1 / cap where there is one, 1 / V

  const void* logits = nullptr;  // [N, V], the last dimension contiguous
  int64_t stride = 0;
  const int64_t* target = nullptr;                           // [N]
  float *loss = nullptr, *z_loss = nullptr, *lse = nullptr;  // [N]
  const float* dloss = nullptr;                              // [N]; one element if the stride is 0
  int64_t dloss_stride = 0;
  void* dlogits = nullptr;  // [N, V], may be the logits
  int64_t dlogits_stride = 0;
};

// logits target -> loss, z_loss, lse
void cross_entropy_forward(const CrossEntropy& p, cudaStream_t stream);
// dloss logits target lse -> dlogits
void cross_entropy_backward(const CrossEntropy& p, cudaStream_t stream);
// logits target -> loss, and the gradient of its sum as dlogits
void cross_entropy_with_grad(const CrossEntropy& p, cudaStream_t stream);

}  // namespace gla_ext::cuda
