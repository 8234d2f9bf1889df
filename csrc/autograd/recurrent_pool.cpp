// The operators on a pool of states have no gradient: they say so instead of losing it. One key
// below, where inference mode passes too, they tell autograd, which may have saved the pool, that
// they write to it. Decoding calls them once a layer and token, so each is unboxed.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "checks/chunk_gla.h"
#include "checks/recurrent_gla.h"
#include "ops.h"
#include "refuse.h"

namespace gla_ext {
namespace {

void refuse_grad(const char* op, std::initializer_list<const at::Tensor*> tensors) {
  const bool grad_mode = c10::GradMode::is_enabled();
  for (const at::Tensor* t : tensors) {
    if (!t->defined()) continue;
    refuse_unsupported(op, *t);
    TORCH_CHECK_NOT_IMPLEMENTED(!grad_mode || !t->requires_grad(), op,
                                ": decoding on a pool has no gradient, call "
                                "gla_ext.fused_recurrent_gla, or run it under torch.no_grad()");
  }
}

void refuse_grad(const char* op, std::initializer_list<const OptionalTensor*> tensors) {
  for (const OptionalTensor* t : tensors)
    if (given(*t)) refuse_grad(op, {&**t});
}

at::Tensor step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const OptionalTensor& gk, const OptionalTensor& gv, at::Tensor& state,
                const OptionalTensor& slots, std::optional<double> scale, bool state_v_first,
                const OptionalTensor& write_slots) {
  refuse_grad("recurrent_gla_step_", {&q, &k, &v, &state});
  refuse_grad("recurrent_gla_step_", {&gk, &gv, &slots, &write_slots});
  at::AutoDispatchBelowAutograd below;
  return recurrent_gla_step_(q, k, v, gk, gv, state, slots, scale, state_v_first, write_slots);
}

void step_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              const OptionalTensor& gk, const OptionalTensor& gv, at::Tensor& state,
              const OptionalTensor& slots, std::optional<double> scale, bool state_v_first,
              const OptionalTensor& write_slots, at::Tensor& out) {
  refuse_grad("recurrent_gla_step_", {&q, &k, &v, &state, &out});
  refuse_grad("recurrent_gla_step_", {&gk, &gv, &slots, &write_slots});
  at::AutoDispatchBelowAutograd below;
  recurrent_gla_step_out(q, k, v, gk, gv, state, slots, scale, state_v_first, write_slots, out);
}

at::Tensor verify(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                  const OptionalTensor& gk, const OptionalTensor& gv, const at::Tensor& state,
                  const OptionalTensor& slots, std::optional<double> scale, bool state_v_first,
                  const OptionalTensor& cu_seqlens) {
  refuse_grad("recurrent_gla_verify", {&q, &k, &v, &state});
  refuse_grad("recurrent_gla_verify", {&gk, &gv, &slots, &cu_seqlens});
  at::AutoDispatchBelowADInplaceOrView below;
  return recurrent_gla_verify(q, k, v, gk, gv, state, slots, scale, state_v_first, cu_seqlens);
}

void verify_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                const OptionalTensor& gk, const OptionalTensor& gv, const at::Tensor& state,
                const OptionalTensor& slots, std::optional<double> scale, bool state_v_first,
                const OptionalTensor& cu_seqlens, at::Tensor& out) {
  refuse_grad("recurrent_gla_verify", {&q, &k, &v, &state, &out});
  refuse_grad("recurrent_gla_verify", {&gk, &gv, &slots, &cu_seqlens});
  at::AutoDispatchBelowAutograd below;
  recurrent_gla_verify_out(q, k, v, gk, gv, state, slots, scale, state_v_first, cu_seqlens, out);
}

void commit(const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
            const OptionalTensor& gv, at::Tensor& state, const OptionalTensor& slots,
            const at::Tensor& accepted, bool state_v_first, const OptionalTensor& cu_seqlens,
            const OptionalTensor& write_slots) {
  refuse_grad("recurrent_gla_commit_", {&k, &v, &state, &accepted});
  refuse_grad("recurrent_gla_commit_", {&gk, &gv, &slots, &cu_seqlens, &write_slots});
  at::AutoDispatchBelowAutograd below;
  recurrent_gla_commit_(k, v, gk, gv, state, slots, accepted, state_v_first, cu_seqlens,
                        write_slots);
}

at::Tensor step_and_tell(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const OptionalTensor& gk, const OptionalTensor& gv, at::Tensor& state,
                         const OptionalTensor& slots, std::optional<double> scale,
                         bool state_v_first, const OptionalTensor& write_slots) {
  at::Tensor o;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    o = recurrent_gla_step_(q, k, v, gk, gv, state, slots, scale, state_v_first, write_slots);
  }
  tell_autograd(state);
  return o;
}

void step_out_and_tell(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const OptionalTensor& gk, const OptionalTensor& gv, at::Tensor& state,
                       const OptionalTensor& slots, std::optional<double> scale, bool state_v_first,
                       const OptionalTensor& write_slots, at::Tensor& out) {
  {
    at::AutoDispatchBelowADInplaceOrView below;
    recurrent_gla_step_out(q, k, v, gk, gv, state, slots, scale, state_v_first, write_slots, out);
  }
  tell_autograd(state);
  tell_autograd(out);
}

void verify_out_and_tell(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const OptionalTensor& gk, const OptionalTensor& gv,
                         const at::Tensor& state, const OptionalTensor& slots,
                         std::optional<double> scale, bool state_v_first,
                         const OptionalTensor& cu_seqlens, at::Tensor& out) {
  {
    at::AutoDispatchBelowADInplaceOrView below;
    recurrent_gla_verify_out(q, k, v, gk, gv, state, slots, scale, state_v_first, cu_seqlens, out);
  }
  tell_autograd(out);
}

void commit_and_tell(const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                     const OptionalTensor& gv, at::Tensor& state, const OptionalTensor& slots,
                     const at::Tensor& accepted, bool state_v_first,
                     const OptionalTensor& cu_seqlens, const OptionalTensor& write_slots) {
  {
    at::AutoDispatchBelowADInplaceOrView below;
    recurrent_gla_commit_(k, v, gk, gv, state, slots, accepted, state_v_first, cu_seqlens,
                          write_slots);
  }
  tell_autograd(state);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("recurrent_gla_step_", step);
  m.impl("recurrent_gla_step_.out", step_out);
  m.impl("recurrent_gla_verify", verify);
  m.impl("recurrent_gla_verify.out", verify_out);
  m.impl("recurrent_gla_commit_", commit);
}

TORCH_LIBRARY_IMPL(gla_ext, ADInplaceOrView, m) {
  m.impl("recurrent_gla_step_", step_and_tell);
  m.impl("recurrent_gla_step_.out", step_out_and_tell);
  m.impl("recurrent_gla_verify.out", verify_out_and_tell);
  m.impl("recurrent_gla_commit_", commit_and_tell);
}

}  // namespace gla_ext
