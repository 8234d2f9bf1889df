// Cross entropy on CPU: the tasks of a checked call.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>

#include <algorithm>

#include "cpu/host/call.h"
#include "cpu_kernels.h"
#include "op.h"

namespace gla_ext::cpu {
namespace {

constexpr int64_t kElementsPerTask = 8192;

// One call. Holds the copies that some inputs need.
template <typename T>
class CrossEntropyTasks {
 public:
  explicit CrossEntropyTasks(const CrossEntropyCall& call) : logits_(call.contiguous_rows()) {
    p.rows = logits_.size(0), p.width = logits_.size(1);
    p.rows_per_task = std::max<int64_t>(1, kElementsPerTask / p.width);
    p.dtype = dtype_of(logits_.scalar_type());
    p.options = call.options;
    check_labels(call.op, call.target, p.width, p.options.ignored);
    target_ = call.target.to(at::kLong).contiguous();
    p.logits = logits_.const_data_ptr();
    p.stride = logits_.stride(0);
    p.target = target_.const_data_ptr<int64_t>();
  }

  CrossEntropy<T> p;

  void forward(const at::Tensor& loss, const at::Tensor& z_loss, const at::Tensor& lse) {
    p.loss = loss.mutable_data_ptr<T>();
    p.z_loss = z_loss.mutable_data_ptr<T>();
    p.lse = lse.mutable_data_ptr<T>();
    run(kernels().forward);
  }
  void backward(const at::Tensor& dloss, const at::Tensor& lse, const at::Tensor& dlogits) {
    const at::Tensor d = dloss.contiguous(), kept = lse.contiguous();
    p.dloss = d.const_data_ptr<T>();
    p.lse = const_cast<T*>(kept.const_data_ptr<T>());
    p.dlogits = dlogits.mutable_data_ptr();
    p.dlogits_stride = dlogits.stride(0);
    run(kernels().backward);
  }

 private:
  static const CrossEntropyKernels<T>& kernels() {
    return KernelTables<CrossEntropyKernels<T>>::in_use();
  }
  void run(typename CrossEntropyKernels<T>::Task task) const {
    for_each_task<T>((p.rows + p.rows_per_task - 1) / p.rows_per_task, kernels().workspace(p.width),
                     [&](T* workspace, int64_t i) { task(p, workspace, i); });
  }

  at::Tensor logits_, target_;
};

struct Backend {
  template <typename F>
  static void with_tasks(const CrossEntropyCall& call, const F& f) {
    with_accumulate(call.accumulate,
                    [&](auto type) { f(CrossEntropyTasks<decltype(type)>(call)); });
  }

  static void forward(const CrossEntropyCall& call, const at::Tensor& loss,
                      const at::Tensor& z_loss, const at::Tensor& lse) {
    with_tasks(call, [&](auto tasks) { tasks.forward(loss, z_loss, lse); });
  }
  static void backward(const CrossEntropyCall& call, const at::Tensor& dloss, const at::Tensor& lse,
                       const at::Tensor& dlogits) {
    with_tasks(call, [&](auto tasks) { tasks.backward(dloss, lse, dlogits); });
  }
  static void with_grad(const CrossEntropyCall& call, const at::Tensor& loss) {
    const at::Tensor z_loss = at::empty_like(loss), lse = at::empty_like(loss);
    const at::Tensor ones = at::ones({1}, loss.options()).expand(loss.sizes());
    with_tasks(call, [&](auto tasks) {
      tasks.forward(loss, z_loss, lse);
      tasks.backward(ones, lse, call.logits);
    });
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) { CrossEntropyOn<Backend>::register_in(m); }

}  // namespace gla_ext::cpu
