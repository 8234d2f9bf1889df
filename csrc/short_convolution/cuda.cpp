// The short convolution on CUDA: check, allocate, launch.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "common/tensors.h"
#include "cuda/host/launch.h"
#include "cuda_kernels.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

// Parameters may be fp64 although inputs are shorter.
at::Tensor as_kernels_take_it(const at::Tensor& t) {
  return (t.scalar_type() == at::kDouble ? t.to(at::kFloat) : t).contiguous();
}

class ConvolutionLaunch : Launch {
 public:
  template <class Arguments>
  ConvolutionLaunch(const char* op, const ConvolutionShape& shape, const Arguments& a,
                    const OptionalTensor& cache)
      : Launch(a.x.device()) {
    const at::Tensor& x = a.x;
    check_not_fp64(op, shape.accumulate);
    check_gpu(op, x.device());
    p.B = x.size(0);
    p.T = x.size(1);
    p.D = x.size(2);
    p.W = a.weight.size(2);
    p.N = shape.N.expect_int();
    p.dtype = dtype_of(x.scalar_type());
    p.aligned = p.D % 8 == 0;
    p.x = tokens(x);
    weight_ = as_kernels_take_it(a.weight);
    p.weight = weight_.const_data_ptr();
    p.weight_dtype = dtype_of(weight_.scalar_type());
    if (given(a.bias)) {
      bias_ = as_kernels_take_it(*a.bias);
      p.bias = bias_.const_data_ptr();
      p.bias_dtype = dtype_of(bias_.scalar_type());
    }
    p.aligned &= starts_aligned(p.weight) && starts_aligned(p.bias);
    cache_ = gla_ext::contiguous(cache);
    p.cache = data_of(cache_);
    offsets_ = gla_ext::contiguous(a.cu_seqlens);
    p.cu_seqlens = indices_of(offsets_);
  }

  Convolution p;

  // x, or dy in backward.
  TokenRows tokens(const at::Tensor& t) {
    rows_.push_back(with_contiguous_channels(t));
    const TokenStrides strides = token_strides(rows_.back());
    const void* data = rows_.back().const_data_ptr();
    p.aligned &= starts_aligned(data) && strides.b % 8 == 0 && strides.t % 8 == 0;
    return {data, strides.b, strides.t};
  }

  void forward() const { launch(convolution_forward, p, multiprocessors()); }

  // Forward on a pool, whose caches the kernels read and write.
  void forward(const ConvolutionPool& pool) {
    if (takes_convolution_step(p)) return launch(convolution_step, p, pool);
    const auto options = rows_.front().options();
    const at::Tensor cache = at::empty({p.N, p.D, p.W}, options);
    const at::Tensor after = at::empty({p.N, p.D, p.W}, options);
    launch(gather_caches, p, pool, cache.mutable_data_ptr());
    p.cache = cache.const_data_ptr();
    p.state = after.mutable_data_ptr();
    if (p.N > 0 || p.T > 0) forward();
    launch(scatter_caches, p, pool);
  }

  // The gradients of weight and bias. For fp64 parameters they are fp32, as the kernels compute.
  std::tuple<at::Tensor, at::Tensor> backward() {
    const ConvolutionBackwardPlan plan = plan_convolution_backward(p, multiprocessors());
    const auto fp32 = weight_.options().dtype(at::kFloat);
    const at::Tensor partials = at::empty({plan.blocks, p.W + 1, p.D}, fp32);
    const at::Tensor dz = at::empty({plan.dz}, fp32);
    at::Tensor dweight = contiguous_like(weight_), dbias;
    p.partials = partials.mutable_data_ptr<float>();
    if (plan.dz > 0) p.dz = dz.mutable_data_ptr<float>();
    p.dweight = dweight.mutable_data_ptr();
    if (bias_.defined()) {
      dbias = contiguous_like(bias_);
      p.dbias = dbias.mutable_data_ptr();
    }
    launch(convolution_backward, p, plan);
    return {dweight, dbias};
  }

 private:
  std::vector<at::Tensor> rows_;
  at::Tensor weight_, bias_;
  OptionalTensor cache_, offsets_;
};

ConvolutionForwardOutputs short_convolution_fwd_cuda(const ConvolutionForwardArguments& a) {
  ConvolutionLaunch launch("ShortConvolution", check_short_convolution(a), a, a.cache);
  Convolution& p = launch.p;
  at::Tensor y = contiguous_like(a.x);
  at::Tensor state =
      a.output_state ? at::empty({p.N, p.D, p.W}, a.x.options()) : at::empty({0}, a.x.options());
  if (a.x.numel() == 0 && state.numel() == 0) return {y, state};
  p.y = y.mutable_data_ptr();
  if (state.numel() > 0) p.state = state.mutable_data_ptr();
  launch.forward();
  return {y, state};
}

// The kernels write y to `out` if its layout is that of a fresh tensor.
at::Tensor short_convolution_on_pool_cuda(const ConvolutionPoolArguments& a) {
  const auto shape = check_short_convolution(a);
  check_convolution_pool_layouts(a);
  ConvolutionLaunch launch("short_convolution_", shape, a, kAbsent);
  Convolution& p = launch.p;
  const bool into_out =
      a.out != nullptr && a.out->is_contiguous() && starts_aligned(a.out->const_data_ptr());
  const at::Tensor y = into_out ? *a.out : contiguous_like(a.x);
  if (p.D == 0 || (p.B == 0 && p.N == 0)) return y;
  p.y = y.mutable_data_ptr();
  ConvolutionPool pool;
  pool.state = a.state.mutable_data_ptr();
  pool.slots_in_pool = a.state.size(0);
  pool.stride = a.state.size(0) > 1 ? a.state.stride(0) : 0;
  const OptionalTensor slots = contiguous(a.slots), write_slots = contiguous(a.write_slots),
                       has_initial = contiguous(a.has_initial_state);
  pool.slots = indices_of(slots);
  pool.write_slots = indices_of(write_slots);
  pool.has_initial_state = static_cast<const bool*>(data_of(has_initial));
  launch.forward(pool);
  if (a.out != nullptr && !into_out) a.out->copy_(y);
  return y;
}

ConvolutionBackwardOutputs short_convolution_bwd_cuda(const ConvolutionBackwardArguments& a) {
  const at::Tensor &x = a.x, &weight = a.weight;
  const OptionalTensor &bias = a.bias, &cache = a.cache;
  ConvolutionLaunch launch("short_convolution_bwd", check_short_convolution(a), a, cache);
  Convolution& p = launch.p;
  const auto not_asked_for = [&] { return at::empty({0}, x.options()); };
  at::Tensor dx = contiguous_like(x);
  at::Tensor dcache = given(cache) ? contiguous_like(*cache) : not_asked_for();
  if (p.D == 0)
    return {dx, contiguous_like(weight), given(bias) ? contiguous_like(*bias) : not_asked_for(),
            dcache};
  const OptionalTensor of_state = contiguous(a.dstate);
  p.dy = launch.tokens(a.dy);
  p.dstate = data_of(of_state);
  p.dx = dx.mutable_data_ptr();
  if (dcache.numel() > 0) p.dcache = dcache.mutable_data_ptr();
  const auto [dweight, dbias] = launch.backward();
  return {dx, dweight.to(weight.scalar_type()),
          given(bias) ? dbias.to(bias->scalar_type()) : not_asked_for(), dcache};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  register_short_convolution<short_convolution_fwd_cuda, short_convolution_bwd_cuda,
                             short_convolution_on_pool_cuda>(m);
}

}  // namespace gla_ext::cuda
