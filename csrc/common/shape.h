// The properties of a call that every backend needs; the checks return them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

#include "chunk.h"

namespace gla_ext {

using OptionalTensor = std::optional<at::Tensor>;

// Whether an optional tensor is there and defined.
inline bool given(const OptionalTensor& t) { return t.has_value() && t->defined(); }

struct Shape {
  c10::SymInt B, T, H, K, V;
  c10::SymInt N;       // sequences
  c10::SymInt chunks;  // of S and dS a batch row: ceil(T / C), or T / C + N when packed
  bool packed = false;
  at::ScalarType dtype = at::kFloat;       // of q, k and v
  at::ScalarType accumulate = at::kFloat;  // of states, cumsums and intermediates
};

}  // namespace gla_ext
