#pragma once

#include <ATen/ops/empty.h>

#include "common/shape.h"

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

// The gradient of a gate that may be absent.
inline at::Tensor gate_grad(const OptionalTensor& g, const at::Tensor& q, const Shape& s) {
  return given(g) ? fresh(*g) : empty({0}, q, s.accumulate);
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

}  // namespace gla_ext
