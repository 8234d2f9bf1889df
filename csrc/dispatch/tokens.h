// Checks of q, k, v and the gates, for the chunkwise operators and the recurrence.
#pragma once

#include "checker.h"

namespace gla_ext {

// Absent tensors are null.
struct TokenInputs {
  const char* op;
  const at::Tensor* q = nullptr;                      // [B, T, H, K]
  const at::Tensor *k = nullptr, *v = nullptr;        // [B, T, HK, K | V], HK a divisor of H
  const OptionalTensor *gk = nullptr, *gv = nullptr;  // [B, T, HK, K | V], gk also [B, T, HK]
  const char* key_gate = "gk";                        // its name
};

// Shape::H is the number of q's heads or, without q, of k's (HK).
Shape check_tokens(const Checker& check, const TokenInputs& in);

// Checks the gradient of the output, [B, T, H, V].
void check_output_grad(const Checker& check, const at::Tensor& d_o, const Shape& shape);

}  // namespace gla_ext
