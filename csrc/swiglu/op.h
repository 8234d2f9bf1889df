// The inputs of SwiGLU, for every backend and for tracing.
#pragma once

#include <torch/library.h>

#include "common/row_layout.h"
#include "common/shape.h"
#include "dispatch/meta.h"
#include "ops.h"

namespace gla_ext {

void check_swiglu_fwd(const at::Tensor& gate, const at::Tensor& up);
void check_swiglu_bwd(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up);

// The operators from a backend, which has
//   forward(op, {gate, up}, y), backward(op, {gate, up, dy}, dgate, dup, y)
// where y of backward has 0 elements unless it is asked for.
template <class Backend>
struct SwigluOn {
  static at::Tensor fwd(const at::Tensor& gate, const at::Tensor& up) {
    check_swiglu_fwd(gate, up);
    const at::Tensor y = fresh(gate);
    Backend::forward("swiglu", {gate, up}, y);
    return y;
  }

  static SwigluBackwardOutputs bwd(const at::Tensor& dy, const at::Tensor& gate,
                                   const at::Tensor& up, bool product) {
    check_swiglu_bwd(dy, gate, up);
    const at::Tensor dgate = fresh(gate), dup = fresh(gate);
    const at::Tensor y = product ? fresh(gate) : empty({0}, gate, gate.scalar_type());
    Backend::backward("swiglu_bwd", {gate, up, dy}, dgate, dup, y);
    return {dgate, dup, y};
  }

  static void register_in(torch::Library& m) {
    m.impl("swiglu_fwd", fwd);
    m.impl("swiglu_bwd", bwd);
  }
};

// The inputs of either pass as kernels take them. No tensor is empty.
template <class Problem>
Problem swiglu_problem(const RowLayout& layout) {
  Problem p;
  p.rows = layout.rows;
  p.inner_rows = layout.inner_rows;
  p.width = layout.width;
  p.gate = layout.input(0);
  p.up = layout.input(1);
  if (layout.tensors.size() > 2) p.dy = layout.input(2);
  return p;
}

}  // namespace gla_ext
