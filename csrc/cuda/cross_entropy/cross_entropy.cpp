// Cross entropy on CUDA: check, allocate, launch.
#include "checks/cross_entropy.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cross_entropy.h"
#include "cuda/host/tensors.h"
#include "ops.h"

namespace gla_ext::cuda {
namespace {

// One call on the device and the current stream of its tensors. Holds the copies that some inputs
// need.
class CrossEntropyLaunch {
 public:
  CrossEntropyLaunch(const char* op, const CrossEntropyCall& call, const at::Tensor& logits,
                     const at::Tensor& target)
      : guard_(logits.device()),
        stream_(c10::cuda::getCurrentCUDAStream(logits.device().index())),
        logits_(logits.size(1) == 1 || logits.stride(1) == 1 ? logits : logits.contiguous()) {
    check_not_fp64(op, call.accumulate);
    check_gpu(op, logits.device());
    target_ = target.to(at::kLong).contiguous();
    p.rows = logits_.size(0), p.width = logits_.size(1);
    TORCH_CHECK_NOT_IMPLEMENTED(p.rows <= kMaxBlocks, op, ": expected N to be at most ", kMaxBlocks,
                                ", got ", p.rows);
    p.dtype = dtype_of(logits_.scalar_type());
    p.aligned = is_aligned(logits_);
    p.ignored = call.options.ignored;
    p.smoothing = static_cast<float>(call.options.smoothing);
    p.scale = static_cast<float>(call.options.scale);
    p.cap = static_cast<float>(call.options.cap);
    if (p.cap != 0) p.per_cap = 1 / p.cap;
    p.per_width = 1 / static_cast<float>(p.width);
    p.square = static_cast<float>(call.options.square);
    p.logits = logits_.const_data_ptr();
    p.stride = logits_.stride(0);
    p.target = target_.const_data_ptr<int64_t>();
  }

  CrossEntropy p;

  at::Tensor a_row() const {
    return at::empty({logits_.size(0)}, logits_.options().dtype(at::kFloat));
  }
  void writes(const at::Tensor& dlogits) {
    p.dlogits = dlogits.mutable_data_ptr();
    p.dlogits_stride = dlogits.stride(0);
    p.aligned &= is_aligned(dlogits);
  }
  void reads(const at::Tensor& dloss, const at::Tensor& lse) {
    lse_ = lse.contiguous();
    p.dloss = dloss.const_data_ptr<float>();
    p.dloss_stride = dloss.stride(0);
    p.lse = const_cast<float*>(lse_.const_data_ptr<float>());
  }
  void run(void (*launch)(const CrossEntropy&, cudaStream_t)) const {
    if (p.rows == 0) return;
    launch(p, stream_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  static bool is_aligned(const at::Tensor& t) {
    return t.size(1) % 8 == 0 && t.stride(0) % 8 == 0 && starts_aligned(t.const_data_ptr());
  }

  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  at::Tensor logits_, target_, lse_;
};

CrossEntropyForwardOutputs cross_entropy_fwd_cuda(const at::Tensor& logits,
                                                  const at::Tensor& target, int64_t ignore_index,
                                                  double label_smoothing, double logit_scale,
                                                  std::optional<double> logit_softcapping,
                                                  double lse_square_scale, bool) {
  CrossEntropyLaunch launch(
      "cross_entropy",
      check_cross_entropy_fwd(logits, target, ignore_index, label_smoothing, logit_scale,
                              logit_softcapping, lse_square_scale),
      logits, target);
  at::Tensor loss = launch.a_row(), z_loss = launch.a_row(), lse = launch.a_row();
  launch.p.loss = loss.mutable_data_ptr<float>();
  launch.p.z_loss = z_loss.mutable_data_ptr<float>();
  launch.p.lse = lse.mutable_data_ptr<float>();
  launch.run(cross_entropy_forward);
  return {loss, z_loss, lse};
}

at::Tensor cross_entropy_bwd_cuda(const at::Tensor& dloss, const at::Tensor& logits,
                                  const at::Tensor& target, const at::Tensor& lse,
                                  int64_t ignore_index, double label_smoothing, double logit_scale,
                                  std::optional<double> logit_softcapping,
                                  double lse_square_scale) {
  CrossEntropyLaunch launch(
      "cross_entropy_bwd",
      check_cross_entropy_bwd(dloss, logits, target, lse, ignore_index, label_smoothing,
                              logit_scale, logit_softcapping, lse_square_scale),
      logits, target);
  at::Tensor dlogits = at::empty(logits.sizes(), logits.options());
  launch.reads(dloss, lse);
  launch.writes(dlogits);
  launch.run(cross_entropy_backward);
  return dlogits;
}

void cross_entropy_bwd_over_logits_cuda(const at::Tensor& dloss, at::Tensor& logits,
                                        const at::Tensor& target, const at::Tensor& lse,
                                        int64_t ignore_index, double label_smoothing,
                                        double logit_scale, std::optional<double> logit_softcapping,
                                        double lse_square_scale) {
  const char* op = "cross_entropy_bwd_";
  const CrossEntropyCall call =
      check_cross_entropy_bwd(dloss, logits, target, lse, ignore_index, label_smoothing,
                              logit_scale, logit_softcapping, lse_square_scale);
  check_writable_rows(op, logits);
  CrossEntropyLaunch launch(op, call, logits, target);
  launch.reads(dloss, lse);
  launch.writes(logits);
  launch.run(cross_entropy_backward);
}

at::Tensor cross_entropy_with_grad_cuda(at::Tensor& logits, const at::Tensor& target,
                                        int64_t ignore_index, double label_smoothing,
                                        double logit_scale, std::optional<double> logit_softcapping,
                                        double lse_square_scale) {
  const char* op = "cross_entropy_with_grad_";
  const CrossEntropyCall call =
      check_cross_entropy_fwd(logits, target, ignore_index, label_smoothing, logit_scale,
                              logit_softcapping, lse_square_scale);
  check_writable_rows(op, logits);
  CrossEntropyLaunch launch(op, call, logits, target);
  at::Tensor loss = launch.a_row();
  launch.p.loss = loss.mutable_data_ptr<float>();
  launch.writes(logits);
  launch.run(cross_entropy_with_grad);
  return loss;
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("cross_entropy_fwd", cross_entropy_fwd_cuda);
  m.impl("cross_entropy_bwd", cross_entropy_bwd_cuda);
  m.impl("cross_entropy_bwd_", cross_entropy_bwd_over_logits_cuda);
  m.impl("cross_entropy_with_grad_", cross_entropy_with_grad_cuda);
}

}  // namespace gla_ext::cuda
