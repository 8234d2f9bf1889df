// The linear maps of a decoded token: their arguments, and the same maps composed of other
// operators. The latter run on CPU, and on CUDA for calls that the kernels cannot run.
// csrc/decode/README.md defines what each map computes.
#pragma once

#include <torch/library.h>

#include "common/shape.h"
#include "dispatch/arguments.h"

namespace gla_ext {

// overlaps: the kernel may start, and read weights, before the previous kernel of the stream has
// ended; no kernel that may still run writes them.
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

// The arguments have already been checked.
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
