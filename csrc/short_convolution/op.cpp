// The short convolution, alone and on a pool of caches.
#include "op.h"

#include <ATen/ops/zeros_like.h>

#include "dispatch/checker.h"
#include "dispatch/differentiable.h"
#include "dispatch/in_place.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/output.h"
#include "dispatch/schema.h"

namespace gla_ext {

ConvolutionForwardOutputs short_convolution_fwd(const at::Tensor& x, const at::Tensor& weight,
                                                const OptionalTensor& bias,
                                                const OptionalTensor& cache,
                                                const OptionalTensor& cu_seqlens,
                                                bool output_state) {
  static const Op<decltype(short_convolution_fwd)> op("gla_ext::short_convolution_fwd");
  return op(x, weight, bias, cache, cu_seqlens, output_state);
}

ConvolutionBackwardOutputs short_convolution_bwd(const at::Tensor& dy, const OptionalTensor& dstate,
                                                 const at::Tensor& x, const at::Tensor& weight,
                                                 const OptionalTensor& bias,
                                                 const OptionalTensor& cache,
                                                 const OptionalTensor& cu_seqlens) {
  static const Op<decltype(short_convolution_bwd)> op("gla_ext::short_convolution_bwd");
  return op(dy, dstate, x, weight, bias, cache, cu_seqlens);
}

at::Tensor short_convolution_(const at::Tensor& x, const at::Tensor& weight,
                              const OptionalTensor& bias, at::Tensor& state,
                              const OptionalTensor& slots, const OptionalTensor& write_slots,
                              const OptionalTensor& has_initial_state,
                              const OptionalTensor& cu_seqlens) {
  static const Op<decltype(short_convolution_)> op("gla_ext::short_convolution_");
  return op(x, weight, bias, state, slots, write_slots, has_initial_state, cu_seqlens);
}

void short_convolution_out(const at::Tensor& x, const at::Tensor& weight,
                           const OptionalTensor& bias, at::Tensor& state,
                           const OptionalTensor& slots, const OptionalTensor& write_slots,
                           const OptionalTensor& has_initial_state,
                           const OptionalTensor& cu_seqlens, at::Tensor& out) {
  static const Op<decltype(short_convolution_out)> op("gla_ext::short_convolution_", "out");
  op(x, weight, bias, state, slots, write_slots, has_initial_state, cu_seqlens, out);
}

// Checks of the operators' arguments.
namespace {

constexpr const char* kPoolOp = "short_convolution_";

// Checks x and tensors of its dtype; weight and bias may have any. `of_sequences` are [N, D, W].
ConvolutionShape check_convolution(const char* op, const NamedTensors& of_tokens,
                                   const NamedTensors& of_sequences, const at::Tensor& weight,
                                   const OptionalTensor& bias, const OptionalTensor& cu_seqlens) {
  const at::Tensor& x = *of_tokens[0].second;
  const Checker check(op, "x", x);
  NamedTensors like_x = of_tokens;
  like_x.insert(like_x.end(), of_sequences.begin(), of_sequences.end());
  check.alike(like_x, {{"weight", &weight}, {"bias", where_given(bias)}});

  check.rank("x", x, 3, "[B, T, D]");
  check.rank("weight", weight, 3, "[D, 1, W]");
  ConvolutionShape shape{x.sym_size(0), x.sym_size(1), x.sym_size(2), weight.sym_size(2),
                         x.sym_size(0)};
  shape.packed = given(cu_seqlens);
  shape.accumulate = accumulate_of(x);
  check.shapes(of_tokens, "[B, T, D]", {shape.B, shape.T, shape.D});
  check.at_least_one("the last dimension", "weight", shape.W);
  check.shape("weight", weight, "[D, 1, W]", {shape.D, 1, shape.W});
  if (given(bias)) check.shape("bias", *bias, "[D]", {shape.D});
  if (shape.packed) {
    const at::Tensor& cu = *cu_seqlens;
    TORCH_CHECK_VALUE(cu.dim() == 1, op, ": expected cu_seqlens to have shape [N + 1], got ",
                      cu.sym_sizes());
    check.indices("cu_seqlens", cu, "[N + 1]");
    TORCH_CHECK_VALUE(holds(cu.sym_size(0).sym_ge(1)), op,
                      ": expected cu_seqlens to have shape [N + 1], got ", cu.sym_sizes());
    TORCH_CHECK_VALUE(holds(shape.B.sym_eq(1)), op, ": expected B to be 1 with cu_seqlens, got ",
                      shape.B);
    shape.N = cu.sym_size(0) - 1;
  }
  check.shapes(of_sequences, "[N, D, W]", {shape.N, shape.D, shape.W});
  return shape;
}

}  // namespace

ConvolutionShape check_short_convolution(const ConvolutionForwardArguments& a) {
  return check_convolution("ShortConvolution", {{"x", &a.x}}, {{"cache", where_given(a.cache)}},
                           a.weight, a.bias, a.cu_seqlens);
}

ConvolutionShape check_short_convolution(const ConvolutionBackwardArguments& a) {
  return check_convolution("short_convolution_bwd", {{"x", &a.x}, {"dy", &a.dy}},
                           {{"cache", where_given(a.cache)}, {"dstate", where_given(a.dstate)}},
                           a.weight, a.bias, a.cu_seqlens);
}

ConvolutionShape check_short_convolution(const ConvolutionPoolArguments& a) {
  const ConvolutionShape shape =
      check_convolution(kPoolOp, {{"x", &a.x}}, {}, a.weight, a.bias, a.cu_seqlens);
  const Checker check(kPoolOp, "x", a.x);
  check.like("state", a.state);
  check.rank("state", a.state, 3, "[P, D, W]");
  const c10::SymInt P = given(a.slots) ? a.state.sym_size(0) : shape.N;
  check.shape("state", a.state, "[P, D, W]", {P, shape.D, shape.W});
  const char* rows = shape.packed ? "[N]" : "[B]";
  check.indices_of("slots", a.slots, rows, shape.N);
  check.indices_of("write_slots", a.write_slots, rows, shape.N);
  check.has_initial_state(a.has_initial_state, rows, shape.N);
  if (a.out != nullptr)
    check_out(check, *a.out, a.x.scalar_type(), "[B, T, D]", {shape.B, shape.T, shape.D});
  return shape;
}

void check_convolution_pool_layouts(const ConvolutionPoolArguments& a) {
  const auto sizes = a.state.sizes(), strides = a.state.strides();
  const bool contiguous =
      (sizes[2] == 1 || strides[2] == 1) && (sizes[1] == 1 || strides[1] == sizes[2]);
  const bool apart = a.state.numel() == 0 || sizes[0] == 1 || strides[0] >= sizes[1] * sizes[2];
  TORCH_CHECK_VALUE(
      contiguous && apart, kPoolOp,
      ": expected each row of state to be contiguous and apart from the others, got sizes ", sizes,
      " with strides ", strides);
  if (a.out != nullptr)
    check_out_layout(
        kPoolOp, *a.out,
        {{"x", &a.x}, {"weight", &a.weight}, {"bias", where_given(a.bias)}, {"state", &a.state}});
}

at::Tensor with_contiguous_channels(const at::Tensor& t) {
  return t.size(2) == 1 || t.stride(2) == 1 ? t : t.contiguous();
}

TokenStrides token_strides(const at::Tensor& t) {
  return {t.size(0) == 1 ? 0 : t.stride(0), t.size(1) == 1 ? 0 : t.stride(1)};
}

namespace {

// Results of the operators while a graph is traced.
ConvolutionForwardOutputs fwd_meta(const ConvolutionForwardArguments& a) {
  const auto s = check_short_convolution(a);
  const Sizes state = a.output_state ? Sizes{s.N, s.D, s.W} : Sizes{0};
  return {fresh(a.x), empty(state, a.x, a.x.scalar_type())};
}

ConvolutionBackwardOutputs bwd_meta(const ConvolutionBackwardArguments& a) {
  check_short_convolution(a);
  const auto of = [&](const OptionalTensor& t) {
    return given(t) ? fresh(*t) : empty({0}, a.x, a.x.scalar_type());
  };
  return {fresh(a.x), fresh(a.weight), of(a.bias), of(a.cache)};
}

at::Tensor on_pool_meta(const ConvolutionPoolArguments& a) {
  check_short_convolution(a);
  return a.out == nullptr ? fresh(a.x) : at::Tensor();
}

// Saves only the inputs. A bias or a cache that is not given gets no gradient.
struct ShortConvolution {
  static constexpr const char *fwd = "short_convolution_fwd", *bwd = "short_convolution_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list&,
                              const ConvolutionForwardArguments& a) {
    save(ctx, {a.x, a.weight, a.bias, a.cache, a.cu_seqlens});
    return a.output_state ? 2 : 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &cache = saved[3];
    const at::Tensor dy = grads[0].defined() ? grads[0] : at::zeros_like(x);
    const OptionalTensor dstate = grads.size() > 1 ? or_absent(grads[1]) : std::nullopt;
    auto [dx, dweight, dbias, dcache] = short_convolution_bwd(
        dy, dstate, x, weight, or_absent(bias), or_absent(cache), or_absent(saved[4]));
    return {dx, dweight, grad_of(bias, dbias), grad_of(cache, dcache)};
  }
};

constexpr Refusal kPool{kPoolOp,
                        "decoding on a pool has no gradient, call a ShortConvolution, or run it "
                        "under torch.no_grad()"};

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "short_convolution_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? cache, Tensor? "
         "cu_seqlens, bool output_state) -> (Tensor y, Tensor state)",
         "ShortConvolution");
  define(m,
         "short_convolution_bwd(Tensor dy, Tensor? dstate, Tensor x, Tensor weight, Tensor? bias, "
         "Tensor? cache, Tensor? cu_seqlens) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor "
         "dcache)");
  define_with_out(m, "short_convolution_",
                  "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor? slots, Tensor? "
                  "write_slots, Tensor? has_initial_state, Tensor? cu_seqlens",
                  'b');
  in_place<short_convolution_, kPool>(m, "short_convolution_");
  in_place<short_convolution_out, kPool>(m, "short_convolution_.out");
  refuse_vmap(m, {"short_convolution_", "short_convolution_.out"});
  differentiable<short_convolution_fwd, short_convolution_bwd, ShortConvolution>(m);
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  register_short_convolution<fwd_meta, bwd_meta, on_pool_meta>(m);
}

}  // namespace gla_ext
