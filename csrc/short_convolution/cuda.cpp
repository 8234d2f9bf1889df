// The short convolution on CUDA: check, allocate, launch.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/tensors.h"
#include "cuda/host/tensors.h"
#include "cuda_kernels.h"
#include "op.h"
#include "ops.h"

namespace gla_ext::cuda {
namespace {

OptionalTensor contiguous(const OptionalTensor& t) {
  return given(t) ? OptionalTensor(t->contiguous()) : std::nullopt;
}

const void* data_of(const OptionalTensor& t) { return given(t) ? t->const_data_ptr() : nullptr; }

// Parameters may be fp64 beside shorter inputs.
at::Tensor as_kernels_take_it(const at::Tensor& t) {
  return (t.scalar_type() == at::kDouble ? t.to(at::kFloat) : t).contiguous();
}

// One call on the device and the current stream of x. Holds the copies that some inputs need.
class ConvolutionLaunch {
 public:
  ConvolutionLaunch(const char* op, const ConvolutionShape& shape, const at::Tensor& x,
                    const at::Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& cache, const OptionalTensor& cu_seqlens)
      : guard_(x.device()), stream_(c10::cuda::getCurrentCUDAStream(x.device().index())) {
    check_not_fp64(op, shape.accumulate);
    check_gpu(op, x.device());
    p.B = x.size(0);
    p.T = x.size(1);
    p.D = x.size(2);
    p.W = weight.size(2);
    p.N = shape.N.expect_int();
    p.dtype = dtype_of(x.scalar_type());
    p.aligned = p.D % 8 == 0;
    p.x = tokens(x);
    weight_ = as_kernels_take_it(weight);
    p.weight = weight_.const_data_ptr();
    p.weight_dtype = dtype_of(weight_.scalar_type());
    if (given(bias)) {
      bias_ = as_kernels_take_it(*bias);
      p.bias = bias_.const_data_ptr();
      p.bias_dtype = dtype_of(bias_.scalar_type());
    }
    p.aligned &= starts_aligned(p.weight) && starts_aligned(p.bias);
    cache_ = contiguous(cache);
    p.cache = data_of(cache_);
    if (given(cu_seqlens)) {
      offsets_ = cu_seqlens->contiguous();
      p.cu_seqlens = {offsets_.const_data_ptr(), offsets_.scalar_type() == at::kLong};
    }
  }

  Convolution p;

  // x, or dy beside it.
  TokenRows tokens(const at::Tensor& t) {
    rows_.push_back(with_contiguous_channels(t));
    const TokenStrides strides = token_strides(rows_.back());
    const void* data = rows_.back().const_data_ptr();
    p.aligned &= starts_aligned(data) && strides.b % 8 == 0 && strides.t % 8 == 0;
    return {data, strides.b, strides.t};
  }

  void forward() const {
    convolution_forward(p, multiprocessors(), stream_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // On a pool, whose caches are read and written by the kernels.
  void forward(const ConvolutionPool& pool) {
    if (takes_convolution_step(p)) {
      convolution_step(p, pool, stream_);
    } else {
      const auto options = rows_.front().options();
      const at::Tensor cache = at::empty({p.N, p.D, p.W}, options);
      const at::Tensor after = at::empty({p.N, p.D, p.W}, options);
      gather_caches(p, pool, cache.mutable_data_ptr(), stream_);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
      p.cache = cache.const_data_ptr();
      p.state = after.mutable_data_ptr();
      if (p.N > 0 || p.T > 0) forward();
      scatter_caches(p, pool, stream_);
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // The gradients of weight and bias, in fp32 where those are fp64.
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
    convolution_backward(p, plan, stream_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return {dweight, dbias};
  }

 private:
  int multiprocessors() const { return multiprocessors_of(stream_.device()); }

  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  std::vector<at::Tensor> rows_;
  at::Tensor weight_, bias_, offsets_;
  OptionalTensor cache_;
};

ConvolutionForwardOutputs short_convolution_fwd_cuda(const at::Tensor& x, const at::Tensor& weight,
                                                     const OptionalTensor& bias,
                                                     const OptionalTensor& cache,
                                                     const OptionalTensor& cu_seqlens,
                                                     bool output_state) {
  const auto shape = check_short_convolution_fwd(x, weight, bias, cache, cu_seqlens);
  ConvolutionLaunch launch("ShortConvolution", shape, x, weight, bias, cache, cu_seqlens);
  Convolution& p = launch.p;
  at::Tensor y = contiguous_like(x);
  at::Tensor state =
      output_state ? at::empty({p.N, p.D, p.W}, x.options()) : at::empty({0}, x.options());
  if (x.numel() == 0 && state.numel() == 0) return {y, state};
  p.y = y.mutable_data_ptr();
  if (state.numel() > 0) p.state = state.mutable_data_ptr();
  launch.forward();
  return {y, state};
}

// The kernels write y where the caller wants it, if that is as a fresh tensor is.
at::Tensor run_on_pool(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                       const ConvolutionPoolInputs& in) {
  const auto shape = check_short_convolution_pool(x, weight, bias, in);
  check_convolution_pool_layouts(x, weight, bias, in);
  const at::Tensor& state = in.state;
  ConvolutionLaunch launch("short_convolution_", shape, x, weight, bias, {}, in.cu_seqlens);
  Convolution& p = launch.p;
  const bool into_out =
      in.out != nullptr && in.out->is_contiguous() && starts_aligned(in.out->const_data_ptr());
  const at::Tensor y = into_out ? *in.out : contiguous_like(x);
  if (p.D == 0 || (p.B == 0 && p.N == 0)) return y;
  p.y = y.mutable_data_ptr();
  std::vector<at::Tensor> held;
  const auto indices = [&](const OptionalTensor& t) -> Indices {
    if (!given(t)) return {};
    const at::Tensor& c = held.emplace_back(t->contiguous());
    return {c.const_data_ptr(), c.scalar_type() == at::kLong};
  };
  ConvolutionPool pool;
  pool.state = state.mutable_data_ptr();
  pool.slots_in_pool = state.size(0);
  pool.stride = state.size(0) > 1 ? state.stride(0) : 0;
  pool.slots = indices(in.slots);
  pool.write_slots = indices(in.write_slots);
  if (given(in.has_initial_state))
    pool.has_initial_state =
        held.emplace_back(in.has_initial_state->contiguous()).const_data_ptr<bool>();
  launch.forward(pool);
  if (in.out != nullptr && !into_out) in.out->copy_(y);
  return y;
}

ConvolutionBackwardOutputs short_convolution_bwd_cuda(const at::Tensor& dy,
                                                      const OptionalTensor& dstate,
                                                      const at::Tensor& x, const at::Tensor& weight,
                                                      const OptionalTensor& bias,
                                                      const OptionalTensor& cache,
                                                      const OptionalTensor& cu_seqlens) {
  const auto shape = check_short_convolution_bwd(dy, dstate, x, weight, bias, cache, cu_seqlens);
  ConvolutionLaunch launch("short_convolution_bwd", shape, x, weight, bias, cache, cu_seqlens);
  Convolution& p = launch.p;
  const auto not_asked_for = [&] { return at::empty({0}, x.options()); };
  at::Tensor dx = contiguous_like(x);
  at::Tensor dcache = given(cache) ? contiguous_like(*cache) : not_asked_for();
  if (p.D == 0)
    return {dx, contiguous_like(weight), given(bias) ? contiguous_like(*bias) : not_asked_for(),
            dcache};
  const OptionalTensor of_state = contiguous(dstate);
  p.dy = launch.tokens(dy);
  p.dstate = data_of(of_state);
  p.dx = dx.mutable_data_ptr();
  if (dcache.numel() > 0) p.dcache = dcache.mutable_data_ptr();
  const auto [dweight, dbias] = launch.backward();
  return {dx, dweight.to(weight.scalar_type()),
          given(bias) ? dbias.to(bias->scalar_type()) : not_asked_for(), dcache};
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("short_convolution_fwd", short_convolution_fwd_cuda);
  m.impl("short_convolution_bwd", short_convolution_bwd_cuda);
  ConvolutionOnPool<run_on_pool>::register_in(m);
}

}  // namespace gla_ext::cuda
