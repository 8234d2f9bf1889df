// SwiGLU on CPU: check, allocate, run the tasks.
#include <algorithm>

#include "cpu/host/call.h"
#include "cpu_kernels.h"
#include "op.h"

namespace gla_ext::cpu {
namespace {

constexpr int64_t kElementsPerTask = 8192;

Swiglu problem_of(const RowLayout& layout) {
  auto p = swiglu_problem<Swiglu>(layout);
  p.pieces_in_row = (p.width + kSwigluPiece - 1) / kSwigluPiece;
  p.pieces_per_task = std::max<int64_t>(1, kElementsPerTask / std::min(p.width, kSwigluPiece));
  p.dtype = dtype_of(layout.tensors[0].scalar_type());
  return p;
}

template <typename T>
void run(const Swiglu& p, typename SwigluKernels<T>::Task SwigluKernels<T>::* task) {
  const auto& kernels = KernelTables<SwigluKernels<T>>::in_use();
  const int64_t tasks = (p.rows * p.pieces_in_row + p.pieces_per_task - 1) / p.pieces_per_task;
  for_each_task<T>(tasks, kernels.workspace,
                   [&](T* workspace, int64_t i) { (kernels.*task)(p, workspace, i); });
}

struct Backend {
  static void forward(const char*, const std::vector<at::Tensor>& inputs, const at::Tensor& y) {
    if (y.numel() == 0) return;
    const RowLayout layout = lay_out_elements(inputs);
    Swiglu p = problem_of(layout);
    p.y = y.mutable_data_ptr();
    with_accumulate(y.scalar_type(), [&](auto type) {
      run<decltype(type)>(p, &SwigluKernels<decltype(type)>::forward);
    });
  }

  static void backward(const char*, const std::vector<at::Tensor>& inputs, const at::Tensor& dgate,
                       const at::Tensor& dup, const at::Tensor& y) {
    if (dgate.numel() == 0) return;
    const RowLayout layout = lay_out_elements(inputs);
    Swiglu p = problem_of(layout);
    p.dgate = dgate.mutable_data_ptr();
    p.dup = dup.mutable_data_ptr();
    if (y.numel() > 0) p.y = y.mutable_data_ptr();
    with_accumulate(dgate.scalar_type(), [&](auto type) {
      run<decltype(type)>(p, &SwigluKernels<decltype(type)>::backward);
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) { SwigluOn<Backend>::register_in(m); }

}  // namespace gla_ext::cpu
