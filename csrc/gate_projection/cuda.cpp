// The gate's projection on CUDA: check, allocate, launch. Calls that the kernels do not serve are
// composed of torch's operations.
#include <ATen/OpMathType.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_sigmoid.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "cuda/host/launch.h"
#include "cuda_kernels.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

// [..., D] -> [rows, D] whose last dimension is contiguous; a copy if there is no such view.
at::Tensor as_matrix(const at::Tensor& t) {
  const int64_t D = t.size(-1);
  const at::Tensor m = t.reshape({t.numel() / D, D});
  const bool fits = m.stride(0) <= std::numeric_limits<int32_t>::max();
  return fits && (D == 1 || m.stride(1) == 1) ? m : m.contiguous();
}

// The z at which logsigmoid(z) / normalizer is clamp_min: log(p / (1 - p)) with p = exp(clamp_min
// normalizer).
float clamped_below(double normalizer, std::optional<double> clamp_min) {
  if (!clamp_min.has_value()) return -std::numeric_limits<float>::infinity();
  const double log_p = *clamp_min * normalizer;
  if (log_p >= 0) return std::numeric_limits<float>::infinity();
  return static_cast<float>(log_p - std::log(-std::expm1(log_p)));
}

class GateProjectionLaunch : Launch {
 public:
  // For either pass.
  template <class Arguments>
  GateProjectionLaunch(const char* op, const Arguments& a)
      : Launch(a.h.device()), h_(as_matrix(a.h)), weight_(a.weight.contiguous()) {
    check_gpu(op, a.h.device());
    p.rows = h_.size(0), p.rank = static_cast<int>(h_.size(1)), p.width = a.weight.size(0);
    p.dtype = dtype_of(a.h.scalar_type());
    p.per_normalizer = static_cast<float>(1 / a.normalizer);
    p.clamp_min = a.clamp_min.has_value() ? static_cast<float>(*a.clamp_min)
                                          : -std::numeric_limits<float>::infinity();
    p.clamp_z = clamped_below(a.normalizer, a.clamp_min);
    p.h = h_.const_data_ptr();
    p.h_stride = static_cast<int32_t>(h_.stride(0));
    p.weight = weight_.const_data_ptr();
    if (given(a.bias)) {
      bias_ = a.bias->contiguous();
      p.bias = bias_.const_data_ptr();
    }
    p.aligned = p.rank == kMostGateRank && p.width % 8 == 0 && p.h_stride % 2 == 0 &&
                starts_at_pair(p.h) && starts_at_pair(p.weight);
  }

  GateProjection p;

  void forward(const at::Tensor& g) {
    p.g = g.mutable_data_ptr();
    launch(gate_projection_forward, p, multiprocessors());
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
    p.streams = gate_projection_streams(p, multiprocessors());
    const auto options = h_.options().dtype(at::kFloat);
    const at::Tensor parts = at::empty({p.streams, p.width * (p.rank + 1)}, options);
    p.parts = parts.mutable_data_ptr<float>();
    at::Tensor dh_parts;
    const int64_t blocks = gate_column_blocks(p.width);
    if (blocks > 1) {
      dh_parts = at::empty({blocks, p.rows, p.rank}, options);
      p.dh_parts = dh_parts.mutable_data_ptr<float>();
    }
    launch(gate_projection_backward, p);
  }

 private:
  static bool starts_at_pair(const void* data) {
    return reinterpret_cast<uintptr_t>(data) % 4 == 0;
  }

  at::Tensor h_, weight_, bias_, dg_;
};

bool has_kernel(const at::Tensor& h, const at::Tensor& weight) {
  const bool dtype = h.scalar_type() == at::kBFloat16 || h.scalar_type() == at::kHalf;
  return dtype && h.size(-1) <= kMostGateRank && h.numel() / h.size(-1) <= kMostGateRows &&
         weight.size(0) <= kMostGateRows;
}

at::Tensor composed_fwd(const GateForward& a) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = a.h.scalar_type();
  const at::Tensor z = at::linear(a.h, a.weight, a.bias).to(at::toOpMathType(dtype));
  at::Tensor g = at::log_sigmoid(z).div_(a.normalizer);
  if (a.clamp_min.has_value()) g = g.clamp_min_(*a.clamp_min);
  return g.to(dtype);
}

GateProjectionBackwardOutputs composed_bwd(const GateBackward& a) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto dtype = a.h.scalar_type();
  const at::Tensor rows = as_matrix(a.h);
  const at::Tensor z = at::linear(rows, a.weight, a.bias).to(at::toOpMathType(dtype));
  const at::Tensor d = z.neg().sigmoid_().div_(a.normalizer);
  if (a.clamp_min.has_value())
    d.masked_fill_(at::log_sigmoid(z).div_(a.normalizer).lt(*a.clamp_min), 0);
  const at::Tensor dz = d.mul_(a.dg.reshape(d.sizes())).to(dtype);
  const at::Tensor dbias = given(a.bias) ? dz.sum(0) : at::empty({0}, a.weight.options());
  return {dz.mm(a.weight).reshape(a.h.sizes()), dz.t().mm(rows), dbias};
}

at::Tensor forward(const GateForward& a) {
  check_gate_projection(a);
  if (!has_kernel(a.h, a.weight)) return composed_fwd(a);
  GateProjectionLaunch launch("gate_projection", a);
  at::Tensor g = fresh_gates(a);
  if (g.numel() > 0) launch.forward(g);
  return g;
}

GateProjectionBackwardOutputs backward(const GateBackward& a) {
  check_gate_projection(a);
  if (!has_kernel(a.h, a.weight)) return composed_bwd(a);
  GateProjectionLaunch launch("gate_projection_bwd", a);
  auto [dh, dweight, dbias] = fresh_gradients(a);
  if (a.h.numel() == 0) return {dh, dweight.zero_(), dbias.zero_()};
  launch.backward(a.dg, dh, dweight, dbias);
  return {dh, dweight, dbias};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) { register_gate_projection<forward, backward>(m); }

}  // namespace gla_ext::cuda
