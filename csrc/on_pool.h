// The recurrent operators on a pool of states, as the dispatcher calls them: by their arguments one
// by one. A backend gives `run`, which takes these by name, and registers the operators by it.
#pragma once

#include <torch/library.h>

#include <optional>

#include "checks/recurrent_gla.h"

namespace gla_ext {

// Runs the tokens on the pool, and gives o [B, T, H, V], which nothing reads where there is `out`;
// the states after them are written where `write` says so. q is null, and o not computed, where
// tokens are only committed.
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
