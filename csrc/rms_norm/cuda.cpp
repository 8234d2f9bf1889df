// The norm with its gate on CUDA: check, allocate, launch.
#include "common/row_layout.h"
#include "cuda/host/launch.h"
#include "cuda_kernels.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

// The first of the tensors is x.
class NormLaunch : Launch {
 public:
  NormLaunch(const char* op, const NormCall& call, std::vector<at::Tensor> tensors,
             const OptionalTensor& weight, double eps)
      : Launch(tensors[0].device()) {
    check_not_fp64(op, call.accumulate);
    check_gpu(op, tensors[0].device());
    const cudaDeviceProp& gpu = *at::cuda::getDeviceProperties(tensors[0].device().index());
    gpu_ = {gpu.multiProcessorCount, gpu.major};
    layout_ = lay_out_rows(std::move(tensors));
    p.rows = layout_.rows;
    p.inner_rows = layout_.inner_rows;
    p.width = layout_.width;
    p.per_width = 1.f / static_cast<float>(p.width);
    p.dtype = dtype_of(layout_.tensors[0].scalar_type());
    p.activation = call.activation;
    p.eps = static_cast<float>(eps);
    if (given(weight)) {
      const bool fp64 = weight->scalar_type() == at::kDouble;
      weight_ = (fp64 ? weight->to(at::kFloat) : *weight).contiguous();
      p.weight = weight_.const_data_ptr();
      p.weight_dtype = dtype_of(weight_.scalar_type());
    }
    p.aligned = is_aligned();
  }

  Norm p;

  // Tensor i of the layout.
  StridedRows input(size_t i) const { return layout_.input(i); }
  static void* output(const at::Tensor& t) { return t.mutable_data_ptr(); }
  static float* rstd(const at::Tensor& t) { return const_cast<float*>(t.const_data_ptr<float>()); }
  void stream_like(const at::Tensor& t) { p.stream_dtype = dtype_of(t.scalar_type()); }

  void forward() const { launch(norm_forward, p, gpu_); }

  // The gradient of the weight, in fp32 if the weight is fp64.
  at::Tensor backward() {
    at::Tensor partials, dweight;
    if (weight_.defined()) {
      partials =
          at::empty({norm_backward_blocks(p, gpu_), p.width}, weight_.options().dtype(at::kFloat));
      dweight = at::empty({p.width}, weight_.options());
      p.partials = partials.mutable_data_ptr<float>();
      p.dweight = dweight.mutable_data_ptr();
    }
    launch(norm_backward, p, gpu_);
    return dweight;
  }

 private:
  bool is_aligned() const {
    bool aligned = p.width % 8 == 0 && starts_aligned(p.weight);
    const auto eights = [](int64_t stride) { return stride % 8 == 0; };
    for (size_t i = 0; i < layout_.strides.size(); ++i)
      aligned &= starts_aligned(layout_.tensors[i].const_data_ptr()) &&
                 eights(layout_.strides[i].outer) && eights(layout_.strides[i].inner);
    return aligned;
  }

  RowLayout layout_;
  at::Tensor weight_;
  NormGpu gpu_;
};

struct Backend {
  template <typename F>
  static void with(const char* op, const NormCall& call, std::vector<at::Tensor> tensors,
                   const OptionalTensor& weight, double eps, const F& f) {
    NormLaunch launch(op, call, std::move(tensors), weight, eps);
    if (launch.p.rows > 0) f(launch);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) { register_norms<Backend>(m); }

}  // namespace gla_ext::cuda
