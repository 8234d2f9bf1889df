// What no Autograd kernel of gla_ext supports, refused in a sentence, and what they share.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>

#include <initializer_list>

#include "checks/shape.h"

namespace gla_ext {

// Raises for a forward-mode tangent, a torch.func transform in progress, and inputs that are
// quantized or nested. `required` must be there.
struct Required {
  const char* name;
  const at::Tensor& tensor;
};
void refuse_unsupported(const char* op, std::initializer_list<Required> required,
                        std::initializer_list<OptionalTensor> optional);

// Raises for what is unsupported, and in grad mode where the tensor requires grad. instead: the
// sentence after the operator's name.
void refuse_gradient(const char* op, const at::Tensor& t, const char* instead);

// The same of all tensors of a call, of those of `stack`.
void refuse_gradients(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                      const char* instead);

// Tells autograd, which may have saved the tensor, that it is written to.
inline void tell_autograd(const at::Tensor& written) {
  written.unsafeGetTensorImpl()->bump_version();
}

// An optional tensor as autograd saves it, and back.
inline at::Tensor or_undefined(const OptionalTensor& t) { return t.value_or(at::Tensor()); }
inline OptionalTensor or_absent(const at::Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

// The gradient of o where none has come.
inline at::Tensor zero_output_grad(const at::Tensor& q, const at::Tensor& v) {
  return at::zeros_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)},
                          v.options());
}

}  // namespace gla_ext
