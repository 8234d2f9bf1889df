// What each step takes, for the checks of every backend and of tracing.
#pragma once

#include "common/shape.h"

namespace gla_ext {

// States of every chunk hold what the products round to anyway: bf16 for bf16 inputs, else the
// accumulation dtype.
inline at::ScalarType chunk_states_dtype(const at::Tensor& q) {
  if (q.scalar_type() == at::kBFloat16) return at::kBFloat16;
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The steps. Tensors a step does not take are left out; at least one of q, k, v, d_o, b or g is
// there.
struct StepInputs {
  const char* op;
  const at::Tensor *q = nullptr, *k = nullptr, *v = nullptr, *d_o = nullptr;  // [B, T, H, K | V]
  const at::Tensor* g = nullptr;                                              // [B, T, H, K]
  const at::Tensor* b = nullptr;                                              // [B, T, H, K]
  const at::Tensor *A = nullptr, *A_diagonal = nullptr, *dA = nullptr;  // [B, T, H, C | c | C]
  const at::Tensor *dq = nullptr, *dk = nullptr, *dg = nullptr;         // [B, T, H, K]
  const at::Tensor *S = nullptr, *dS = nullptr;                         // [B, chunks, H, K, V]
  OptionalTensor initial_state, dht, cu_seqlens;
  bool state_v_first = false;
};
Shape check_step(const StepInputs& in);

// For the step that has no K to take the default scale from.
void check_scale_given(const char* op, std::optional<double> scale);

inline Shape check_gate_cumsum(const at::Tensor& g, const OptionalTensor& cu_seqlens) {
  return check_step({.op = "_gate_cumsum", .g = &g, .cu_seqlens = cu_seqlens});
}

inline Shape check_chunk_states(const at::Tensor& k, const at::Tensor& v, const at::Tensor& b,
                                const OptionalTensor& initial_state,
                                const OptionalTensor& cu_seqlens, bool state_v_first) {
  return check_step({.op = "_chunk_states",
                     .k = &k,
                     .v = &v,
                     .b = &b,
                     .initial_state = initial_state,
                     .cu_seqlens = cu_seqlens,
                     .state_v_first = state_v_first});
}

// Forward steps 3 and 4.
inline Shape check_scores(const char* op, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& b, const OptionalTensor& cu_seqlens) {
  return check_step({.op = op, .q = &q, .k = &k, .b = &b, .cu_seqlens = cu_seqlens});
}

inline Shape check_output(const at::Tensor& q, const at::Tensor& v, const at::Tensor& b,
                          const at::Tensor& A, const at::Tensor& A_diagonal, const at::Tensor& S,
                          const OptionalTensor& cu_seqlens) {
  return check_step({.op = "_output",
                     .q = &q,
                     .v = &v,
                     .b = &b,
                     .A = &A,
                     .A_diagonal = &A_diagonal,
                     .S = &S,
                     .cu_seqlens = cu_seqlens});
}

inline Shape check_state_grads(const at::Tensor& q, const at::Tensor& d_o, const at::Tensor& b,
                               const OptionalTensor& dht, const OptionalTensor& cu_seqlens,
                               bool state_v_first) {
  return check_step({.op = "_state_grads",
                     .q = &q,
                     .d_o = &d_o,
                     .b = &b,
                     .dht = dht,
                     .cu_seqlens = cu_seqlens,
                     .state_v_first = state_v_first});
}

inline Shape check_value_grads(const at::Tensor& k, const at::Tensor& d_o, const at::Tensor& b,
                               const at::Tensor& A, const at::Tensor& A_diagonal,
                               const at::Tensor& dS, const OptionalTensor& cu_seqlens) {
  return check_step({.op = "_value_grads",
                     .k = &k,
                     .d_o = &d_o,
                     .b = &b,
                     .A = &A,
                     .A_diagonal = &A_diagonal,
                     .dS = &dS,
                     .cu_seqlens = cu_seqlens});
}

inline Shape check_score_grads(const at::Tensor& d_o, const at::Tensor& v,
                               const OptionalTensor& cu_seqlens, std::optional<double> scale) {
  const char* op = "_score_grads";
  check_scale_given(op, scale);
  return check_step({.op = op, .v = &v, .d_o = &d_o, .cu_seqlens = cu_seqlens});
}

inline Shape check_intra_grads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& b,
                               const at::Tensor& dA, const OptionalTensor& cu_seqlens) {
  return check_step(
      {.op = "_intra_grads", .q = &q, .k = &k, .b = &b, .dA = &dA, .cu_seqlens = cu_seqlens});
}

// dq, dk and dg are the outputs of step 6.
inline Shape check_merge_grads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& d_o, const at::Tensor& b, const at::Tensor& S,
                               const at::Tensor& dS, const at::Tensor& dq, const at::Tensor& dk,
                               const at::Tensor& dg, const OptionalTensor& cu_seqlens) {
  return check_step({.op = "_merge_grads",
                     .q = &q,
                     .k = &k,
                     .v = &v,
                     .d_o = &d_o,
                     .b = &b,
                     .dq = &dq,
                     .dk = &dk,
                     .dg = &dg,
                     .S = &S,
                     .dS = &dS,
                     .cu_seqlens = cu_seqlens});
}

}  // namespace gla_ext
