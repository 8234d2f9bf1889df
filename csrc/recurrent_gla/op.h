// The recurrence: what the operators take, for every backend and for tracing.
#pragma once

#include <torch/library.h>

#include "dispatch/checker.h"

namespace gla_ext {

// Tokens of a recurrent operator. Absent tensors are null.
struct RecurrentInputs {
  const char* op;
  const at::Tensor* q = nullptr;                      // [B, T, H, K]
  const at::Tensor *k = nullptr, *v = nullptr;        // [B, T, HK, K | V], HK a divisor of H
  const OptionalTensor *gk = nullptr, *gv = nullptr;  // [B, T, HK, K | V]
};

// Shape::H is q's, or without q that of k, HK.
Shape check_tokens(const Checker& check, const RecurrentInputs& in);

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

// For backends: the pool and `out` are read and written where they lie; see dispatch/output.h.
void check_layouts(const RecurrentInputs& tokens, const PoolInputs& pool, bool write);

// The operators on a pool as the dispatcher calls them, by their arguments one by one, from a
// backend's `run`. It runs the tokens on the pool, and gives o [B, T, H, V], which nothing reads
// where there is `out`; the states after them are written where `write` says so. q is null, and o
// not computed, where tokens are only committed.
using RunRecurrence = at::Tensor (*)(const RecurrentInputs& in, const PoolInputs& pool,
                                     std::optional<double> scale, bool write);

template <RunRecurrence run>
struct RecurrentOnPool {
  static at::Tensor step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const OptionalTensor& gk, const OptionalTensor& gv, at::Tensor& state,
                         const OptionalTensor& slots, std::optional<double> scale,
                         bool state_v_first, const OptionalTensor& write_slots) {
    return run({"recurrent_gla_step_", &q, &k, &v, &gk, &gv},
               {state, slots, state_v_first, &write_slots}, scale, /*write=*/true);
  }

  static void step_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const OptionalTensor& gk, const OptionalTensor& gv, at::Tensor& state,
                       const OptionalTensor& slots, std::optional<double> scale, bool state_v_first,
                       const OptionalTensor& write_slots, at::Tensor& out) {
    run({"recurrent_gla_step_", &q, &k, &v, &gk, &gv},
        {state, slots, state_v_first, &write_slots, nullptr, nullptr, &out}, scale,
        /*write=*/true);
  }

  static at::Tensor verify(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const OptionalTensor& gk, const OptionalTensor& gv,
                           const at::Tensor& state, const OptionalTensor& slots,
                           std::optional<double> scale, bool state_v_first,
                           const OptionalTensor& cu_seqlens) {
    return run({"recurrent_gla_verify", &q, &k, &v, &gk, &gv},
               {state, slots, state_v_first, nullptr, &cu_seqlens}, scale, /*write=*/false);
  }

  static void verify_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const OptionalTensor& gk, const OptionalTensor& gv,
                         const at::Tensor& state, const OptionalTensor& slots,
                         std::optional<double> scale, bool state_v_first,
                         const OptionalTensor& cu_seqlens, at::Tensor& out) {
    run({"recurrent_gla_verify", &q, &k, &v, &gk, &gv},
        {state, slots, state_v_first, nullptr, &cu_seqlens, nullptr, &out}, scale,
        /*write=*/false);
  }

  static void commit(const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                     const OptionalTensor& gv, at::Tensor& state, const OptionalTensor& slots,
                     const at::Tensor& accepted, bool state_v_first,
                     const OptionalTensor& cu_seqlens, const OptionalTensor& write_slots) {
    run({"recurrent_gla_commit_", nullptr, &k, &v, &gk, &gv},
        {state, slots, state_v_first, &write_slots, &cu_seqlens, &accepted}, /*scale=*/1.0,
        /*write=*/true);
  }

  static void register_in(torch::Library& m) {
    m.impl("recurrent_gla_step_", step);
    m.impl("recurrent_gla_step_.out", step_out);
    m.impl("recurrent_gla_verify", verify);
    m.impl("recurrent_gla_verify.out", verify_out);
    m.impl("recurrent_gla_commit_", commit);
  }
};

}  // namespace gla_ext
