// The gate's projection on CPU: check, allocate, run the tasks.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "common/row_layout.h"
#include "cpu/host/call.h"
#include "cpu/kernel_tables.h"
#include "cpu_kernels.h"
#include "op.h"
#include "ops.h"

namespace gla_ext::cpu {
namespace {

// Rows of a task by the shape alone: dweight is summed within a task, then over tasks in order.
constexpr int64_t kElementsPerTask = 16384, kMostTasks = 64;

template <typename T>
class GateProjectionTasks {
 public:
  GateProjectionTasks(const at::Tensor& h, const at::Tensor& weight, const OptionalTensor& bias,
                      double normalizer, std::optional<double> clamp_min)
      : h_(lay_out_rows({h})), options_(h.options().dtype(c10::CppTypeToScalarType<T>::value)) {
    p.rows = h_.rows, p.rank = h_.width, p.width = weight.size(0);
    const int64_t fewest = (kElementsPerTask + p.width - 1) / p.width;
    p.rows_per_task = std::max<int64_t>(fewest, (p.rows + kMostTasks - 1) / kMostTasks);
    p.dtype = dtype_of(h.scalar_type());
    p.per_normalizer = static_cast<T>(1 / normalizer);
    p.clamp_min = static_cast<T>(clamp_min.value_or(-std::numeric_limits<T>::infinity()));
    if (p.rows > 0) p.h = h_.input(0);
    p.h_inner_rows = h_.inner_rows;
    weight_ = at::zeros({p.rank, padded_width()}, options_);
    weight_.narrow(1, 0, p.width).copy_(weight.t());
    bias_ = at::zeros({padded_width()}, options_);
    if (given(bias)) bias_.narrow(0, 0, p.width).copy_(*bias);
    p.weight = weight_.const_data_ptr<T>();
    p.bias = bias_.const_data_ptr<T>();
  }

  void forward(const at::Tensor& g) {
    p.g = g.mutable_data_ptr();
    run(&GateProjectionKernels<T>::forward);
  }

  // [R + 1, K]: the gradients of the transposed weight and of the bias.
  at::Tensor backward(const at::Tensor& dg, const at::Tensor& dh) {
    const RowLayout layout = lay_out_rows({dg});
    at::Tensor sums = at::zeros({p.rank + 1, padded_width()}, options_);
    if (p.rows == 0) return sums.narrow(1, 0, p.width);
    p.dg = layout.input(0);
    p.dg_inner_rows = layout.inner_rows;
    p.dh = dh.mutable_data_ptr();
    const at::Tensor parts = at::empty({tasks(), p.rank + 1, padded_width()}, options_);
    p.parts = parts.mutable_data_ptr<T>();
    run(&GateProjectionKernels<T>::backward);
    T* sum = sums.mutable_data_ptr<T>();
    for (int64_t task = 0; task < tasks(); ++task)
      for (int64_t i = 0; i < sums.numel(); ++i) sum[i] += p.parts[task * sums.numel() + i];
    return sums.narrow(1, 0, p.width);
  }

 private:
  GateProjection<T> p;

  int64_t padded_width() const { return padded(p.width); }
  int64_t tasks() const { return (p.rows + p.rows_per_task - 1) / p.rows_per_task; }
  void run(typename GateProjectionKernels<T>::Task GateProjectionKernels<T>::* task) const {
    const auto& kernels = KernelTables<GateProjectionKernels<T>>::in_use();
    for_each_task<T>(tasks(), kernels.workspace_size(p.rank, p.width),
                     [&](T* workspace, int64_t i) { (kernels.*task)(p, workspace, i); });
  }

  RowLayout h_;
  at::TensorOptions options_;
  at::Tensor weight_, bias_;
};

at::Tensor gate_projection_fwd_cpu(const at::Tensor& h, const at::Tensor& weight,
                                   const OptionalTensor& bias, double normalizer,
                                   std::optional<double> clamp_min) {
  check_gate_projection_fwd(h, weight, bias, normalizer);
  auto sizes = h.sizes().vec();
  sizes.back() = weight.size(0);
  at::Tensor g = at::empty(sizes, h.options());
  with_accumulate(h.scalar_type(), [&](auto type) {
    GateProjectionTasks<decltype(type)>(h, weight, bias, normalizer, clamp_min).forward(g);
  });
  return g;
}

GateProjectionBackwardOutputs gate_projection_bwd_cpu(const at::Tensor& dg, const at::Tensor& h,
                                                      const at::Tensor& weight,
                                                      const OptionalTensor& bias, double normalizer,
                                                      std::optional<double> clamp_min) {
  check_gate_projection_bwd(dg, h, weight, bias, normalizer);
  at::Tensor dh = at::empty(h.sizes(), h.options());
  const at::Tensor sums = with_accumulate(h.scalar_type(), [&](auto type) {
    return GateProjectionTasks<decltype(type)>(h, weight, bias, normalizer, clamp_min)
        .backward(dg, dh);
  });
  const int64_t R = h.size(-1);
  at::Tensor dweight = at::empty(weight.sizes(), weight.options());
  dweight.copy_(sums.narrow(0, 0, R).t());
  at::Tensor dbias = at::empty({given(bias) ? weight.size(0) : 0}, weight.options());
  if (given(bias)) dbias.copy_(sums.select(0, R));
  return {dh, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("gate_projection_fwd", gate_projection_fwd_cpu);
  m.impl("gate_projection_bwd", gate_projection_bwd_cpu);
}

}  // namespace gla_ext::cpu
