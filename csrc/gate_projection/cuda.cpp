// The gate's projection on CUDA: check, allocate, launch; calls that the kernels do not serve are
// composed of torch's operations.
#include <ATen/OpMathType.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "cuda/host/tensors.h"
#include "cuda_kernels.h"
#include "op.h"
#include "ops.h"

namespace gla_ext::cuda {
namespace {

// [..., D] -> [rows, D] whose last dimension is contiguous; copied where no view is.
at::Tensor as_matrix(const at::Tensor& t) {
  const int64_t D = t.size(-1);
  const at::Tensor m = t.reshape({t.numel() / D, D});
  const bool fits = m.stride(0) <= std::numeric_limits<int32_t>::max();
  return fits && (D == 1 || m.stride(1) == 1) ? m : m.contiguous();
}

// z where logsigmoid(z) / normalizer is clamp_min: log(p / (1 - p)) with p = exp(clamp_min
// normalizer).
float clamped_below(double normalizer, std::optional<double> clamp_min) {
  if (!clamp_min.has_value()) return -std::numeric_limits<float>::infinity();
  const double log_p = *clamp_min * normalizer;
  if (log_p >= 0) return std::numeric_limits<float>::infinity();
  return static_cast<float>(log_p - std::log(-std::expm1(log_p)));
}

// One call on the device and the current stream of its tensors. Holds the copies that some inputs
// need.
class GateProjectionLaunch {
 public:
  GateProjectionLaunch(const char* op, const at::Tensor& h, const at::Tensor& weight,
                       const OptionalTensor& bias, double normalizer,
                       std::optional<double> clamp_min)
      : guard_(h.device()),
        stream_(c10::cuda::getCurrentCUDAStream(h.device().index())),
        h_(as_matrix(h)),
        weight_(weight.contiguous()) {
    check_gpu(op, h.device());
    p.rows = h_.size(0), p.rank = static_cast<int>(h_.size(1)), p.width = weight.size(0);
    p.dtype = dtype_of(h.scalar_type());
    p.per_normalizer = static_cast<float>(1 / normalizer);
    p.clamp_min = clamp_min.has_value() ? static_cast<float>(*clamp_min)
                                        : -std::numeric_limits<float>::infinity();
    p.clamp_z = clamped_below(normalizer, clamp_min);
    p.h = h_.const_data_ptr();
    p.h_stride = static_cast<int32_t>(h_.stride(0));
    p.weight = weight_.const_data_ptr();
    if (given(bias)) {
      bias_ = bias->contiguous();
      p.bias = bias_.const_data_ptr();
    }
    p.aligned = p.rank == kMostGateRank && p.width % 8 == 0 && p.h_stride % 2 == 0 &&
                starts_at_pair(p.h) && starts_at_pair(p.weight);
  }

  GateProjection p;

  void forward(const at::Tensor& g) {
    p.g = g.mutable_data_ptr();
    gate_projection_forward(p, multiprocessors_of(h_.device()), stream_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  void backward(const at::Tensor& dg, const at::Tensor& dh, const at::Tensor& dweight,
                const at::Tensor& dbias) {
    dg_ = as_matrix(dg);
    p.dg = dg_.const_data_ptr();
    p.dg_stride = static_cast<int32_t>(dg_.stride(0));
    p.aligned &= p.dg_stride % 8 == 0 && starts_aligned(p.dg);
    p.dh = dh.mutable_data_ptr();
    p.dweight = dweight.mutable_data_ptr();
    if (p.bias != nullptr) p.dbias = dbias.mutable_data_ptr();
    p.streams = gate_projection_streams(p, multiprocessors_of(h_.device()));
    const auto options = h_.options().dtype(at::kFloat);
    const at::Tensor parts = at::empty({p.streams, p.width * (p.rank + 1)}, options);
    p.parts = parts.mutable_data_ptr<float>();
    at::Tensor dh_parts;
    const int64_t blocks = gate_column_blocks(p.width);
    if (blocks > 1) {
      dh_parts = at::empty({blocks, p.rows, p.rank}, options);
      p.dh_parts = dh_parts.mutable_data_ptr<float>();
    }
    gate_projection_backward(p, stream_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  static bool starts_at_pair(const void* data) {
    return reinterpret_cast<uintptr_t>(data) % 4 == 0;
  }

  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  at::Tensor h_, weight_, bias_, dg_;
};

bool has_kernel(const at::Tensor& h, const at::Tensor& weight) {
  const bool dtype = h.scalar_type() == at::kBFloat16 || h.scalar_type() == at::kHalf;
  return dtype && h.size(-1) <= kMostGateRank && h.numel() / h.size(-1) <= kMostGateRows &&
         weight.size(0) <= kMostGateRows;
}

at::Tensor composed_fwd(const at::Tensor& h, const at::Tensor& weight, const OptionalTensor& bias,
                        double normalizer, std::optional<double> clamp_min) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor z = at::linear(h, weight, bias).to(at::toOpMathType(h.scalar_type()));
  at::Tensor g = at::log_sigmoid(z).div_(normalizer);
  if (clamp_min.has_value()) g = g.clamp_min_(*clamp_min);
  return g.to(h.scalar_type());
}

GateProjectionBackwardOutputs composed_bwd(const at::Tensor& dg, const at::Tensor& h,
                                           const at::Tensor& weight, const OptionalTensor& bias,
                                           double normalizer, std::optional<double> clamp_min) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::Tensor rows = as_matrix(h);
  const at::Tensor z = at::linear(rows, weight, bias).to(at::toOpMathType(h.scalar_type()));
  const at::Tensor d = z.neg().sigmoid_().div_(normalizer);
  if (clamp_min.has_value()) d.masked_fill_(at::log_sigmoid(z).div_(normalizer).lt(*clamp_min), 0);
  const at::Tensor dz = d.mul_(dg.reshape(d.sizes())).to(h.scalar_type());
  const at::Tensor dbias = given(bias) ? dz.sum(0) : at::empty({0}, weight.options());
  return {dz.mm(weight).reshape(h.sizes()), dz.t().mm(rows), dbias};
}

at::Tensor gate_projection_fwd_cuda(const at::Tensor& h, const at::Tensor& weight,
                                    const OptionalTensor& bias, double normalizer,
                                    std::optional<double> clamp_min) {
  check_gate_projection_fwd(h, weight, bias, normalizer);
  if (!has_kernel(h, weight)) return composed_fwd(h, weight, bias, normalizer, clamp_min);
  GateProjectionLaunch launch("gate_projection", h, weight, bias, normalizer, clamp_min);
  auto sizes = h.sizes().vec();
  sizes.back() = weight.size(0);
  at::Tensor g = at::empty(sizes, h.options());
  if (g.numel() > 0) launch.forward(g);
  return g;
}

GateProjectionBackwardOutputs gate_projection_bwd_cuda(const at::Tensor& dg, const at::Tensor& h,
                                                       const at::Tensor& weight,
                                                       const OptionalTensor& bias,
                                                       double normalizer,
                                                       std::optional<double> clamp_min) {
  check_gate_projection_bwd(dg, h, weight, bias, normalizer);
  if (!has_kernel(h, weight)) return composed_bwd(dg, h, weight, bias, normalizer, clamp_min);
  GateProjectionLaunch launch("gate_projection_bwd", h, weight, bias, normalizer, clamp_min);
  const int64_t of_bias = given(bias) ? weight.size(0) : 0;
  at::Tensor dh = at::empty(h.sizes(), h.options());
  if (h.numel() == 0)
    return {dh, at::zeros(weight.sizes(), weight.options()),
            at::zeros({of_bias}, weight.options())};
  at::Tensor dweight = at::empty(weight.sizes(), weight.options());
  at::Tensor dbias = at::empty({of_bias}, weight.options());
  launch.backward(dg, dh, dweight, dbias);
  return {dh, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("gate_projection_fwd", gate_projection_fwd_cuda);
  m.impl("gate_projection_bwd", gate_projection_bwd_cuda);
}

}  // namespace gla_ext::cuda
