// The input contract, once, for every backend and for tracing: sizes are symbolic and never
// branched on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <string>

#include "arguments.h"
#include "chunk.h"

namespace gla_ext {

// The ten steps, as operators.
constexpr std::array<const char*, 10> kSteps{
    "_gate_cumsum", "_chunk_states", "_scores_off_diagonal", "_scores_diagonal", "_output",
    "_state_grads", "_value_grads",  "_score_grads",         "_intra_grads",     "_merge_grads"};

// The name a user knows an operator by, for messages: "chunk_gla" for "gla_ext::chunk_gla_fwd",
// else without namespace.
std::string public_name(const std::string& schema_name);

// What every backend needs to know of a call.
struct Shape {
  c10::SymInt B, T, H, K, V;
  c10::SymInt N;       // sequences
  c10::SymInt chunks;  // of S and dS a batch row: ceil(T / C), or T / C + N when packed
  bool packed = false;
  at::ScalarType dtype = at::kFloat;       // of q, k and v
  at::ScalarType accumulate = at::kFloat;  // of states, cumsums and intermediates
};

// An optional tensor that is there and defined.
inline bool given(const OptionalTensor& t) { return t.has_value() && t->defined(); }

// States of every chunk hold what the products round to anyway: bf16 for bf16 inputs, else the
// accumulation dtype.
inline at::ScalarType chunk_states_dtype(const at::Tensor& q) {
  if (q.scalar_type() == at::kBFloat16) return at::kBFloat16;
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The default scale, K^-0.5, unless one is given.
double resolve_scale(std::optional<double> scale, int64_t K);

Shape check_chunk_gla_fwd(const ForwardArguments& a);

// Of kept_bytes, what to allocate for `kept`.
int64_t check_kept_bytes(const char* op, int64_t kept_bytes);

Shape check_chunk_gla_bwd(const BackwardArguments& a);

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

void check_defined(const char* op, const char* name, const at::Tensor& t);

// For the step that has no K to take the default scale from.
void check_scale_given(const char* op, std::optional<double> scale);

// The offsets as contiguous int64, read where that costs nothing (CPU) and checked: first 0,
// non-decreasing, last <= T.
at::Tensor checked_offsets(const char* op, const at::Tensor& cu_seqlens, int64_t T);

}  // namespace gla_ext
