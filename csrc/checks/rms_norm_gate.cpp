#include "rms_norm_gate.h"

#include <array>
#include <utility>

#include "dispatch/checker.h"

namespace gla_ext {
namespace {

struct Input {
  const char* name;
  const at::Tensor& t;
};

// x and what has its shape and dtype; weight [V] of any dtype.
NormCall check_norm(const char* op, const std::vector<Input>& like_x, const OptionalTensor& weight,
                    std::string_view activation) {
  const at::Tensor& x = like_x[0].t;
  const Checker check(op, "x", x);
  const auto for_each = [&](auto&& f) {
    for (const Input& in : like_x) f(in);
  };
  for_each([&](const Input& in) { check.defined(in.name, in.t); });
  for_each([&](const Input& in) { check.strided(in.name, in.t); });
  if (given(weight)) check.strided("weight", *weight);
  for_each([&](const Input& in) { check.device(in.name, in.t); });
  if (given(weight)) check.device("weight", *weight);
  check.floating("x", x);
  for_each([&](const Input& in) { check.like_first(in.name, in.t, x.scalar_type()); });
  if (given(weight)) check.floating("weight", *weight);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": expected x to have at least 1 dimension [..., V], got 0");
  check.at_least_one("the last dimension", "x", x.sym_size(-1));
  const Sizes sizes = x.sym_sizes().vec();
  for_each([&](const Input& in) { check.shape(in.name, in.t, "[..., V]", sizes); });
  if (given(weight)) check.shape("weight", *weight, "[V]", {x.sym_size(-1)});
  return {activation_of(op, activation), x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat};
}

void check_rstd(const Checker& check, const at::Tensor& x, const at::Tensor& rstd,
                const NormCall& call) {
  check.defined("rstd", rstd);
  check.strided("rstd", rstd);
  check.device("rstd", rstd);
  check.dtype("rstd", rstd, call.accumulate, "");
  const auto sizes = x.sym_sizes();
  check.shape("rstd", rstd, "[...]", Sizes(sizes.begin(), sizes.end() - 1));
}

// Of x's shape, and its dtype or the one of sums.
void check_stream(const Checker& check, const char* name, const at::Tensor& t,
                  const at::Tensor& x) {
  check.defined(name, t);
  check.strided(name, t);
  check.device(name, t);
  if (x.scalar_type() == at::kDouble || t.scalar_type() != at::kFloat)
    check.like_first(name, t, x.scalar_type());
  check.shape(name, t, "[..., V]", x.sym_sizes().vec());
}

}  // namespace

Activation activation_of(const char* op, std::string_view name) {
  constexpr std::array<std::pair<std::string_view, Activation>, 7> kNames{
      {{"relu", Activation::kRelu},
       {"sigmoid", Activation::kSigmoid},
       {"logsigmoid", Activation::kLogSigmoid},
       {"silu", Activation::kSwish},
       {"swish", Activation::kSwish},
       {"sqrelu", Activation::kSquaredRelu},
       {"gelu", Activation::kGelu}}};
  std::string known;
  for (const auto& [key, activation] : kNames) {
    if (key == name) return activation;
    known.append(known.empty() ? "" : ", ").append(key);
  }
  TORCH_CHECK_VALUE(false, op, ": expected activation to be one of ", known, ", got '", name, "'");
}

NormCall check_rms_norm_gate_fwd(const at::Tensor& x, const OptionalTensor& weight,
                                 const OptionalTensor& gate, std::string_view activation) {
  std::vector<Input> like_x{{"x", x}};
  if (given(gate)) like_x.push_back({"gate", *gate});
  return check_norm("rms_norm_gate", like_x, weight, activation);
}

NormCall check_rms_norm_gate_bwd(const at::Tensor& dy, const at::Tensor& x,
                                 const OptionalTensor& weight, const OptionalTensor& gate,
                                 const at::Tensor& rstd, std::string_view activation) {
  const char* op = "rms_norm_gate_bwd";
  std::vector<Input> like_x{{"x", x}, {"dy", dy}};
  if (given(gate)) like_x.push_back({"gate", *gate});
  const NormCall call = check_norm(op, like_x, weight, activation);
  check_rstd(Checker(op, "x", x), x, rstd, call);
  return call;
}

NormCall check_rms_norm_residual_fwd(const at::Tensor& x, const at::Tensor& residual,
                                     const OptionalTensor& weight) {
  const char* op = "rms_norm_residual";
  const NormCall call = check_norm(op, {{"x", x}}, weight, "swish");
  check_stream(Checker(op, "x", x), "residual", residual, x);
  return call;
}

NormCall check_rms_norm_residual_bwd(const at::Tensor& dy, const OptionalTensor& dstream,
                                     const at::Tensor& stream, const OptionalTensor& weight,
                                     const at::Tensor& rstd) {
  const char* op = "rms_norm_residual_bwd";
  const NormCall call = check_norm(op, {{"dy", dy}}, weight, "swish");
  const Checker check(op, "dy", dy);
  check_stream(check, "stream", stream, dy);
  if (given(dstream)) {
    check_stream(check, "dstream", *dstream, dy);
    check.dtype("dstream", *dstream, stream.scalar_type(), " like stream");
  }
  check_rstd(check, dy, rstd, call);
  return call;
}

}  // namespace gla_ext
