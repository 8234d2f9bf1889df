// The inputs of the gate's projection, for every backend and for tracing.
#pragma once

#include <torch/library.h>

#include "common/shape.h"
#include "dispatch/arguments.h"
#include "ops.h"

namespace gla_ext {

// The arguments, described in ops.h.
struct GateForward {
  const at::Tensor &h, &weight;
  const OptionalTensor& bias;
  double normalizer;
  std::optional<double> clamp_min;
};
struct GateBackward {
  const at::Tensor &dg, &h, &weight;
  const OptionalTensor& bias;
  double normalizer;
  std::optional<double> clamp_min;
};

void check_gate_projection(const GateForward& a);
void check_gate_projection(const GateBackward& a);

// Uninitialised results.
at::Tensor fresh_gates(const GateForward& a);
GateProjectionBackwardOutputs fresh_gradients(const GateBackward& a);

// Registers the operators from a backend's kernels.
template <auto forward, auto backward>
void register_gate_projection(torch::Library& m) {
  m.impl("gate_projection_fwd", by_arguments<gate_projection_fwd, forward>);
  m.impl("gate_projection_bwd", by_arguments<gate_projection_bwd, backward>);
}

}  // namespace gla_ext
