// Cross entropy on CPU: check, allocate, run the tasks.
#include "cross_entropy.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <algorithm>

#include "checks/cross_entropy.h"
#include "host/call.h"
#include "ops.h"

namespace gla_ext::cpu {
namespace {

constexpr int64_t kElementsPerTask = 8192;

// One call; holds the copies that some inputs need.
template <typename T>
class CrossEntropyTasks {
 public:
  CrossEntropyTasks(const char* op, const CrossEntropyCall& call, const at::Tensor& logits,
                    const at::Tensor& target)
      : logits_(logits.size(1) == 1 || logits.stride(1) == 1 ? logits : logits.contiguous()) {
    p.rows = logits_.size(0), p.width = logits_.size(1);
    p.rows_per_task = std::max<int64_t>(1, kElementsPerTask / p.width);
    p.dtype = dtype_of(logits_.scalar_type());
    p.options = call.options;
    check_labels(op, target, p.width, p.options.ignored);
    target_ = target.to(at::kLong).contiguous();
    p.logits = logits_.const_data_ptr();
    p.stride = logits_.stride(0);
    p.target = target_.const_data_ptr<int64_t>();
  }

  CrossEntropy<T> p;

  void forward(const at::Tensor& loss, const at::Tensor& z_loss, const at::Tensor& lse) {
    p.loss = loss.mutable_data_ptr<T>();
    p.z_loss = z_loss.mutable_data_ptr<T>();
    p.lse = lse.mutable_data_ptr<T>();
    run(kernels<T>().cross_entropy_forward);
  }
  void backward(const at::Tensor& dloss, const at::Tensor& lse, const at::Tensor& dlogits) {
    const at::Tensor d = dloss.contiguous(), kept = lse.contiguous();
    p.dloss = d.const_data_ptr<T>();
    p.lse = const_cast<T*>(kept.const_data_ptr<T>());
    p.dlogits = dlogits.mutable_data_ptr();
    p.dlogits_stride = dlogits.stride(0);
    run(kernels<T>().cross_entropy_backward);
  }

 private:
  void run(void (*task)(const CrossEntropy<T>&, T*, int64_t)) const {
    for_each_task<T>((p.rows + p.rows_per_task - 1) / p.rows_per_task,
                     kernels<T>().cross_entropy_workspace(p.width),
                     [&](T* workspace, int64_t i) { task(p, workspace, i); });
  }

  at::Tensor logits_, target_;
};

template <typename F>
void with_tasks(const char* op, const CrossEntropyCall& call, const at::Tensor& logits,
                const at::Tensor& target, F&& f) {
  if (call.accumulate == at::kDouble)
    f(CrossEntropyTasks<double>(op, call, logits, target));
  else
    f(CrossEntropyTasks<float>(op, call, logits, target));
}

CrossEntropyForwardOutputs cross_entropy_fwd_cpu(const at::Tensor& logits, const at::Tensor& target,
                                                 int64_t ignore_index, double label_smoothing,
                                                 double logit_scale,
                                                 std::optional<double> logit_softcapping,
                                                 double lse_square_scale, bool) {
  const CrossEntropyCall call =
      check_cross_entropy_fwd(logits, target, ignore_index, label_smoothing, logit_scale,
                              logit_softcapping, lse_square_scale);
  const auto a_row = [&] {
    return at::empty({logits.size(0)}, logits.options().dtype(call.accumulate));
  };
  at::Tensor loss = a_row(), z_loss = a_row(), lse = a_row();
  with_tasks("cross_entropy", call, logits, target,
             [&](auto tasks) { tasks.forward(loss, z_loss, lse); });
  return {loss, z_loss, lse};
}

at::Tensor cross_entropy_bwd_cpu(const at::Tensor& dloss, const at::Tensor& logits,
                                 const at::Tensor& target, const at::Tensor& lse,
                                 int64_t ignore_index, double label_smoothing, double logit_scale,
                                 std::optional<double> logit_softcapping, double lse_square_scale) {
  const CrossEntropyCall call =
      check_cross_entropy_bwd(dloss, logits, target, lse, ignore_index, label_smoothing,
                              logit_scale, logit_softcapping, lse_square_scale);
  at::Tensor dlogits = at::empty(logits.sizes(), logits.options());
  with_tasks("cross_entropy_bwd", call, logits, target,
             [&](auto tasks) { tasks.backward(dloss, lse, dlogits); });
  return dlogits;
}

void cross_entropy_bwd_over_logits_cpu(const at::Tensor& dloss, at::Tensor& logits,
                                       const at::Tensor& target, const at::Tensor& lse,
                                       int64_t ignore_index, double label_smoothing,
                                       double logit_scale, std::optional<double> logit_softcapping,
                                       double lse_square_scale) {
  const CrossEntropyCall call =
      check_cross_entropy_bwd(dloss, logits, target, lse, ignore_index, label_smoothing,
                              logit_scale, logit_softcapping, lse_square_scale);
  check_writable_rows("cross_entropy_bwd_", logits);
  with_tasks("cross_entropy_bwd_", call, logits, target,
             [&](auto tasks) { tasks.backward(dloss, lse, logits); });
}

at::Tensor cross_entropy_with_grad_cpu(at::Tensor& logits, const at::Tensor& target,
                                       int64_t ignore_index, double label_smoothing,
                                       double logit_scale, std::optional<double> logit_softcapping,
                                       double lse_square_scale) {
  const CrossEntropyCall call =
      check_cross_entropy_fwd(logits, target, ignore_index, label_smoothing, logit_scale,
                              logit_softcapping, lse_square_scale);
  check_writable_rows("cross_entropy_with_grad_", logits);
  const auto options = logits.options().dtype(call.accumulate);
  at::Tensor loss = at::empty({logits.size(0)}, options), z_loss = at::empty_like(loss);
  const at::Tensor lse = at::empty_like(loss), ones = at::ones({1}, options).expand(loss.sizes());
  with_tasks("cross_entropy_with_grad_", call, logits, target, [&](auto tasks) {
    tasks.forward(loss, z_loss, lse);
    tasks.backward(ones, lse, logits);
  });
  return loss;
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("cross_entropy_fwd", cross_entropy_fwd_cpu);
  m.impl("cross_entropy_bwd", cross_entropy_bwd_cpu);
  m.impl("cross_entropy_bwd_", cross_entropy_bwd_over_logits_cpu);
  m.impl("cross_entropy_with_grad_", cross_entropy_with_grad_cpu);
}

}  // namespace gla_ext::cpu
