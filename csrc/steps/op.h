// The inputs of each step and their checks, for every backend and for tracing.
#pragma once

#include <torch/library.h>

#include "common/shape.h"

namespace gla_ext {

// The dtype of the chunks' states, to which products round anyway: bf16 for bf16 inputs, else the
// accumulation dtype.
inline at::ScalarType chunk_states_dtype(const at::Tensor& q) {
  if (q.scalar_type() == at::kBFloat16) return at::kBFloat16;
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The tensors of a step; those that it does not take are null. At least one of q, k, v, d_o, b or g
// is given.
struct StepTensors {
  const at::Tensor *q = nullptr, *k = nullptr, *v = nullptr, *d_o = nullptr;  // [B, T, H, K | V]
  const at::Tensor* g = nullptr;                                              // [B, T, H, K]
  const at::Tensor* b = nullptr;                                              // [B, T, H, K]
  const at::Tensor *A = nullptr, *A_diagonal = nullptr, *dA = nullptr;  // [B, T, H, C | c | C]
  const at::Tensor *dq = nullptr, *dk = nullptr, *dg = nullptr;         // [B, T, H, K], of step 6
  const at::Tensor *S = nullptr, *dS = nullptr;                         // [B, chunks, H, K, V]
  OptionalTensor initial_state, dht;
};

struct StepInputs : StepTensors {
  const char* op;
  const OptionalTensor& cu_seqlens;
  std::optional<double> scale = 1.0;
  bool state_v_first = false;

  // The first tensor that is given.
  const at::Tensor& first() const;
};
Shape check_step(const StepInputs& in);

// Raises TypeError if there is no scale. For _score_grads, whose inputs do not tell K, from which
// the default scale is computed.
void check_scale_given(const char* op, std::optional<double> scale);

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The operators as the dispatcher calls them, with positional arguments. Backend::run(inputs, f)
// checks the inputs and gives f a step of that backend, which has a function for each operator.
template <class Backend>
struct StepsOn {
  static at::Tensor gate_cumsum(const at::Tensor& g, const OptionalTensor& cu_seqlens) {
    return Backend::run({{.g = &g}, "_gate_cumsum", cu_seqlens},
                        [](auto&& step) { return step.gate_cumsum(); });
  }

  static TwoTensors chunk_states(const at::Tensor& k, const at::Tensor& v, const at::Tensor& b,
                                 const OptionalTensor& initial_state,
                                 const OptionalTensor& cu_seqlens, bool state_v_first) {
    return Backend::run({{.k = &k, .v = &v, .b = &b, .initial_state = initial_state},
                         "_chunk_states",
                         cu_seqlens,
                         1.0,
                         state_v_first},
                        [](auto&& step) { return step.chunk_states(); });
  }

  static at::Tensor scores_off_diagonal(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& b, const OptionalTensor& cu_seqlens,
                                        std::optional<double> scale) {
    return Backend::run({{.q = &q, .k = &k, .b = &b}, "_scores_off_diagonal", cu_seqlens, scale},
                        [](auto&& step) { return step.scores_off_diagonal(); });
  }

  static at::Tensor scores_diagonal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& b,
                                    const OptionalTensor& cu_seqlens, std::optional<double> scale) {
    return Backend::run({{.q = &q, .k = &k, .b = &b}, "_scores_diagonal", cu_seqlens, scale},
                        [](auto&& step) { return step.scores_diagonal(); });
  }

  static at::Tensor output(const at::Tensor& q, const at::Tensor& v, const at::Tensor& b,
                           const at::Tensor& A, const at::Tensor& A_diagonal, const at::Tensor& S,
                           const OptionalTensor& cu_seqlens, std::optional<double> scale) {
    return Backend::run({{.q = &q, .v = &v, .b = &b, .A = &A, .A_diagonal = &A_diagonal, .S = &S},
                         "_output",
                         cu_seqlens,
                         scale},
                        [](auto&& step) { return step.output(); });
  }

  static TwoTensors state_grads(const at::Tensor& q, const at::Tensor& d_o, const at::Tensor& b,
                                const OptionalTensor& dht, const OptionalTensor& cu_seqlens,
                                std::optional<double> scale, bool state_v_first) {
    return Backend::run({{.q = &q, .d_o = &d_o, .b = &b, .dht = dht},
                         "_state_grads",
                         cu_seqlens,
                         scale,
                         state_v_first},
                        [](auto&& step) { return step.state_grads(); });
  }

  static at::Tensor value_grads(const at::Tensor& k, const at::Tensor& d_o, const at::Tensor& b,
                                const at::Tensor& A, const at::Tensor& A_diagonal,
                                const at::Tensor& dS, const OptionalTensor& cu_seqlens) {
    return Backend::run(
        {{.k = &k, .d_o = &d_o, .b = &b, .A = &A, .A_diagonal = &A_diagonal, .dS = &dS},
         "_value_grads",
         cu_seqlens},
        [](auto&& step) { return step.value_grads(); });
  }

  static at::Tensor score_grads(const at::Tensor& d_o, const at::Tensor& v,
                                const OptionalTensor& cu_seqlens, std::optional<double> scale) {
    check_scale_given("_score_grads", scale);
    return Backend::run({{.v = &v, .d_o = &d_o}, "_score_grads", cu_seqlens, scale},
                        [](auto&& step) { return step.score_grads(); });
  }

  static ThreeTensors intra_grads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& b,
                                  const at::Tensor& dA, const OptionalTensor& cu_seqlens) {
    return Backend::run({{.q = &q, .k = &k, .b = &b, .dA = &dA}, "_intra_grads", cu_seqlens},
                        [](auto&& step) { return step.intra_grads(); });
  }

  static ThreeTensors merge_grads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const at::Tensor& d_o, const at::Tensor& b, const at::Tensor& S,
                                  const at::Tensor& dS, const at::Tensor& dq, const at::Tensor& dk,
                                  const at::Tensor& dg, const OptionalTensor& cu_seqlens,
                                  std::optional<double> scale) {
    return Backend::run({{.q = &q,
                          .k = &k,
                          .v = &v,
                          .d_o = &d_o,
                          .b = &b,
                          .dq = &dq,
                          .dk = &dk,
                          .dg = &dg,
                          .S = &S,
                          .dS = &dS},
                         "_merge_grads",
                         cu_seqlens,
                         scale},
                        [](auto&& step) { return step.merge_grads(); });
  }

  static void register_in(torch::Library& m) {
    m.impl("_gate_cumsum", gate_cumsum);
    m.impl("_chunk_states", chunk_states);
    m.impl("_scores_off_diagonal", scores_off_diagonal);
    m.impl("_scores_diagonal", scores_diagonal);
    m.impl("_output", output);
    m.impl("_state_grads", state_grads);
    m.impl("_value_grads", value_grads);
    m.impl("_score_grads", score_grads);
    m.impl("_intra_grads", intra_grads);
    m.impl("_merge_grads", merge_grads);
  }
};

}  // namespace gla_ext
