// Cross entropy of a linear map of x, some rows at a time, with the gradients of the sum in the
// same pass: products are torch's, so that this is the same on every device.
//
//   logits = x_c Wᵀ + b      loss += Σ cross_entropy(logits)      logits <- d loss / d logits
//   dx_c = dlogits W         dW += dlogitsᵀ x_c                   db += Σ dlogits
//
// dW and db are summed in fp32 (fp64 for fp64 inputs).
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "dispatch/autocast.h"
#include "dispatch/checker.h"
#include "dispatch/differentiable.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"
#include "op.h"

namespace gla_ext {

LinearCrossEntropyOutputs linear_cross_entropy_fwd(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  static const Op<decltype(linear_cross_entropy_fwd)> op("gla_ext::linear_cross_entropy_fwd");
  return op(x, weight, bias, target, ignore_index, label_smoothing, logit_scale, logit_softcapping,
            num_chunks, with_dx, with_dweight);
}

namespace {

// What it takes.
void check_linear_cross_entropy(const at::Tensor& x, const at::Tensor& weight,
                                const OptionalTensor& bias, const at::Tensor& target,
                                const CrossEntropyArguments& options, int64_t num_chunks) {
  const char* op = "linear_cross_entropy";
  const Checker check(op, "x", x);
  std::vector<std::pair<const char*, const at::Tensor*>> parameters{{"weight", &weight}};
  if (given(bias)) parameters.push_back({"bias", &*bias});
  check.strided("x", x);
  check.floating("x", x);
  for (const auto& [name, t] : parameters) {
    check.defined(name, *t);
    check.strided(name, *t);
    check.device(name, *t);
    check.like_first(name, *t, x.scalar_type());
  }
  check.defined("target", target);
  check.rank("x", x, 2, "[N, D]");
  check.rank("weight", weight, 2, "[V, D]");
  const c10::SymInt N = x.sym_size(0), V = weight.sym_size(0);
  check.shape("weight", weight, "[V, D]", {V, x.sym_size(1)});
  check.at_least_one("the first dimension", "weight", V);
  if (given(bias)) check.shape("bias", *bias, "[V]", {V});
  check.indices("target", target, "[N]");
  check.shape("target", target, "[N]", {N});
  TORCH_CHECK_VALUE(num_chunks >= 1, op, ": expected num_chunks to be at least 1, got ",
                    num_chunks);
  options.checked(op);
}

// As many rows as make num_chunks parts of x, in fewer where logits are not much wider than x.
int64_t rows_of_chunk(int64_t N, int64_t D, int64_t V, int64_t num_chunks) {
  const int64_t chunks = std::min(num_chunks, (V + D - 1) / std::max<int64_t>(D, 1));
  return std::max<int64_t>(1, (N + chunks - 1) / chunks);
}

// sum += aᵀ b in the dtype of sum, which may be fp32 of shorter a and b.
void add_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == sum.scalar_type())
    at::addmm_out(sum, sum, a.t(), b);
  else if (a.is_cuda())
    at::addmm_out(sum, sum, a.t(), b, sum.scalar_type());
  else  // torch has no such product on other devices
    at::addmm_out(sum, sum, a.t().to(sum.scalar_type()), b.to(sum.scalar_type()));
}

LinearCrossEntropyOutputs linear_cross_entropy_fwd_kernel(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  check_linear_cross_entropy(x, weight, bias, target,
                             {ignore_index, label_smoothing, logit_scale, logit_softcapping},
                             num_chunks);
  const at::ScalarType accumulate = accumulate_of(x);
  const int64_t N = x.size(0), D = x.size(1), V = weight.size(0);
  if (x.is_cpu()) check_labels("linear_cross_entropy", target, V, ignore_index);
  const auto wide = x.options().dtype(accumulate);
  at::Tensor loss = at::zeros({}, wide);
  at::Tensor dx = with_dx ? at::empty({N, D}, x.options()) : at::empty({0}, x.options());
  at::Tensor dweight = with_dweight ? at::zeros({V, D}, wide) : at::empty({0}, wide);
  at::Tensor dbias = with_dweight && given(bias) ? at::zeros({V}, wide) : at::empty({0}, wide);
  const int64_t rows = rows_of_chunk(N, D, V, num_chunks);
  for (int64_t first = 0; first < N; first += rows) {
    const int64_t count = std::min(rows, N - first);
    const at::Tensor part = x.narrow(0, first, count);
    const at::Tensor labels = target.narrow(0, first, count);
    at::Tensor logits = at::linear(part, weight, bias);
    if (!with_dx && !with_dweight) {
      loss += std::get<0>(cross_entropy_fwd(logits, labels, ignore_index, label_smoothing,
                                            logit_scale, logit_softcapping, 0, false))
                  .sum();
      continue;
    }
    loss += cross_entropy_with_grad_(logits, labels, ignore_index, label_smoothing, logit_scale,
                                     logit_softcapping, 0)
                .sum();
    if (with_dx) {
      at::Tensor of_part = dx.narrow(0, first, count);
      at::mm_out(of_part, logits, weight);
    }
    if (with_dweight) add_product(dweight, logits, part);
    if (dbias.numel() > 0) dbias += logits.sum(0, /*keepdim=*/false, accumulate);
  }
  return {loss, dx, dweight, dbias};
}

// What it returns while a graph is traced.
LinearCrossEntropyOutputs linear_cross_entropy_fwd_meta(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  check_linear_cross_entropy(x, weight, bias, target,
                             {ignore_index, label_smoothing, logit_scale, logit_softcapping},
                             num_chunks);
  const at::ScalarType wide = accumulate_of(x);
  return {empty({}, x, wide), with_dx ? fresh(x) : empty({0}, x, x.scalar_type()),
          with_dweight ? empty(weight.sym_sizes(), x, wide) : empty({0}, x, wide),
          with_dweight && given(bias) ? empty(bias->sym_sizes(), x, wide) : empty({0}, x, wide)};
}

// Under autograd: forward has made the gradients of its sum, which backward scales.
class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias, const at::Tensor& target,
                            int64_t ignore_index, double label_smoothing, double logit_scale,
                            std::optional<double> logit_softcapping, int64_t num_chunks,
                            bool with_dx, bool with_dweight) {
    auto [loss, dx, dweight, dbias] = below_autograd<linear_cross_entropy_fwd>(
        x, weight, bias, target, ignore_index, label_smoothing, logit_scale, logit_softcapping,
        num_chunks, with_dx, with_dweight);
    ctx->save_for_backward({dx, dweight, dbias});
    ctx->saved_data["dtype"] = weight.scalar_type();
    ctx->saved_data["bias"] = given(bias);
    ctx->set_materialize_grads(false);
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(11);
    const at::Tensor& dloss = grads[0];
    if (!dloss.defined()) return results;
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                                "linear_cross_entropy: double backward is not supported");
    const variable_list saved = ctx->get_saved_variables();
    const auto dtype = ctx->saved_data["dtype"].toScalarType();
    // Rounded once, in one pass.
    const auto scaled = [&](const at::Tensor& sum) {
      at::Tensor result = at::empty_symint(sum.sym_sizes(), sum.options().dtype(dtype));
      return at::mul_out(result, sum, dloss);
    };
    if (ctx->needs_input_grad(0)) results[0] = scaled(saved[0]);
    if (ctx->needs_input_grad(1)) results[1] = scaled(saved[1]);
    if (ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2)) results[2] = scaled(saved[2]);
    return results;
  }
};

LinearCrossEntropyOutputs linear_cross_entropy_fwd_autograd(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  refuse_unsupported("linear_cross_entropy_fwd", x, weight, bias, target);
  if (!at::GradMode::is_enabled())
    return below_autograd<linear_cross_entropy_fwd>(x, weight, bias, target, ignore_index,
                                                    label_smoothing, logit_scale, logit_softcapping,
                                                    num_chunks, with_dx, with_dweight);
  // Under autograd the gradients are its own, and made where they are wanted.
  const bool wants_dx = x.requires_grad();
  const bool wants_dweight = weight.requires_grad() || (given(bias) && bias->requires_grad());
  const at::Tensor loss =
      LinearCrossEntropy::apply(x, weight, bias, target, ignore_index, label_smoothing, logit_scale,
                                logit_softcapping, num_chunks, wants_dx, wants_dweight);
  const auto none = [](const at::Tensor& like, at::ScalarType dtype) {
    return at::empty({0}, like.options().dtype(dtype));
  };
  return {loss, none(x, x.scalar_type()), none(x, loss.scalar_type()), none(x, loss.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, int "
         "ignore_index, float label_smoothing, float logit_scale, float? logit_softcapping, int "
         "num_chunks, bool with_dx, bool with_dweight) -> (Tensor loss, Tensor dx, Tensor dweight, "
         "Tensor dbias)");
  autocast_first<3, linear_cross_entropy_fwd>(m, "linear_cross_entropy_fwd");
}

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("linear_cross_entropy_fwd", linear_cross_entropy_fwd_kernel);
}

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("linear_cross_entropy_fwd", linear_cross_entropy_fwd_kernel);
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl("linear_cross_entropy_fwd", linear_cross_entropy_fwd_meta);
}

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("linear_cross_entropy_fwd", linear_cross_entropy_fwd_autograd);
}

}  // namespace gla_ext
