// The inputs of each step and their checks, for every backend and for tracing.
#pragma once

#include <torch/library.h>

#include <tuple>
#include <type_traits>

#include "common/shape.h"
#include "dispatch/arguments.h"

namespace gla_ext {

// The dtype of the chunks' states, to which products round anyway: bf16 for bf16 inputs, else the
// accumulation dtype.
inline at::ScalarType chunk_states_dtype(const at::Tensor& q) {
  return q.scalar_type() == at::kBFloat16 ? at::kBFloat16 : accumulate_of(q);
}

// The inputs of a step; those that it does not take are null. At least one of q, k, v, d_o, b or g
// is given.
struct StepInputs {
  const char* op;
  const at::Tensor *q = nullptr, *k = nullptr, *v = nullptr, *d_o = nullptr;  // [B, T, H, K | V]
  const at::Tensor* g = nullptr;                                              // [B, T, H, K]
  const at::Tensor* b = nullptr;                                              // [B, T, H, K]
  const at::Tensor *A = nullptr, *A_diagonal = nullptr, *dA = nullptr;  // [B, T, H, C | c | C]
  const at::Tensor *dq = nullptr, *dk = nullptr, *dg = nullptr;         // [B, T, H, K], of step 6
  const at::Tensor *S = nullptr, *dS = nullptr;                         // [B, chunks, H, K, V]
  OptionalTensor initial_state, dht, cu_seqlens;
  std::optional<double> scale = 1.0;
  bool state_v_first = false;

  // The first tensor that is given.
  const at::Tensor& first() const;
};
Shape check_step(const StepInputs& in);

// A step as an operator. `input...` are the members of StepInputs in the order of its schema.
template <auto... input>
struct StepOperator {};
using In = StepInputs;

struct GateCumsum : StepOperator<&In::g, &In::cu_seqlens> {
  static constexpr auto name = "_gate_cumsum";
  static constexpr auto schema = "(Tensor g, Tensor? cu_seqlens) -> Tensor";
};

struct ChunkStates : StepOperator<&In::k, &In::v, &In::b, &In::initial_state, &In::cu_seqlens,
                                  &In::state_v_first> {
  static constexpr auto name = "_chunk_states";
  static constexpr auto schema =
      "(Tensor k, Tensor v, Tensor b, Tensor? initial_state, Tensor? cu_seqlens, bool "
      "state_v_first) -> (Tensor S, Tensor final_state)";
};

struct ScoresOffDiagonal : StepOperator<&In::q, &In::k, &In::b, &In::cu_seqlens, &In::scale> {
  static constexpr auto name = "_scores_off_diagonal";
  static constexpr auto schema =
      "(Tensor q, Tensor k, Tensor b, Tensor? cu_seqlens, float? scale) -> Tensor";
};

struct ScoresDiagonal : StepOperator<&In::q, &In::k, &In::b, &In::cu_seqlens, &In::scale> {
  static constexpr auto name = "_scores_diagonal";
  static constexpr auto schema = ScoresOffDiagonal::schema;
};

struct Output : StepOperator<&In::q, &In::v, &In::b, &In::A, &In::A_diagonal, &In::S,
                             &In::cu_seqlens, &In::scale> {
  static constexpr auto name = "_output";
  static constexpr auto schema =
      "(Tensor q, Tensor v, Tensor b, Tensor A, Tensor A_diagonal, "
      "Tensor S, Tensor? cu_seqlens, float? scale) -> Tensor";
};

struct StateGrads : StepOperator<&In::q, &In::d_o, &In::b, &In::dht, &In::cu_seqlens, &In::scale,
                                 &In::state_v_first> {
  static constexpr auto name = "_state_grads";
  static constexpr auto schema =
      "(Tensor q, Tensor do, Tensor b, Tensor? dht, Tensor? cu_seqlens, float? scale, bool "
      "state_v_first) -> (Tensor dS, Tensor dh0)";
};

struct ValueGrads
    : StepOperator<&In::k, &In::d_o, &In::b, &In::A, &In::A_diagonal, &In::dS, &In::cu_seqlens> {
  static constexpr auto name = "_value_grads";
  static constexpr auto schema =
      "(Tensor k, Tensor do, Tensor b, Tensor A, Tensor A_diagonal, "
      "Tensor dS, Tensor? cu_seqlens) -> Tensor";
};

struct ScoreGrads : StepOperator<&In::d_o, &In::v, &In::cu_seqlens, &In::scale> {
  static constexpr auto name = "_score_grads";
  static constexpr auto schema =
      "(Tensor do, Tensor v, Tensor? cu_seqlens, float? scale) -> Tensor";
};

struct IntraGrads : StepOperator<&In::q, &In::k, &In::b, &In::dA, &In::cu_seqlens> {
  static constexpr auto name = "_intra_grads";
  static constexpr auto schema =
      "(Tensor q, Tensor k, Tensor b, Tensor dA, Tensor? cu_seqlens) "
      "-> (Tensor dq, Tensor dk, Tensor dg)";
};

struct MergeGrads : StepOperator<&In::q, &In::k, &In::v, &In::d_o, &In::b, &In::S, &In::dS, &In::dq,
                                 &In::dk, &In::dg, &In::cu_seqlens, &In::scale> {
  static constexpr auto name = "_merge_grads";
  static constexpr auto schema =
      "(Tensor q, Tensor k, Tensor v, Tensor do, Tensor b, Tensor S, "
      "Tensor dS, Tensor dq, Tensor dk, Tensor dg, Tensor? cu_seqlens, "
      "float? scale) -> (Tensor dq, Tensor dk, Tensor dg)";
};

// Calls f(step) for each of them.
template <typename F>
void for_each_step(const F& f) {
  std::apply([&](auto... step) { (f(step), ...); },
             std::tuple<GateCumsum, ChunkStates, ScoresOffDiagonal, ScoresDiagonal, Output,
                        StateGrads, ValueGrads, ScoreGrads, IntraGrads, MergeGrads>());
}

// Sets a member of StepInputs to an operator's argument.
inline void set(const at::Tensor*& input, const at::Tensor& given) { input = &given; }
template <typename T>
void set(T& input, const T& given) {
  input = given;
}
template <typename T>
using AsArgument = std::conditional_t<
    std::is_same_v<T, const at::Tensor*>, const at::Tensor&,
    std::conditional_t<std::is_same_v<T, OptionalTensor>, const OptionalTensor&, T>>;

template <class Backend, class Step, auto... input>
struct StepOn {
  static auto run(
      AsArgument<std::decay_t<decltype(std::declval<StepInputs>().*input)>>... arguments) {
    StepInputs in{Step::name};
    (set(in.*input, arguments), ...);
    return Backend::run(in, Step{});
  }
};

template <class Backend, class Step, auto... input>
void register_step(torch::Library& m, Step, StepOperator<input...>) {
  m.impl(Step::name, StepOn<Backend, Step, input...>::run);
}

// The operators from a backend: Backend::run(inputs, step) checks the inputs and runs the step.
template <class Backend>
void register_steps(torch::Library& m) {
  for_each_step([&](auto step) { register_step<Backend>(m, step, step); });
}

}  // namespace gla_ext
