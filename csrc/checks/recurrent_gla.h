// The input contract of the recurrent operators, once, for every backend and for tracing.
#pragma once

#include "shape.h"

namespace gla_ext {

// The operators on a pool of states.
constexpr std::array<const char*, 3> kPoolOperators{"recurrent_gla_step_", "recurrent_gla_verify",
                                                    "recurrent_gla_commit_"};

// Tokens of a recurrent operator. Absent tensors are null.
struct RecurrentInputs {
  const char* op;
  const at::Tensor* q = nullptr;                      // [B, T, H, K]
  const at::Tensor *k = nullptr, *v = nullptr;        // [B, T, HK, K | V], HK a divisor of H
  const OptionalTensor *gk = nullptr, *gv = nullptr;  // [B, T, HK, K | V]
};

Shape check_recurrent_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const OptionalTensor& gk, const OptionalTensor& gv,
                          const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                          bool state_v_first);

Shape check_recurrent_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                          const OptionalTensor& gv, const OptionalTensor& initial_state,
                          const OptionalTensor& cu_seqlens, bool state_v_first);

// A pool of states [P, H, K, V] and what the B rows do with it; Shape::N is P. `accepted` is null
// where an operator has none.
struct PoolInputs {
  const at::Tensor& state;
  const OptionalTensor& slots;           // [B]
  const at::Tensor* accepted = nullptr;  // [B]
  bool state_v_first = false;
};
Shape check_pool(const RecurrentInputs& tokens, const PoolInputs& pool);

// For backends: a pool is read and written where it lies, so its matrices must be contiguous and,
// where they are written, apart from each other.
void check_pool_layout(const char* op, const at::Tensor& state, bool written,
                       const char* name = "state");

}  // namespace gla_ext
