// Cross entropy on CUDA: the launch of a checked call.
#include "cuda/host/launch.h"
#include "cuda_kernels.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

class CrossEntropyLaunch : Launch {
 public:
  explicit CrossEntropyLaunch(const CrossEntropyCall& call)
      : Launch(call.logits.device()), logits_(call.contiguous_rows()) {
    check_not_fp64(call.op, call.accumulate);
    check_gpu(call.op, logits_.device());
    target_ = call.target.to(at::kLong).contiguous();
    p.rows = logits_.size(0), p.width = logits_.size(1);
    TORCH_CHECK_NOT_IMPLEMENTED(p.rows <= kMaxBlocks, call.op, ": expected N to be at most ",
                                kMaxBlocks, ", got ", p.rows);
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
  void run(void (*kernel)(const CrossEntropy&, cudaStream_t)) const {
    if (p.rows > 0) launch(kernel, p);
  }

 private:
  static bool is_aligned(const at::Tensor& t) {
    return t.size(1) % 8 == 0 && t.stride(0) % 8 == 0 && starts_aligned(t.const_data_ptr());
  }

  at::Tensor logits_, target_, lse_;
};

struct Backend {
  static void forward(const CrossEntropyCall& call, const at::Tensor& loss,
                      const at::Tensor& z_loss, const at::Tensor& lse) {
    CrossEntropyLaunch launch(call);
    launch.p.loss = loss.mutable_data_ptr<float>();
    launch.p.z_loss = z_loss.mutable_data_ptr<float>();
    launch.p.lse = lse.mutable_data_ptr<float>();
    launch.run(cross_entropy_forward);
  }
  static void backward(const CrossEntropyCall& call, const at::Tensor& dloss, const at::Tensor& lse,
                       const at::Tensor& dlogits) {
    CrossEntropyLaunch launch(call);
    launch.reads(dloss, lse);
    launch.writes(dlogits);
    launch.run(cross_entropy_backward);
  }
  static void with_grad(const CrossEntropyCall& call, const at::Tensor& loss) {
    CrossEntropyLaunch launch(call);
    launch.p.loss = loss.mutable_data_ptr<float>();
    launch.writes(call.logits);
    launch.run(cross_entropy_with_grad);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) { CrossEntropyOn<Backend>::register_in(m); }

}  // namespace gla_ext::cuda
