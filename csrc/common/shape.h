// The properties of a call that every backend needs; the checks return them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

#include "chunk.h"
#include "ops.h"

namespace gla_ext {

inline const OptionalTensor kAbsent;

// Whether an optional tensor is there and defined.
inline bool given(const OptionalTensor& t) { return t.has_value() && t->defined(); }

// The dtype in which sums over such inputs are accumulated.
inline at::ScalarType accumulate_of(const at::Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

struct Shape {
  c10::SymInt B, T, H, K, V;
  c10::SymInt N;       // sequences
  c10::SymInt chunks;  // of S and dS a batch row: ceil(T / C), or T / C + N when packed
  bool packed = false;
  at::ScalarType dtype = at::kFloat;       // of q, k and v
  at::ScalarType accumulate = at::kFloat;  // of states, cumsums and intermediates
};

}  // namespace gla_ext
