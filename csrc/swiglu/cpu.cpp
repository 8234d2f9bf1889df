// SwiGLU on CPU: check, allocate, run the tasks.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "common/row_layout.h"
#include "common/tensors.h"
#include "cpu/host/call.h"
#include "cpu_kernels.h"
#include "op.h"
#include "ops.h"

namespace gla_ext::cpu {
namespace {

constexpr int64_t kElementsPerTask = 8192;

Swiglu problem_of(const RowLayout& layout) {
  Swiglu p;
  p.rows = layout.rows;
  p.inner_rows = layout.inner_rows;
  p.width = layout.width;
  p.pieces_in_row = (p.width + kSwigluPiece - 1) / kSwigluPiece;
  p.pieces_per_task = std::max<int64_t>(1, kElementsPerTask / std::min(p.width, kSwigluPiece));
  p.dtype = dtype_of(layout.tensors[0].scalar_type());
  p.gate = layout.input(0);
  p.up = layout.input(1);
  return p;
}

template <typename T>
void run(const Swiglu& p, typename SwigluKernels<T>::Task SwigluKernels<T>::* task) {
  const auto& kernels = KernelTables<SwigluKernels<T>>::in_use();
  const int64_t tasks = (p.rows * p.pieces_in_row + p.pieces_per_task - 1) / p.pieces_per_task;
  for_each_task<T>(tasks, kernels.workspace,
                   [&](T* workspace, int64_t i) { (kernels.*task)(p, workspace, i); });
}

at::Tensor swiglu_fwd_cpu(const at::Tensor& gate, const at::Tensor& up) {
  check_swiglu_fwd(gate, up);
  at::Tensor y = contiguous_like(gate);
  if (y.numel() == 0) return y;
  const RowLayout layout = lay_out_elements({gate, up});
  Swiglu p = problem_of(layout);
  p.y = y.mutable_data_ptr();
  with_accumulate(gate.scalar_type(), [&](auto type) {
    run<decltype(type)>(p, &SwigluKernels<decltype(type)>::forward);
  });
  return y;
}

SwigluBackwardOutputs swiglu_bwd_cpu(const at::Tensor& dy, const at::Tensor& gate,
                                     const at::Tensor& up, bool product) {
  check_swiglu_bwd(dy, gate, up);
  at::Tensor dgate = contiguous_like(gate), dup = contiguous_like(gate);
  at::Tensor y = product ? contiguous_like(gate) : at::empty({0}, gate.options());
  if (gate.numel() == 0) return {dgate, dup, y};
  const RowLayout layout = lay_out_elements({gate, up, dy});
  Swiglu p = problem_of(layout);
  p.dy = layout.input(2);
  p.dgate = dgate.mutable_data_ptr();
  p.dup = dup.mutable_data_ptr();
  if (product) p.y = y.mutable_data_ptr();
  with_accumulate(gate.scalar_type(), [&](auto type) {
    run<decltype(type)>(p, &SwigluKernels<decltype(type)>::backward);
  });
  return {dgate, dup, y};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("swiglu_fwd", swiglu_fwd_cpu);
  m.impl("swiglu_bwd", swiglu_bwd_cpu);
}

}  // namespace gla_ext::cpu
