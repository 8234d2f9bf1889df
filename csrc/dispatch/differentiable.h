// The Autograd kernels of operators, each from a declaration.
//
// A differentiable operator has a struct (csrc/README.md shows one) with the names of its schemas,
// `fwd` and `bwd`, and two functions, as torch.library.register_autograd takes them:
//   setup_context  Saves what backward reads. Returns how many outputs, the first ones, have a
//                  gradient. It may take the arguments as one struct.
//   backward       Returns the gradients of the first arguments, undefined if there is none. Not
//                  called if no output has received a gradient.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <utility>

#include "refuse.h"

namespace gla_ext {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Saves tensors, of which some may be absent.
inline void save(AutogradContext* ctx, std::initializer_list<OptionalTensor> tensors) {
  variable_list saved;
  for (const OptionalTensor& t : tensors) saved.push_back(or_undefined(t));
  ctx->save_for_backward(std::move(saved));
}

// The gradient of an argument that may have been absent.
inline at::Tensor grad_of(const at::Tensor& argument, const at::Tensor& grad) {
  return argument.defined() ? grad : at::Tensor();
}

// Converts an operator's result to a list, and back.
inline variable_list to_list(at::Tensor result) { return {std::move(result)}; }
template <typename... Tensors>
variable_list to_list(std::tuple<Tensors...> result) {
  return std::apply([](auto&... t) { return variable_list{std::move(t)...}; }, result);
}

template <typename Result, size_t... place>
Result from_list(const variable_list& list, std::index_sequence<place...>) {
  return {list[place]...};
}
template <typename Result>
Result from_list(const variable_list& list) {
  if constexpr (std::is_same_v<Result, at::Tensor>)
    return list[0];
  else
    return from_list<Result>(list, std::make_index_sequence<std::tuple_size_v<Result>>{});
}

// Runs the operator of `call` below autograd.
template <auto call, typename... Args>
auto below_autograd(Args&&... args) {
  at::AutoDispatchBelowADInplaceOrView below;
  return call(std::forward<Args>(args)...);
}

template <auto call, class Gradient>
struct Differentiable;

template <typename Result, typename... Args, Result (*call)(Args...), class Gradient>
struct Differentiable<call, Gradient> {
  static Result run(Args... args) {
    refuse_unsupported(Gradient::fwd, args...);
    return at::GradMode::is_enabled() ? record(args...) : below_autograd<call>(args...);
  }

  // The call in grad mode. Its arguments have already been checked.
  static Result record(Args... args) {
    variable_list rest;
    variable_list outputs = Function::apply(args..., &rest);
    outputs.insert(outputs.end(), rest.begin(), rest.end());
    return from_list<Result>(outputs);
  }

 private:
  struct Function : torch::autograd::Function<Function> {
    static constexpr bool is_traceable = true;

    // rest: the outputs without a gradient. They go around the Function: compiled autograd refuses
    // a node that has marked outputs as non-differentiable.
    static variable_list forward(AutogradContext* ctx, Args... args, variable_list* rest) {
      variable_list outputs = to_list(below_autograd<call>(args...));
      const size_t differentiable = set_up(ctx, outputs, args...);
      ctx->set_materialize_grads(false);
      rest->assign(outputs.begin() + differentiable, outputs.end());
      outputs.resize(differentiable);
      return outputs;
    }

    static size_t set_up(AutogradContext* ctx, const variable_list& outputs, Args... args) {
      using Setup = decltype(Gradient::setup_context);
      if constexpr (std::is_invocable_v<Setup, AutogradContext*, const variable_list&, Args...>)
        return Gradient::setup_context(ctx, outputs, args...);
      else
        return Gradient::setup_context(ctx, outputs, {args...});
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
      variable_list found;
      const auto has_come = [](const at::Tensor& grad) { return grad.defined(); };
      if (std::any_of(grads.begin(), grads.end(), has_come)) found = Gradient::backward(ctx, grads);
      found.resize(sizeof...(Args) + 1);
      return found;
    }
  };
};

// A backward operator: its results have no gradient.
template <auto call, class Gradient>
struct DifferentiableOnce;

template <typename Result, typename... Args, Result (*call)(Args...), class Gradient>
struct DifferentiableOnce<call, Gradient> {
  static Result run(Args... args) {
    refuse_unsupported(Gradient::bwd, args...);
    return at::GradMode::is_enabled() ? record(args...) : below_autograd<call>(args...);
  }

  // The call in grad mode, of arguments that were looked at.
  static Result record(Args... args) { return from_list<Result>(Function::apply(args...)); }

 private:
  struct Function : torch::autograd::Function<Function> {
    static constexpr bool is_traceable = true;

    static variable_list forward(AutogradContext*, Args... args) {
      return to_list(below_autograd<call>(args...));
    }

    static variable_list backward(AutogradContext*, const variable_list&) {
      refuse_double_backward(Gradient::fwd);
    }
  };
};

// Registers the Autograd kernels of an operator and of its backward operator.
template <auto fwd, auto bwd, class Gradient>
void differentiable(torch::Library& m) {
  using torch::dispatch, c10::DispatchKey;
  m.impl(Gradient::fwd, dispatch(DispatchKey::Autograd, &Differentiable<fwd, Gradient>::run));
  m.impl(Gradient::bwd, dispatch(DispatchKey::Autograd, &DifferentiableOnce<bwd, Gradient>::run));
}

}  // namespace gla_ext
