// A decoded token's linear maps: what they take, and the same as compositions of other operators,
// which serve on CPU, and on CUDA where their kernels do not. docs/operators.md says what each
// computes.
#pragma once

#include <torch/library.h>

#include "common/shape.h"
#include "dispatch/arguments.h"

namespace gla_ext {

// overlaps: the kernel may start before the one before it on the stream has ended, and read
// weights; nothing that may still run writes them.
struct NormLinear {
  const at::Tensor& x;
  const OptionalTensor& norm_weight;
  double eps;
  at::TensorList weights;
  bool overlaps;
};
struct NormSwiglu {
  const at::Tensor& x;
  const OptionalTensor& norm_weight;
  double eps;
  const at::Tensor &gate_weight, &up_weight;
  bool overlaps;
};
struct LinearResidual {
  const at::Tensor &x, &weight, &residual;
  bool overlaps;
};
struct NormGateLinearResidual {
  const at::Tensor& o;
  const OptionalTensor& norm_weight;
  double eps;
  const at::Tensor &gate, &weight, &residual;
  bool overlaps;
};

void check(const NormLinear& a);
void check(const NormSwiglu& a);
void check(const LinearResidual& a);
void check(const NormGateLinearResidual& a);

// The arguments were checked.
std::vector<at::Tensor> composed(const NormLinear& a);
at::Tensor composed(const NormSwiglu& a);
at::Tensor composed(const LinearResidual& a);
at::Tensor composed(const NormGateLinearResidual& a);

template <class Backend, class Arguments>
auto run_checked(const Arguments& a) {
  check(a);
  return Backend::run(a);
}

// Registers the operators from a backend, whose `run` takes the checked arguments of any of them.
template <class Backend>
void register_decode(torch::Library& m) {
  using Tensor = const at::Tensor&;
  using Optional = const OptionalTensor&;
  using Maps = std::vector<at::Tensor> (*)(Tensor, Optional, double, at::TensorList, bool);
  using Swiglu = at::Tensor (*)(Tensor, Optional, double, Tensor, Tensor, bool);
  using Residual = at::Tensor (*)(Tensor, Tensor, Tensor, bool);
  using Gated = at::Tensor (*)(Tensor, Optional, double, Tensor, Tensor, Tensor, bool);
  m.impl("norm_linear", by_arguments<Maps{}, run_checked<Backend, NormLinear>>);
  m.impl("norm_swiglu", by_arguments<Swiglu{}, run_checked<Backend, NormSwiglu>>);
  m.impl("linear_residual", by_arguments<Residual{}, run_checked<Backend, LinearResidual>>);
  m.impl("norm_gate_linear_residual",
         by_arguments<Gated{}, run_checked<Backend, NormGateLinearResidual>>);
}

}  // namespace gla_ext
