// The norm with its gate on CPU: check, allocate, run the tasks.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "common/row_layout.h"
#include "cpu/host/call.h"
#include "cpu/kernel_tables.h"
#include "cpu_kernels.h"
#include "op.h"

namespace gla_ext::cpu {
namespace {

// The rows of a task depend on the shape alone: dw is summed within a task, then over tasks in
// order.
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
  static T* rstd(const at::Tensor& t) {
    return static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
  }
  static void stream_like(const at::Tensor&) {}  // rows have their own
  int64_t tasks() const { return (p.rows + p.rows_per_task - 1) / p.rows_per_task; }

  void forward() const { run(&NormKernels<T>::forward); }

  // Computes dw, fp32 or fp64 [V].
  at::Tensor backward() {
    if (p.weight == nullptr) {
      run(&NormKernels<T>::backward);
      return at::empty({0}, options_);
    }
    const at::Tensor parts = at::empty({tasks(), padded_width()}, options_);
    p.dweight_parts = parts.mutable_data_ptr<T>();
    run(&NormKernels<T>::backward);
    return sum_of_parts<T>(parts).narrow(0, 0, p.width);
  }

 private:
  int64_t padded_width() const { return padded(p.width); }
  void run(typename NormKernels<T>::Task NormKernels<T>::* task) const {
    const auto& kernels = KernelTables<NormKernels<T>>::in_use();
    for_each_task<T>(tasks(), kernels.workspace_size(p.width),
                     [&](T* workspace, int64_t i) { (kernels.*task)(p, workspace, i); });
  }

  RowLayout layout_;
  at::TensorOptions options_;
  at::Tensor weight_;
};

struct Backend {
  template <typename F>
  static void with(const char*, const NormCall& call, const std::vector<at::Tensor>& tensors,
                   const OptionalTensor& weight, double eps, const F& f) {
    with_accumulate(call.accumulate, [&](auto type) {
      NormTasks<decltype(type)> tasks(call, tensors, weight, eps);
      if (tasks.p.rows > 0) f(tasks);
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) { register_norms<Backend>(m); }

}  // namespace gla_ext::cpu
