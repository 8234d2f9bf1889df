// The errors for what no Autograd kernel of gla_ext supports, and helpers that these kernels share.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <type_traits>

#include "common/shape.h"

namespace gla_ext {

// The parts of refuse_unsupported: the check of one argument, given its place in the schema, and
// the check for transforms.
void refuse_argument(const char* schema, size_t place, const at::Tensor& t, bool required);
void refuse_transforms(const char* schema);

// Raises for arguments that are quantized or nested or have a forward-mode tangent, for missing
// required tensors, and inside a torch.func transform.
//   schema     the operator, without namespace; messages have the name that users know it by
//   arguments  the first of the schema's, or all; those that are no tensors pass
template <typename... Args>
void refuse_unsupported(const char* schema, const Args&... arguments) {
  size_t place = 0;
  const auto refuse = [&](const auto& argument) {
    using T = std::decay_t<decltype(argument)>;
    if constexpr (std::is_same_v<T, at::Tensor>)
      refuse_argument(schema, place, argument, /*required=*/true);
    else if constexpr (std::is_same_v<T, OptionalTensor>)
      if (argument.has_value()) refuse_argument(schema, place, *argument, /*required=*/false);
    ++place;
  };
  (refuse(arguments), ...);
  refuse_transforms(schema);
}

// Raises the error for backward of a backward operator. fwd: the schema of its forward.
[[noreturn]] void refuse_double_backward(const char* fwd);

// Raises if a tensor is unsupported or, in grad mode, requires grad. Transforms are checked
// separately, once per call (refuse_transforms). instead: the sentence after the operator's name.
void refuse_gradient(const char* op, const at::Tensor& t, const char* instead);

// Both checks, for a call whose arguments are on the stack.
void refuse_gradients(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                      const char* instead);

// Tells autograd, which may have saved the tensor, that it is written to.
inline void tell_autograd(const at::Tensor& written) {
  written.unsafeGetTensorImpl()->bump_version();
}

// Converts an optional tensor to the form that autograd saves, and back.
inline at::Tensor or_undefined(const OptionalTensor& t) { return t.value_or(at::Tensor()); }
inline OptionalTensor or_absent(const at::Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

}  // namespace gla_ext
