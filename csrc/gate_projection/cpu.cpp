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

namespace gla_ext::cpu {
namespace {

// The rows of a task depend on the shape alone: dweight is summed within a task, then over tasks in
// order.
constexpr int64_t kElementsPerTask = 16384, kMostTasks = 64;

template <typename T>
class GateProjectionTasks {
 public:
  // For either pass.
  template <class Arguments>
  explicit GateProjectionTasks(const Arguments& a)
      : h_(lay_out_rows({a.h})), options_(a.h.options().dtype(c10::CppTypeToScalarType<T>::value)) {
    p.rows = h_.rows, p.rank = h_.width, p.width = a.weight.size(0);
    const int64_t fewest = (kElementsPerTask + p.width - 1) / p.width;
    p.rows_per_task = std::max<int64_t>(fewest, (p.rows + kMostTasks - 1) / kMostTasks);
    p.dtype = dtype_of(a.h.scalar_type());
    p.per_normalizer = static_cast<T>(1 / a.normalizer);
    p.clamp_min = static_cast<T>(a.clamp_min.value_or(-std::numeric_limits<T>::infinity()));
    if (p.rows > 0) p.h = h_.input(0);
    p.h_inner_rows = h_.inner_rows;
    weight_ = at::zeros({p.rank, padded_width()}, options_);
    weight_.narrow(1, 0, p.width).copy_(a.weight.t());
    bias_ = at::zeros({padded_width()}, options_);
    if (given(a.bias)) bias_.narrow(0, 0, p.width).copy_(*a.bias);
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
    if (p.rows == 0) return at::zeros({p.rank + 1, p.width}, options_);
    p.dg = layout.input(0);
    p.dg_inner_rows = layout.inner_rows;
    p.dh = dh.mutable_data_ptr();
    const at::Tensor parts = at::empty({tasks(), p.rank + 1, padded_width()}, options_);
    p.parts = parts.mutable_data_ptr<T>();
    run(&GateProjectionKernels<T>::backward);
    return sum_of_parts<T>(parts).narrow(1, 0, p.width);
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

at::Tensor forward(const GateForward& a) {
  check_gate_projection(a);
  at::Tensor g = fresh_gates(a);
  with_accumulate(a.h.scalar_type(),
                  [&](auto type) { GateProjectionTasks<decltype(type)>(a).forward(g); });
  return g;
}

GateProjectionBackwardOutputs backward(const GateBackward& a) {
  check_gate_projection(a);
  auto [dh, dweight, dbias] = fresh_gradients(a);
  const at::Tensor sums = with_accumulate(a.h.scalar_type(), [&, &dh = dh](auto type) {
    return GateProjectionTasks<decltype(type)>(a).backward(a.dg, dh);
  });
  const int64_t R = a.h.size(-1);
  dweight.copy_(sums.narrow(0, 0, R).t());
  if (given(a.bias)) dbias.copy_(sums.select(0, R));
  return {dh, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) { register_gate_projection<forward, backward>(m); }

}  // namespace gla_ext::cpu
