// Cross entropy of a linear map of x, some rows at a time, with the gradients of the sum in the
// same pass. Products are torch's, so this code is the same on every device.
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
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  static const Op<decltype(linear_cross_entropy_fwd)> op("gla_ext::linear_cross_entropy_fwd");
  return op(x, weight, bias, target, ignore_index, label_smoothing, logit_scale, logit_softcapping,
            num_chunks, with_dx, with_dweight);
}

namespace {

// Described in ops.h.
struct LinearArguments {
  const at::Tensor &x, &weight;
  const OptionalTensor& bias;
  const at::Tensor& target;
  LossOptions options;
  int64_t num_chunks;
  bool with_dx, with_dweight;
};

// Checks of the operator's arguments.
void check_linear_cross_entropy(const LinearArguments& a) {
  const char* op = "linear_cross_entropy";
  const Checker check(op, "x", a.x);
  check.strided("x", a.x);
  check.floating("x", a.x);
  check.like("weight", a.weight);
  if (given(a.bias)) check.like("bias", *a.bias);
  check.defined("target", a.target);
  check.rank("x", a.x, 2, "[N, D]");
  check.rank("weight", a.weight, 2, "[V, D]");
  const c10::SymInt N = a.x.sym_size(0), V = a.weight.sym_size(0);
  check.shape("weight", a.weight, "[V, D]", {V, a.x.sym_size(1)});
  check.at_least_one("the first dimension", "weight", V);
  if (given(a.bias)) check.shape("bias", *a.bias, "[V]", {V});
  check.indices("target", a.target, "[N]");
  check.shape("target", a.target, "[N]", {N});
  TORCH_CHECK_VALUE(a.num_chunks >= 1, op, ": expected num_chunks to be at least 1, got ",
                    a.num_chunks);
  CrossEntropyArguments{a.options}.checked(op);
}

// The number of rows with which x has num_chunks parts, or fewer if logits are not much wider than
// x.
int64_t rows_of_chunk(int64_t N, int64_t D, int64_t V, int64_t num_chunks) {
  const int64_t chunks = std::min(num_chunks, (V + D - 1) / std::max<int64_t>(D, 1));
  return std::max<int64_t>(1, (N + chunks - 1) / chunks);
}

// sum += aᵀ b in the dtype of sum, which may be fp32 although a and b are shorter.
void add_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == sum.scalar_type())
    at::addmm_out(sum, sum, a.t(), b);
  else if (a.is_cuda())
    at::addmm_out(sum, sum, a.t(), b, sum.scalar_type());
  else  // torch has no such product on other devices
    at::addmm_out(sum, sum, a.t().to(sum.scalar_type()), b.to(sum.scalar_type()));
}

LinearCrossEntropyOutputs kernel(const LinearArguments& a) {
  check_linear_cross_entropy(a);
  const at::Tensor &x = a.x, &weight = a.weight;
  const LossOptions& o = a.options;
  const at::ScalarType accumulate = accumulate_of(x);
  const int64_t N = x.size(0), D = x.size(1), V = weight.size(0);
  if (x.is_cpu()) check_labels("linear_cross_entropy", a.target, V, o.ignore_index);
  const auto wide = x.options().dtype(accumulate);
  at::Tensor loss = at::zeros({}, wide);
  at::Tensor dx = a.with_dx ? at::empty({N, D}, x.options()) : at::empty({0}, x.options());
  at::Tensor dweight = a.with_dweight ? at::zeros({V, D}, wide) : at::empty({0}, wide);
  at::Tensor dbias = a.with_dweight && given(a.bias) ? at::zeros({V}, wide) : at::empty({0}, wide);
  const int64_t rows = rows_of_chunk(N, D, V, a.num_chunks);
  for (int64_t first = 0; first < N; first += rows) {
    const int64_t count = std::min(rows, N - first);
    const at::Tensor part = x.narrow(0, first, count);
    const at::Tensor labels = a.target.narrow(0, first, count);
    at::Tensor logits = at::linear(part, weight, a.bias);
    if (!a.with_dx && !a.with_dweight) {
      loss += std::get<0>(cross_entropy_fwd(logits, labels, o.ignore_index, o.label_smoothing,
                                            o.logit_scale, o.logit_softcapping, 0, false))
                  .sum();
      continue;
    }
    loss += cross_entropy_with_grad_(logits, labels, o.ignore_index, o.label_smoothing,
                                     o.logit_scale, o.logit_softcapping, 0)
                .sum();
    if (a.with_dx) {
      at::Tensor of_part = dx.narrow(0, first, count);
      at::mm_out(of_part, logits, weight);
    }
    if (a.with_dweight) add_product(dweight, logits, part);
    if (dbias.numel() > 0) dbias += logits.sum(0, /*keepdim=*/false, accumulate);
  }
  return {loss, dx, dweight, dbias};
}

// The result while a graph is traced.
LinearCrossEntropyOutputs meta(const LinearArguments& a) {
  check_linear_cross_entropy(a);
  const at::ScalarType wide = accumulate_of(a.x);
  const auto of = [&](bool asked_for, const OptionalTensor& t) {
    return asked_for && given(t) ? empty(t->sym_sizes(), a.x, wide) : empty({0}, a.x, wide);
  };
  return {empty({}, a.x, wide), a.with_dx ? fresh(a.x) : empty({0}, a.x, a.x.scalar_type()),
          of(a.with_dweight, a.weight), of(a.with_dweight, a.bias)};
}

// Forward has computed the gradients of its sum; backward scales them.
struct LinearCrossEntropy {
  static constexpr const char* fwd = "linear_cross_entropy_fwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list& outputs,
                              const LinearArguments& a) {
    ctx->save_for_backward({/*dx=*/outputs[1], /*dweight=*/outputs[2], /*dbias=*/outputs[3]});
    ctx->saved_data["dtype"] = a.weight.scalar_type();
    ctx->saved_data["bias"] = given(a.bias);
    return 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (at::GradMode::is_enabled()) refuse_double_backward(fwd);
    const variable_list saved = ctx->get_saved_variables();
    const auto dtype = ctx->saved_data["dtype"].toScalarType();
    variable_list results(3);
    // Rounded once, in one pass.
    const auto scale = [&](size_t i) {
      if (!ctx->needs_input_grad(i)) return;
      results[i] = at::empty_symint(saved[i].sym_sizes(), saved[i].options().dtype(dtype));
      at::mul_out(results[i], saved[i], grads[0]);
    };
    scale(0);
    scale(1);
    if (ctx->saved_data["bias"].toBool()) scale(2);
    return results;
  }
};

// Under autograd the gradients are internal, and only those that are wanted are computed.
LinearCrossEntropyOutputs autograd(const LinearArguments& a) {
  refuse_unsupported(LinearCrossEntropy::fwd, a.x, a.weight, a.bias, a.target);
  const bool trains = a.weight.requires_grad() || (given(a.bias) && a.bias->requires_grad());
  const LossOptions& o = a.options;
  const auto run = [&](auto* call, bool with_dx, bool with_dweight) {
    return call(a.x, a.weight, a.bias, a.target, o.ignore_index, o.label_smoothing, o.logit_scale,
                o.logit_softcapping, a.num_chunks, with_dx, with_dweight);
  };
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return run(linear_cross_entropy_fwd, a.with_dx, a.with_dweight);
  }
  const auto record = Differentiable<linear_cross_entropy_fwd, LinearCrossEntropy>::record;
  const at::Tensor loss = std::get<0>(run(record, a.x.requires_grad(), trains));
  const auto none = [](const at::Tensor& like) { return at::empty({0}, like.options()); };
  return {loss, none(a.x), none(loss), none(loss)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, int "
         "ignore_index, float label_smoothing, float logit_scale, float? logit_softcapping, int "
         "num_chunks, bool with_dx, bool with_dweight) -> (Tensor loss, Tensor dx, Tensor dweight, "
         "Tensor dbias)");
  autocast_first<3, linear_cross_entropy_fwd>(m, "linear_cross_entropy_fwd");
  const auto impl = [&](c10::DispatchKey key, auto* function) {
    m.impl("linear_cross_entropy_fwd", torch::dispatch(key, function));
  };
  impl(c10::DispatchKey::CPU, by_arguments<linear_cross_entropy_fwd, kernel>);
  impl(c10::DispatchKey::CUDA, by_arguments<linear_cross_entropy_fwd, kernel>);
  impl(c10::DispatchKey::Meta, by_arguments<linear_cross_entropy_fwd, meta>);
  impl(c10::DispatchKey::Autograd, by_arguments<linear_cross_entropy_fwd, autograd>);
}

}  // namespace gla_ext
