// The norm with its gate on CPU: check, allocate, run the tasks.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "common/row_layout.h"
#include "common/tensors.h"
#include "cpu/host/call.h"
#include "cpu/kernel_tables.h"
#include "cpu_kernels.h"
#include "op.h"

namespace gla_ext::cpu {
namespace {

// Rows of a task, from the shape alone: dw is summed within a task, then over tasks in order.
constexpr int64_t kElementsPerTask = 8192, kMostTasks = 256;

int64_t rows_per_task(int64_t rows, int64_t width) {
  const int64_t fewest = (kElementsPerTask + width - 1) / width;
  return std::max<int64_t>(fewest, (rows + kMostTasks - 1) / kMostTasks);
}

template <typename T>
class NormTasks {
 public:
  NormTasks(const NormCall& call, const std::vector<at::Tensor>& tensors,
            const OptionalTensor& weight, double eps)
      : layout_(lay_out_rows(tensors)) {
    p.rows = layout_.rows;
    p.inner_rows = layout_.inner_rows;
    p.width = layout_.width;
    p.rows_per_task = rows_per_task(p.rows, p.width);
    p.activation = call.activation;
    p.eps = eps;
    options_ = layout_.tensors[0].options().dtype(call.accumulate);
    if (!given(weight)) return;
    weight_ = at::zeros({padded_width()}, options_);
    weight_.narrow(0, 0, p.width).copy_(*weight);
    p.weight = weight_.const_data_ptr<T>();
  }

  Norm<T> p;

  // Tensor i of the layout.
  NormRows input(size_t i) const {
    const at::Tensor& t = layout_.tensors[i];
    return {const_cast<void*>(t.const_data_ptr()), dtype_of(t.scalar_type()), layout_.strides[i]};
  }
  NormRows output(const at::Tensor& t) const {
    return {t.mutable_data_ptr(), dtype_of(t.scalar_type()), {p.inner_rows * p.width, p.width}};
  }
  int64_t tasks() const { return (p.rows + p.rows_per_task - 1) / p.rows_per_task; }

  void forward() const { run(&NormKernels<T>::forward); }

  // dw, as fp32 or fp64 [V].
  at::Tensor backward() {
    if (p.weight == nullptr) {
      run(&NormKernels<T>::backward);
      return at::empty({0}, options_);
    }
    const at::Tensor parts = at::empty({tasks(), padded_width()}, options_);
    p.dweight_parts = parts.mutable_data_ptr<T>();
    run(&NormKernels<T>::backward);
    at::Tensor sums = at::zeros({p.width}, options_);
    T* sum = sums.mutable_data_ptr<T>();
    for (int64_t task = 0; task < tasks(); ++task)
      for (int64_t i = 0; i < p.width; ++i) sum[i] += p.dweight_parts[task * padded_width() + i];
    return sums;
  }

 private:
  int64_t padded_width() const { return padded(p.width); }
  void run(typename NormKernels<T>::Task NormKernels<T>::*task) const {
    const auto& kernels = KernelTables<NormKernels<T>>::in_use();
    for_each_task<T>(tasks(), kernels.workspace_size(p.width),
                     [&](T* workspace, int64_t i) { (kernels.*task)(p, workspace, i); });
  }

  RowLayout layout_;
  at::TensorOptions options_;
  at::Tensor weight_;
};

// The gradient of the weight as it goes to the caller.
at::Tensor of_weight(const OptionalTensor& weight, const at::Tensor& dweight) {
  return given(weight) ? dweight.to(weight->scalar_type()) : dweight;
}

NormForwardOutputs gate_fwd(const NormGateForward& a) {
  const NormCall call = check_norm(a);
  at::Tensor y = contiguous_like(a.x), rstd = empty_rstd(a.x, call);
  with_accumulate(call.accumulate, [&](auto type) {
    NormTasks<decltype(type)> tasks(call, those_given({a.x, a.gate}), a.weight, a.eps);
    auto& p = tasks.p;
    if (p.rows == 0) return;
    p.x = tasks.input(0);
    if (given(a.gate)) p.gate = tasks.input(1);
    p.y = tasks.output(y);
    p.rstd = static_cast<decltype(p.rstd)>(rstd.mutable_data_ptr());
    tasks.forward();
  });
  return {y, rstd};
}

NormBackwardOutputs gate_bwd(const NormGateBackward& a) {
  const NormCall call = check_norm(a);
  const auto not_asked_for = [&] { return at::empty({0}, a.x.options().dtype(call.accumulate)); };
  at::Tensor dx = contiguous_like(a.x);
  at::Tensor dgate = given(a.gate) ? contiguous_like(*a.gate) : not_asked_for();
  at::Tensor y = a.output ? contiguous_like(a.x) : not_asked_for();
  if (a.x.numel() == 0) return {dx, no_weight_grad(a.weight, not_asked_for()), dgate, y};
  const at::Tensor kept = a.rstd.contiguous();
  at::Tensor dweight = with_accumulate(call.accumulate, [&](auto type) {
    NormTasks<decltype(type)> tasks(call, those_given({a.x, a.dy, a.gate}), a.weight, 0);
    auto& p = tasks.p;
    p.x = tasks.input(0);
    p.dy = tasks.input(1);
    p.dx = tasks.output(dx);
    if (given(a.gate)) {
      p.gate = tasks.input(2);
      p.dgate = tasks.output(dgate);
    }
    if (a.output) p.y = tasks.output(y);
    p.rstd = static_cast<decltype(p.rstd)>(const_cast<void*>(kept.const_data_ptr()));
    return tasks.backward();
  });
  return {dx, of_weight(a.weight, dweight), dgate, y};
}

NormResidualForwardOutputs residual_fwd(const NormResidualForward& a) {
  const NormCall call = check_norm(a);
  at::Tensor y = contiguous_like(a.x), stream = contiguous_like(a.residual);
  at::Tensor rstd = empty_rstd(a.x, call);
  with_accumulate(call.accumulate, [&](auto type) {
    NormTasks<decltype(type)> tasks(call, {a.x, a.residual}, a.weight, a.eps);
    auto& p = tasks.p;
    if (p.rows == 0) return;
    p.x = tasks.input(0);
    p.residual = tasks.input(1);
    p.stream = tasks.output(stream);
    p.y = tasks.output(y);
    p.rstd = static_cast<decltype(p.rstd)>(rstd.mutable_data_ptr());
    tasks.forward();
  });
  return {y, stream, rstd};
}

NormResidualBackwardOutputs residual_bwd(const NormResidualBackward& a) {
  const NormCall call = check_norm(a);
  at::Tensor dresidual = contiguous_like(a.stream);
  at::Tensor dx = a.both() ? at::empty({0}, a.dy.options()) : contiguous_like(a.dy);
  if (a.dy.numel() == 0)
    return {dx, dresidual,
            no_weight_grad(a.weight, at::empty({0}, a.dy.options().dtype(call.accumulate)))};
  const at::Tensor kept = a.rstd.contiguous();
  at::Tensor dweight = with_accumulate(call.accumulate, [&](auto type) {
    NormTasks<decltype(type)> tasks(call, those_given({a.dy, a.stream, a.dstream}), a.weight, 0);
    auto& p = tasks.p;
    p.dy = tasks.input(0);
    p.x = tasks.input(1);
    if (given(a.dstream)) p.dstream = tasks.input(2);
    p.dresidual = tasks.output(dresidual);
    if (!a.both()) p.dx = tasks.output(dx);
    p.rstd = static_cast<decltype(p.rstd)>(const_cast<void*>(kept.const_data_ptr()));
    return tasks.backward();
  });
  return {dx, dresidual, of_weight(a.weight, dweight)};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  register_norms<gate_fwd, gate_bwd, residual_fwd, residual_bwd>(m);
}

}  // namespace gla_ext::cpu
