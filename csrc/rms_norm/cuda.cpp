// The norm with its gate on CUDA: check, allocate, launch.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "common/row_layout.h"
#include "common/tensors.h"
#include "cuda/host/launch.h"
#include "cuda_kernels.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

// The first of the tensors is x.
class NormLaunch : Launch {
 public:
  NormLaunch(const char* op, const NormCall& call, std::vector<at::Tensor> tensors,
             const OptionalTensor& weight)
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

  void forward() const { launch(norm_forward, p, gpu_); }

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

NormForwardOutputs gate_fwd(const NormGateForward& a) {
  const NormCall call = check_norm(a);
  NormLaunch launch("rms_norm_gate", call, those_given({a.x, a.gate}), a.weight);
  at::Tensor y = contiguous_like(a.x), rstd = empty_rstd(a.x, call);
  if (launch.is_empty()) return {y, rstd};
  Norm& p = launch.p;
  p.eps = static_cast<float>(a.eps);
  p.x = launch.input(0);
  if (given(a.gate)) p.gate = launch.input(1);
  p.y = y.mutable_data_ptr();
  p.rstd = rstd.mutable_data_ptr<float>();
  launch.forward();
  return {y, rstd};
}

NormBackwardOutputs gate_bwd(const NormGateBackward& a) {
  NormLaunch launch("rms_norm_gate_bwd", check_norm(a), those_given({a.x, a.dy, a.gate}), a.weight);
  const auto not_asked_for = [&] { return at::empty({0}, a.x.options().dtype(at::kFloat)); };
  at::Tensor dx = contiguous_like(a.x);
  at::Tensor dgate = given(a.gate) ? contiguous_like(*a.gate) : not_asked_for();
  at::Tensor y = a.output ? contiguous_like(a.x) : not_asked_for();
  if (launch.is_empty()) return {dx, no_weight_grad(a.weight, not_asked_for()), dgate, y};
  Norm& p = launch.p;
  const at::Tensor kept = a.rstd.contiguous();
  p.x = launch.input(0);
  p.dy = launch.input(1);
  p.dx = dx.mutable_data_ptr();
  if (given(a.gate)) {
    p.gate = launch.input(2);
    p.dgate = dgate.mutable_data_ptr();
  }
  if (a.output) p.y = y.mutable_data_ptr();
  p.rstd = const_cast<float*>(kept.const_data_ptr<float>());
  const at::Tensor dweight = launch.backward();
  return {dx, given(a.weight) ? dweight.to(a.weight->scalar_type()) : not_asked_for(), dgate, y};
}

NormResidualForwardOutputs residual_fwd(const NormResidualForward& a) {
  const NormCall call = check_norm(a);
  NormLaunch launch("rms_norm_residual", call, {a.x, a.residual}, a.weight);
  at::Tensor y = contiguous_like(a.x), stream = contiguous_like(a.residual);
  at::Tensor rstd = empty_rstd(a.x, call);
  if (launch.is_empty()) return {y, stream, rstd};
  Norm& p = launch.p;
  p.stream_dtype = dtype_of(a.residual.scalar_type());
  p.eps = static_cast<float>(a.eps);
  p.x = launch.input(0);
  p.residual = launch.input(1);
  p.stream = stream.mutable_data_ptr();
  p.y = y.mutable_data_ptr();
  p.rstd = rstd.mutable_data_ptr<float>();
  launch.forward();
  return {y, stream, rstd};
}

NormResidualBackwardOutputs residual_bwd(const NormResidualBackward& a) {
  NormLaunch launch("rms_norm_residual_bwd", check_norm(a),
                    those_given({a.dy, a.stream, a.dstream}), a.weight);
  at::Tensor dresidual = contiguous_like(a.stream);
  at::Tensor dx = a.both() ? at::empty({0}, a.dy.options()) : contiguous_like(a.dy);
  const auto not_asked_for = [&] { return at::empty({0}, a.dy.options().dtype(at::kFloat)); };
  if (launch.is_empty()) return {dx, dresidual, no_weight_grad(a.weight, not_asked_for())};
  Norm& p = launch.p;
  const at::Tensor kept = a.rstd.contiguous();
  p.stream_dtype = dtype_of(a.stream.scalar_type());
  p.dy = launch.input(0);
  p.x = launch.input(1);
  if (given(a.dstream)) p.dstream = launch.input(2);
  p.dresidual = dresidual.mutable_data_ptr();
  if (!a.both()) p.dx = dx.mutable_data_ptr();
  p.rstd = const_cast<float*>(kept.const_data_ptr<float>());
  const at::Tensor dweight = launch.backward();
  return {dx, dresidual, given(a.weight) ? dweight.to(a.weight->scalar_type()) : not_asked_for()};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  register_norms<gate_fwd, gate_bwd, residual_fwd, residual_bwd>(m);
}

}  // namespace gla_ext::cuda
