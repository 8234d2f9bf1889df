// A registered operator as a function.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

namespace gla_ext {

// Finds the schema once and calls through the dispatcher:
//   static const Op<decltype(swiglu_fwd)> op("gla_ext::swiglu_fwd");
template <typename Signature>
class Op;

template <typename Result, typename... Args>
class Op<Result(Args...)> {
 public:
  explicit Op(const char* name, const char* overload = "")
      : handle_(c10::Dispatcher::singleton()
                    .findSchemaOrThrow(name, overload)
                    .typed<Result(Args...)>()) {}

  Result operator()(Args... args) const { return handle_.call(std::forward<Args>(args)...); }

 private:
  c10::TypedOperatorHandle<Result(Args...)> handle_;
};

}  // namespace gla_ext
