// Passes an operator's arguments by name, in a struct with a member for each, in the order of the
// schema. A kernel that takes such a struct is registered as by_arguments<call, kernel>, where
// `call` is the operator's function in ops.h, or a null pointer of its type.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <type_traits>

namespace gla_ext {

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The tensor that the `out` form of an operator writes to; null in the other form. The last member.
struct Out {
  Out() = default;
  Out(at::Tensor& t) : tensor(&t) {}
  operator at::Tensor*() const { return tensor; }
  at::Tensor* operator->() const { return tensor; }

  at::Tensor* tensor = nullptr;
};

template <class Call, auto kernel>
struct ByArguments;

// If the operator returns nothing, the result of the kernel is dropped.
template <typename Result, typename... Args, typename Found, class Arguments,
          Found (*kernel)(const Arguments&)>
struct ByArguments<Result (*)(Args...), kernel> {
  static Result run(Args... args) { return static_cast<Result>(kernel(Arguments{args...})); }
};

template <auto call, auto kernel>
constexpr auto by_arguments = &ByArguments<decltype(call), kernel>::run;

}  // namespace gla_ext
