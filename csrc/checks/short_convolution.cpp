#include "short_convolution.h"

#include "dispatch/checker.h"
#include "dispatch/output.h"

namespace gla_ext {
namespace {

constexpr const char* kPoolOp = "short_convolution_";

struct Input {
  const char* name;
  const at::Tensor* t;
};

const at::Tensor* where_given(const OptionalTensor& t) { return given(t) ? &*t : nullptr; }

// x and what has its dtype; weight and bias of any dtype. `of_sequences` are [N, D, W].
ConvolutionShape check_convolution(const char* op, const std::vector<Input>& of_tokens,
                                   const std::vector<Input>& of_sequences, const at::Tensor& weight,
                                   const OptionalTensor& bias, const OptionalTensor& cu_seqlens) {
  const at::Tensor& x = *of_tokens[0].t;
  const Checker check(op, "x", x);
  std::vector<Input> like_x = of_tokens;
  for (const Input& in : of_sequences)
    if (in.t != nullptr) like_x.push_back(in);
  std::vector<Input> all = like_x;
  all.push_back({"weight", &weight});
  if (given(bias)) all.push_back({"bias", &*bias});
  for (const Input& in : all) check.defined(in.name, *in.t);
  for (const Input& in : all) check.strided(in.name, *in.t);
  for (const Input& in : all) check.device(in.name, *in.t);
  check.floating("x", x);
  for (const Input& in : like_x) check.like_first(in.name, *in.t, x.scalar_type());
  check.floating("weight", weight);
  if (given(bias)) check.floating("bias", *bias);

  check.rank("x", x, 3, "[B, T, D]");
  check.rank("weight", weight, 3, "[D, 1, W]");
  ConvolutionShape shape{x.sym_size(0), x.sym_size(1), x.sym_size(2), weight.sym_size(2),
                         x.sym_size(0)};
  shape.packed = given(cu_seqlens);
  shape.accumulate = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  for (const Input& in : of_tokens)
    check.shape(in.name, *in.t, "[B, T, D]", {shape.B, shape.T, shape.D});
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
  for (const Input& in : of_sequences)
    if (in.t != nullptr) check.shape(in.name, *in.t, "[N, D, W]", {shape.N, shape.D, shape.W});
  return shape;
}

}  // namespace

ConvolutionShape check_short_convolution_fwd(const at::Tensor& x, const at::Tensor& weight,
                                             const OptionalTensor& bias,
                                             const OptionalTensor& cache,
                                             const OptionalTensor& cu_seqlens) {
  return check_convolution("ShortConvolution", {{"x", &x}}, {{"cache", where_given(cache)}}, weight,
                           bias, cu_seqlens);
}

ConvolutionShape check_short_convolution_bwd(const at::Tensor& dy, const OptionalTensor& dstate,
                                             const at::Tensor& x, const at::Tensor& weight,
                                             const OptionalTensor& bias,
                                             const OptionalTensor& cache,
                                             const OptionalTensor& cu_seqlens) {
  return check_convolution("short_convolution_bwd", {{"x", &x}, {"dy", &dy}},
                           {{"cache", where_given(cache)}, {"dstate", where_given(dstate)}}, weight,
                           bias, cu_seqlens);
}

ConvolutionShape check_short_convolution_pool(const at::Tensor& x, const at::Tensor& weight,
                                              const OptionalTensor& bias,
                                              const ConvolutionPoolInputs& pool) {
  const ConvolutionShape shape =
      check_convolution(kPoolOp, {{"x", &x}}, {}, weight, bias, pool.cu_seqlens);
  const Checker check(kPoolOp, "x", x);
  const at::Tensor& state = pool.state;
  check.defined("state", state);
  check.strided("state", state);
  check.device("state", state);
  check.like_first("state", state, x.scalar_type());
  check.rank("state", state, 3, "[P, D, W]");
  const c10::SymInt P = given(pool.slots) ? state.sym_size(0) : shape.N;
  check.shape("state", state, "[P, D, W]", {P, shape.D, shape.W});
  const char* rows = shape.packed ? "[N]" : "[B]";
  check.indices_of("slots", pool.slots, rows, shape.N);
  check.indices_of("write_slots", pool.write_slots, rows, shape.N);
  check.has_initial_state(pool.has_initial_state, rows, shape.N);
  if (pool.out != nullptr)
    check_out(check, *pool.out, x.scalar_type(), "[B, T, D]",
              {x.sym_size(0), x.sym_size(1), x.sym_size(2)});
  return shape;
}

void check_convolution_pool_layouts(const at::Tensor& x, const at::Tensor& weight,
                                    const OptionalTensor& bias, const ConvolutionPoolInputs& pool) {
  const at::Tensor& state = pool.state;
  const auto sizes = state.sizes(), strides = state.strides();
  const bool contiguous =
      (sizes[2] == 1 || strides[2] == 1) && (sizes[1] == 1 || strides[1] == sizes[2]);
  const bool apart = state.numel() == 0 || sizes[0] == 1 || strides[0] >= sizes[1] * sizes[2];
  TORCH_CHECK_VALUE(
      contiguous && apart, kPoolOp,
      ": expected each row of state to be contiguous and apart from the others, got sizes ", sizes,
      " with strides ", strides);
  if (pool.out != nullptr)
    check_out_layout(
        kPoolOp, *pool.out,
        {{"x", &x}, {"weight", &weight}, {"bias", where_given(bias)}, {"state", &state}});
}

at::Tensor with_contiguous_channels(const at::Tensor& t) {
  return t.size(2) == 1 || t.stride(2) == 1 ? t : t.contiguous();
}

TokenStrides token_strides(const at::Tensor& t) {
  return {t.size(0) == 1 ? 0 : t.stride(0), t.size(1) == 1 ? 0 : t.stride(1)};
}

}  // namespace gla_ext
