#include "swiglu.h"

#include "checker.h"

namespace gla_ext {
namespace {

struct Input {
  const char* name;
  const at::Tensor& t;
};

// gate and what has its shape [..., D], and its dtype as `others` have it too.
void check_inputs(const char* op, const std::vector<Input>& like_gate,
                  const std::vector<Input>& others = {}) {
  const at::Tensor& gate = like_gate[0].t;
  const Checker check(op, "gate", gate);
  std::vector<Input> all = like_gate;
  for (const Input& in : others) all.push_back(in);
  for (const Input& in : all) check.defined(in.name, in.t);
  for (const Input& in : all) check.strided(in.name, in.t);
  for (const Input& in : all) check.device(in.name, in.t);
  check.floating("gate", gate);
  for (const Input& in : all) check.like_first(in.name, in.t, gate.scalar_type());
  TORCH_CHECK_VALUE(gate.dim() >= 1, op,
                    ": expected gate to have at least 1 dimension [..., D], got 0");
  const Sizes sizes = gate.sym_sizes().vec();
  for (const Input& in : like_gate) check.shape(in.name, in.t, "[..., D]", sizes);
}

}  // namespace

void check_swiglu_fwd(const at::Tensor& gate, const at::Tensor& up) {
  check_inputs("swiglu", {{"gate", gate}, {"up", up}});
}

void check_swiglu_bwd(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up) {
  check_inputs("swiglu_bwd", {{"gate", gate}, {"up", up}, {"dy", dy}});
}

void check_swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const OptionalTensor& bias) {
  const char* op = "swiglu_linear";
  std::vector<Input> parameters{{"weight", weight}};
  if (given(bias)) parameters.push_back({"bias", *bias});
  check_inputs(op, {{"gate", gate}, {"up", up}}, parameters);
  const Checker check(op, "gate", gate);
  check.rank("weight", weight, 2, "[N, D]");
  const c10::SymInt N = weight.sym_size(0);
  check.shape("weight", weight, "[N, D]", {N, gate.sym_size(-1)});
  if (given(bias)) check.shape("bias", *bias, "[N]", {N});
}

}  // namespace gla_ext
