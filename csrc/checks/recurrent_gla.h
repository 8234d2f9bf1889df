// The input contract of the recurrent operators, once, for every backend and for tracing.
#pragma once

#include "common/shape.h"

namespace gla_ext {

// The operators on a pool of states.
constexpr std::array<const char*, 5> kPoolOperators{
    "recurrent_gla_step_", "recurrent_gla_step_.out", "recurrent_gla_verify",
    "recurrent_gla_verify.out", "recurrent_gla_commit_"};

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

// A pool of states [P, H, K, V], and what the N sequences do with it, each a row of the batch or a
// packed one. What an operator does not take is null.
struct PoolInputs {
  const at::Tensor& state;      // of any dtype of q, but fp64 beside fp64 alone
  const OptionalTensor& slots;  // [N]
  bool state_v_first = false;
  const OptionalTensor* write_slots = nullptr;  // [N]
  const OptionalTensor* cu_seqlens = nullptr;   // [N + 1]
  const at::Tensor* accepted = nullptr;         // [N]
  const at::Tensor* out = nullptr;              // [B, T, H, V]
};
Shape check_pool(const RecurrentInputs& tokens, const PoolInputs& pool);

// For backends: a pool is read and written where it lies, so its matrices must be contiguous and,
// where they are written, apart from each other.
void check_pool_layout(const char* op, const at::Tensor& state, bool written,
                       const char* name = "state");

// For backends: o is written where `out` lies; see output.h.
void check_out_layout(const RecurrentInputs& tokens, const PoolInputs& pool);

}  // namespace gla_ext
