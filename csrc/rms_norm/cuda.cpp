// The norm with its gate on CUDA: check, allocate, launch.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/row_layout.h"
#include "common/tensors.h"
#include "cuda/host/tensors.h"
#include "cuda_kernels.h"
#include "op.h"
#include "ops.h"

namespace gla_ext::cuda {
namespace {

// One call on the device and the current stream of its tensors, of which the first is x. Holds the
// copies that some inputs need.
class NormLaunch {
 public:
  NormLaunch(const char* op, const NormCall& call, std::vector<at::Tensor> tensors,
             const OptionalTensor& weight)
      : guard_(tensors[0].device()),
        stream_(c10::cuda::getCurrentCUDAStream(tensors[0].device().index())) {
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
  bool is_empty() const { return p.rows == 0; }

  void forward() const {
    norm_forward(p, gpu_, stream_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // The gradient of the weight, in fp32 where that is fp64.
  at::Tensor backward() {
    at::Tensor partials, dweight;
    if (weight_.defined()) {
      partials =
          at::empty({norm_backward_blocks(p, gpu_), p.width}, weight_.options().dtype(at::kFloat));
      dweight = at::empty({p.width}, weight_.options());
      p.partials = partials.mutable_data_ptr<float>();
      p.dweight = dweight.mutable_data_ptr();
    }
    norm_backward(p, gpu_, stream_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
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

  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  RowLayout layout_;
  at::Tensor weight_;
  NormGpu gpu_;
};

NormForwardOutputs rms_norm_gate_fwd_cuda(const at::Tensor& x, const OptionalTensor& weight,
                                          const OptionalTensor& gate, std::string_view activation,
                                          double eps) {
  const NormCall call = check_rms_norm_gate_fwd(x, weight, gate, activation);
  std::vector<at::Tensor> tensors{x};
  if (given(gate)) tensors.push_back(*gate);
  NormLaunch launch("rms_norm_gate", call, std::move(tensors), weight);
  at::Tensor y = contiguous_like(x);
  at::Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  if (launch.is_empty()) return {y, rstd};
  Norm& p = launch.p;
  p.eps = static_cast<float>(eps);
  p.x = launch.input(0);
  if (given(gate)) p.gate = launch.input(1);
  p.y = y.mutable_data_ptr();
  p.rstd = rstd.mutable_data_ptr<float>();
  launch.forward();
  return {y, rstd};
}

NormBackwardOutputs rms_norm_gate_bwd_cuda(const at::Tensor& dy, const at::Tensor& x,
                                           const OptionalTensor& weight, const OptionalTensor& gate,
                                           const at::Tensor& rstd, std::string_view activation,
                                           bool output) {
  const NormCall call = check_rms_norm_gate_bwd(dy, x, weight, gate, rstd, activation);
  std::vector<at::Tensor> tensors{x, dy};
  if (given(gate)) tensors.push_back(*gate);
  NormLaunch launch("rms_norm_gate_bwd", call, std::move(tensors), weight);
  const auto not_asked_for = [&] { return at::empty({0}, x.options().dtype(at::kFloat)); };
  at::Tensor dx = contiguous_like(x);
  at::Tensor dgate = given(gate) ? contiguous_like(*gate) : not_asked_for();
  at::Tensor y = output ? contiguous_like(x) : not_asked_for();
  if (launch.is_empty())
    return {dx, given(weight) ? at::zeros(weight->sizes(), weight->options()) : not_asked_for(),
            dgate, y};
  Norm& p = launch.p;
  const at::Tensor kept = rstd.contiguous();
  p.x = launch.input(0);
  p.dy = launch.input(1);
  p.dx = dx.mutable_data_ptr();
  if (given(gate)) {
    p.gate = launch.input(2);
    p.dgate = dgate.mutable_data_ptr();
  }
  if (output) p.y = y.mutable_data_ptr();
  p.rstd = const_cast<float*>(kept.const_data_ptr<float>());
  const at::Tensor dweight = launch.backward();
  return {dx, given(weight) ? dweight.to(weight->scalar_type()) : not_asked_for(), dgate, y};
}

NormResidualForwardOutputs rms_norm_residual_fwd_cuda(const at::Tensor& x,
                                                      const at::Tensor& residual,
                                                      const OptionalTensor& weight, double eps) {
  const NormCall call = check_rms_norm_residual_fwd(x, residual, weight);
  NormLaunch launch("rms_norm_residual", call, {x, residual}, weight);
  at::Tensor y = contiguous_like(x), stream = contiguous_like(residual);
  at::Tensor rstd = at::empty(x.sizes().slice(0, x.dim() - 1), x.options().dtype(at::kFloat));
  if (launch.is_empty()) return {y, stream, rstd};
  Norm& p = launch.p;
  p.stream_dtype = dtype_of(residual.scalar_type());
  p.eps = static_cast<float>(eps);
  p.x = launch.input(0);
  p.residual = launch.input(1);
  p.stream = stream.mutable_data_ptr();
  p.y = y.mutable_data_ptr();
  p.rstd = rstd.mutable_data_ptr<float>();
  launch.forward();
  return {y, stream, rstd};
}

NormResidualBackwardOutputs rms_norm_residual_bwd_cuda(const at::Tensor& dy,
                                                       const OptionalTensor& dstream,
                                                       const at::Tensor& stream,
                                                       const OptionalTensor& weight,
                                                       const at::Tensor& rstd) {
  const NormCall call = check_rms_norm_residual_bwd(dy, dstream, stream, weight, rstd);
  std::vector<at::Tensor> tensors{dy, stream};
  if (given(dstream)) tensors.push_back(*dstream);
  NormLaunch launch("rms_norm_residual_bwd", call, std::move(tensors), weight);
  const bool both = dy.scalar_type() == stream.scalar_type();
  at::Tensor dresidual = contiguous_like(stream);
  at::Tensor dx = both ? at::empty({0}, dy.options()) : contiguous_like(dy);
  const auto not_asked_for = [&] { return at::empty({0}, dy.options().dtype(at::kFloat)); };
  if (launch.is_empty())
    return {dx, dresidual,
            given(weight) ? at::zeros(weight->sizes(), weight->options()) : not_asked_for()};
  Norm& p = launch.p;
  const at::Tensor kept = rstd.contiguous();
  p.stream_dtype = dtype_of(stream.scalar_type());
  p.dy = launch.input(0);
  p.x = launch.input(1);
  if (given(dstream)) p.dstream = launch.input(2);
  p.dresidual = dresidual.mutable_data_ptr();
  if (!both) p.dx = dx.mutable_data_ptr();
  p.rstd = const_cast<float*>(kept.const_data_ptr<float>());
  const at::Tensor dweight = launch.backward();
  return {dx, dresidual, given(weight) ? dweight.to(weight->scalar_type()) : not_asked_for()};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("rms_norm_gate_fwd", rms_norm_gate_fwd_cuda);
  m.impl("rms_norm_gate_bwd", rms_norm_gate_bwd_cuda);
  m.impl("rms_norm_residual_fwd", rms_norm_residual_fwd_cuda);
  m.impl("rms_norm_residual_bwd", rms_norm_residual_bwd_cuda);
}

}  // namespace gla_ext::cuda
