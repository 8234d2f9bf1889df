// The recurrence: the operators' inputs and checks, for every backend and for tracing.
#pragma once

#include <torch/library.h>

#include "dispatch/arguments.h"
#include "dispatch/tokens.h"
#include "ops.h"

namespace gla_ext {

// The arguments of the operators over sequences, described in ops.h.
struct RecurrentForwardArguments {
  const at::Tensor &q, &k, &v;
  const OptionalTensor &gk, &gv, &initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool output_final_state, reverse, state_v_first;
};

struct RecurrentBackwardArguments {
  const at::Tensor& d_o;
  const OptionalTensor& dht;
  const at::Tensor &q, &k, &v;
  const OptionalTensor &gk, &gv, &initial_state, &cu_seqlens;
  std::optional<double> scale;
  bool reverse, state_v_first;
};

Shape check_recurrent_fwd(const RecurrentForwardArguments& a);
Shape check_recurrent_bwd(const RecurrentBackwardArguments& a);

// A pool of states [P, H, K, V], and how the N sequences use it; each is a row of the batch, or
// packed. Inputs that an operator does not take are null.
struct PoolInputs {
  const at::Tensor& state;      // of any dtype that q may have; fp64 only with fp64
  const OptionalTensor& slots;  // [N]
  bool state_v_first = false;
  const OptionalTensor* write_slots = nullptr;  // [N]
  const OptionalTensor* cu_seqlens = nullptr;   // [N + 1]
  const at::Tensor* accepted = nullptr;         // [N]
  const at::Tensor* out = nullptr;              // [B, T, H, V]
};
Shape check_pool(const TokenInputs& tokens, const PoolInputs& pool);

// For backends, which read and write the pool and `out` in place; see dispatch/output.h.
void check_layouts(const TokenInputs& tokens, const PoolInputs& pool, bool write);

// The arguments of the operators on a pool.
struct RecurrentStepArguments {
  const at::Tensor &q, &k, &v;
  const OptionalTensor &gk, &gv;
  at::Tensor& state;
  const OptionalTensor& slots;
  std::optional<double> scale;
  bool state_v_first;
  const OptionalTensor& write_slots;
  Out out;
};

struct RecurrentVerifyArguments {
  const at::Tensor &q, &k, &v;
  const OptionalTensor &gk, &gv;
  const at::Tensor& state;
  const OptionalTensor& slots;
  std::optional<double> scale;
  bool state_v_first;
  const OptionalTensor& cu_seqlens;
  Out out;
};

struct RecurrentCommitArguments {
  const at::Tensor &k, &v;
  const OptionalTensor &gk, &gv;
  at::Tensor& state;
  const OptionalTensor& slots;
  const at::Tensor& accepted;
  bool state_v_first;
  const OptionalTensor &cu_seqlens, &write_slots;
};

// Makes these operators from a backend's `run`, which runs the tokens on the pool and returns o [B,
// T, H, V]. With `out`, this result is not read. If `write`, the states after the tokens are
// written. If tokens are only committed, q is null and o is not computed.
using RunRecurrence = at::Tensor (*)(const TokenInputs& in, const PoolInputs& pool,
                                     std::optional<double> scale, bool write);

template <RunRecurrence run>
struct RecurrentOnPool {
  static at::Tensor step(const RecurrentStepArguments& a) {
    return run({"recurrent_gla_step_", &a.q, &a.k, &a.v, &a.gk, &a.gv},
               {a.state, a.slots, a.state_v_first, &a.write_slots, nullptr, nullptr, a.out},
               a.scale, /*write=*/true);
  }
  static at::Tensor verify(const RecurrentVerifyArguments& a) {
    return run({"recurrent_gla_verify", &a.q, &a.k, &a.v, &a.gk, &a.gv},
               {a.state, a.slots, a.state_v_first, nullptr, &a.cu_seqlens, nullptr, a.out}, a.scale,
               /*write=*/false);
  }
  static at::Tensor commit(const RecurrentCommitArguments& a) {
    return run({"recurrent_gla_commit_", nullptr, &a.k, &a.v, &a.gk, &a.gv},
               {a.state, a.slots, a.state_v_first, &a.write_slots, &a.cu_seqlens, &a.accepted},
               /*scale=*/1.0, /*write=*/true);
  }

  static void register_in(torch::Library& m) {
    m.impl("recurrent_gla_step_", by_arguments<recurrent_gla_step_, step>);
    m.impl("recurrent_gla_step_.out", by_arguments<recurrent_gla_step_out, step>);
    m.impl("recurrent_gla_verify", by_arguments<recurrent_gla_verify, verify>);
    m.impl("recurrent_gla_verify.out", by_arguments<recurrent_gla_verify_out, verify>);
    m.impl("recurrent_gla_commit_", by_arguments<recurrent_gla_commit_, commit>);
  }
};

}  // namespace gla_ext
