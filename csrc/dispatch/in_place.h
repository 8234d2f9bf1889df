// The Autograd and ADInplaceOrView kernels of operators that write to their arguments, or read a
// pool that others write to. They have no gradient: the Autograd kernel raises instead of losing
// it. The ADInplaceOrView kernel, which inference mode also calls, tells autograd that a tensor has
// been written to, as autograd may have saved it. Decoding calls some of them once per layer and
// token, so each is unboxed.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <initializer_list>
#include <type_traits>

#include "refuse.h"

namespace gla_ext {

// The Autograd kernel of any operator that has no gradient and writes nothing. instead: the
// sentence after its name in the message.
template <const char* instead>
void run_without_gradient(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_gradients(op, *stack, instead);
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

template <const char* instead>
void without_gradient(torch::Library& m, std::initializer_list<const char*> operators) {
  for (const char* name : operators)
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_without_gradient<instead>>());
}

// The error of an operator without a gradient: its name and the sentence after it.
struct Refusal {
  const char *op, *instead;
};

// Checks one argument of a call. Arguments that are not tensors pass.
template <typename T>
void refuse_gradient_of(const Refusal& refusal, const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    refuse_gradient(refusal.op, argument, refusal.instead);
  } else if constexpr (std::is_same_v<T, OptionalTensor>) {
    if (given(argument)) refuse_gradient(refusal.op, *argument, refusal.instead);
  }
}

// A call writes to the tensors that it takes as at::Tensor&.
inline void tell_if_written(at::Tensor& written) { tell_autograd(written); }
template <typename T>
void tell_if_written(const T&) {}

// The kernels of the operator that `call` runs, with its arguments.
template <auto call>
struct InPlace;

template <typename Result, typename... Args, Result (*call)(Args...)>
struct InPlace<call> {
  static constexpr bool writes = (std::is_same_v<Args, at::Tensor&> || ...);

  template <const Refusal& refusal>
  static Result refuse(Args... args) {
    refuse_transforms(refusal.op);
    (refuse_gradient_of(refusal, args), ...);
    // A call that writes goes to run_and_tell next.
    std::conditional_t<writes, at::AutoDispatchBelowAutograd, at::AutoDispatchBelowADInplaceOrView>
        below;
    return call(args...);
  }

  static Result run_and_tell(Args... args) {
    const auto run = [&] {
      at::AutoDispatchBelowADInplaceOrView below;
      return call(args...);
    };
    if constexpr (std::is_void_v<Result>) {
      run();
      (tell_if_written(args), ...);
    } else {
      Result result = run();
      (tell_if_written(args), ...);
      return result;
    }
  }
};

// Registers both kernels.
template <auto call, const Refusal& refusal>
void in_place(torch::Library& m, const char* name) {
  using c10::DispatchKey;
  m.impl(name, torch::dispatch(DispatchKey::Autograd, &InPlace<call>::template refuse<refusal>));
  if constexpr (InPlace<call>::writes)
    m.impl(name, torch::dispatch(DispatchKey::ADInplaceOrView, &InPlace<call>::run_and_tell));
}

}  // namespace gla_ext
