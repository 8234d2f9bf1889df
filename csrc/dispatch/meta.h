#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "common/shape.h"
#include "ops.h"

namespace gla_ext {

// Results of operators while a graph is traced. Their sizes may be symbolic.
inline at::Tensor empty(c10::SymIntArrayRef sizes, const at::Tensor& like, at::ScalarType dtype) {
  return at::empty_symint(sizes,
                          like.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
}

inline at::Tensor fresh(const at::Tensor& like) {
  return empty(like.sym_sizes(), like, like.scalar_type());
}

// The output o, which has q's heads.
inline at::Tensor fresh_output(const Shape& s, const at::Tensor& v) {
  return empty({s.B, s.T, s.H, s.V}, v, v.scalar_type());
}

// The gradient of o if none has been passed: zeros [B, T, H, V].
inline at::Tensor zero_output_grad(const at::Tensor& q, const at::Tensor& v) {
  return at::zeros_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)},
                          v.options());
}

// [N, H, K, V], or [N, H, V, K] if v_first.
inline at::Tensor boundary_state(const Shape& s, const at::Tensor& like, bool v_first) {
  return v_first ? empty({s.N, s.H, s.V, s.K}, like, s.accumulate)
                 : empty({s.N, s.H, s.K, s.V}, like, s.accumulate);
}

// boundary_state, or 0 elements if it is not asked for.
inline at::Tensor boundary_state_if(bool asked_for, const Shape& s, const at::Tensor& like,
                                    bool v_first) {
  return asked_for ? boundary_state(s, like, v_first) : empty({0}, like, s.accumulate);
}

// Uninitialised gradients of q, k, v, the gates and the initial state; 0 elements if absent.
inline BackwardOutputs fresh_gradients(const Shape& s, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const OptionalTensor& g,
                                       const OptionalTensor& gv, const OptionalTensor& h0,
                                       bool v_first) {
  const auto of_gate = [&](const OptionalTensor& gate) {
    return given(gate) ? fresh(*gate) : empty({0}, q, s.accumulate);
  };
  return {fresh(q),   fresh(k),    fresh(v),
          of_gate(g), of_gate(gv), boundary_state_if(given(h0), s, q, v_first)};
}

}  // namespace gla_ext
