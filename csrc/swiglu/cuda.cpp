// SwiGLU on CUDA: check, allocate, launch.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/row_layout.h"
#include "common/tensors.h"
#include "cuda/host/tensors.h"
#include "cuda_kernels.h"
#include "op.h"
#include "ops.h"

namespace gla_ext::cuda {
namespace {

void check_backend(const char* op, const at::Tensor& gate) {
  check_not_fp64(op, gate.scalar_type());
  check_gpu(op, gate.device());
}

// Fresh outputs are aligned. If there are several rows, each row of an output is aligned if the
// width is.
bool is_aligned(const RowLayout& layout, int64_t elements) {
  bool aligned = layout.rows == 1 || layout.width % elements == 0;
  for (size_t i = 0; i < layout.tensors.size(); ++i)
    aligned &= starts_aligned(layout.tensors[i].const_data_ptr()) &&
               layout.strides[i].outer % elements == 0 && layout.strides[i].inner % elements == 0;
  return aligned;
}

Swiglu problem_of(const RowLayout& layout) {
  Swiglu p;
  p.rows = layout.rows;
  p.inner_rows = layout.inner_rows;
  p.width = layout.width;
  p.dtype = dtype_of(layout.tensors[0].scalar_type());
  p.aligned = is_aligned(layout, 16 / layout.tensors[0].element_size());
  p.gate = layout.input(0);
  p.up = layout.input(1);
  return p;
}

at::Tensor swiglu_fwd_cuda(const at::Tensor& gate, const at::Tensor& up) {
  check_swiglu_fwd(gate, up);
  check_backend("swiglu", gate);
  const c10::cuda::CUDAGuard guard(gate.device());
  at::Tensor y = contiguous_like(gate);
  if (y.numel() == 0) return y;
  const RowLayout layout = lay_out_elements({gate, up});
  Swiglu p = problem_of(layout);
  p.y = y.mutable_data_ptr();
  swiglu_forward(p, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

SwigluBackwardOutputs swiglu_bwd_cuda(const at::Tensor& dy, const at::Tensor& gate,
                                      const at::Tensor& up, bool product) {
  check_swiglu_bwd(dy, gate, up);
  check_backend("swiglu_bwd", gate);
  const c10::cuda::CUDAGuard guard(gate.device());
  at::Tensor dgate = contiguous_like(gate), dup = contiguous_like(gate);
  at::Tensor y = product ? contiguous_like(gate) : at::empty({0}, gate.options());
  if (gate.numel() == 0) return {dgate, dup, y};
  const RowLayout layout = lay_out_elements({gate, up, dy});
  Swiglu p = problem_of(layout);
  p.dy = layout.input(2);
  p.dgate = dgate.mutable_data_ptr();
  p.dup = dup.mutable_data_ptr();
  if (product) p.y = y.mutable_data_ptr();
  swiglu_backward(p, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {dgate, dup, y};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("swiglu_fwd", swiglu_fwd_cuda);
  m.impl("swiglu_bwd", swiglu_bwd_cuda);
}

}  // namespace gla_ext::cuda
