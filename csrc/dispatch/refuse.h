// What no Autograd kernel of gla_ext supports, refused in a sentence, and what they share.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <type_traits>

#include "common/shape.h"

namespace gla_ext {

// The parts of refuse_unsupported: of one argument, by its place in the schema, and of the thread.
void refuse_argument(const char* schema, size_t place, const at::Tensor& t, bool required);
void refuse_transforms(const char* schema);

// Raises for arguments that are quantized or nested or have a forward-mode tangent, for required
// tensors that are not there, and for a torch.func transform in progress.
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

// What backward of a backward operator raises; `fwd` is the schema of its forward.
[[noreturn]] void refuse_double_backward(const char* fwd);

// Raises for a tensor that is unsupported, and in grad mode where it requires grad; transforms are
// asked for once a call, by refuse_transforms. instead: the sentence after the operator's name.
void refuse_gradient(const char* op, const at::Tensor& t, const char* instead);

// Both of a call whose arguments are on the stack.
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

}  // namespace gla_ext
