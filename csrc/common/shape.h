// What every backend needs to know of a call: what the checks return.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

#include "chunk.h"
#include "ops.h"

namespace gla_ext {

inline const OptionalTensor kAbsent;

// An optional tensor that is there and defined.
inline bool given(const OptionalTensor& t) { return t.has_value() && t->defined(); }

// What sums of such inputs are made in.
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
