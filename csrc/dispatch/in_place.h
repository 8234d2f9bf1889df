// The Autograd and ADInplaceOrView kernels of operators that write to their arguments, or read a
// pool that others write to. They have no gradient: the Autograd kernel raises instead of losing
// it. The ADInplaceOrView kernel, which inference mode also calls, tells autograd that a tensor has
// been written to, as autograd may have saved it. Decoding calls some of them once per layer and
// token, so each is unboxed.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "refuse.h"
#include "schema.h"

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
void define_without_gradient(torch::Library& m, const std::string& schema) {
  define(m, schema);
  m.impl(
      schema.substr(0, schema.find('(')).c_str(),
      torch::dispatch(c10::DispatchKey::Autograd,
                      torch::CppFunction::makeFromBoxedFunction<&run_without_gradient<instead>>()));
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

// A call writes to the tensors that it takes as at::Tensor&, and to an optional one if told so.
inline void tell_if_written(at::Tensor& written, bool) { tell_autograd(written); }
inline void tell_if_written(const OptionalTensor& t, bool written) {
  if (written && given(t)) tell_autograd(*t);
}
template <typename T>
void tell_if_written(const T&, bool) {}

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

  // written: the index of an optional argument that is written to.
  template <size_t written>
  static Result run_and_tell(Args... args) {
    const auto run = [&] {
      at::AutoDispatchBelowADInplaceOrView below;
      return call(args...);
    };
    size_t place = 0;
    if constexpr (std::is_void_v<Result>) {
      run();
      (tell_if_written(args, place++ == written), ...);
    } else {
      Result result = run();
      (tell_if_written(args, place++ == written), ...);
      return result;
    }
  }
};

// Registers both kernels. written: the index of an optional argument that is written to, if any.
template <auto call, const Refusal& refusal, size_t written = SIZE_MAX>
void in_place(torch::Library& m, const char* name) {
  using c10::DispatchKey;
  m.impl(name, torch::dispatch(DispatchKey::Autograd, &InPlace<call>::template refuse<refusal>));
  if constexpr (InPlace<call>::writes)
    m.impl(name, torch::dispatch(DispatchKey::ADInplaceOrView,
                                 &InPlace<call>::template run_and_tell<written>));
}

}  // namespace gla_ext
