// chunk_gla_ has no gradient: it says so instead of losing it. One key below, where inference mode
// passes too, it tells autograd, which may have saved the pool, that it writes to it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "arguments.h"
#include "refuse.h"

namespace gla_ext {

at::Tensor chunk_gla_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const OptionalTensor& g, const OptionalTensor& gv, at::Tensor& state,
                      const OptionalTensor& slots, const OptionalTensor& write_slots,
                      const OptionalTensor& has_initial_state, const OptionalTensor& cu_seqlens,
                      std::optional<double> scale, bool state_v_first, bool batch_invariant,
                      int64_t checkpoint_every, const OptionalTensor& checkpoints,
                      const OptionalTensor& checkpoint_slots,
                      const OptionalTensor& checkpoint_cu_starts) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("gla_ext::chunk_gla_", "")
                             .typed<decltype(chunk_gla_)>();
  return op.call(q, k, v, g, gv, state, slots, write_slots, has_initial_state, cu_seqlens, scale,
                 state_v_first, batch_invariant, checkpoint_every, checkpoints, checkpoint_slots,
                 checkpoint_cu_starts);
}

at::Tensor dispatch(const PoolArguments& a) {
  return chunk_gla_(a.q, a.k, a.v, a.g, a.gv, a.state, a.slots, a.write_slots, a.has_initial_state,
                    a.cu_seqlens, a.scale, a.state_v_first, a.batch_invariant, a.checkpoint_every,
                    a.checkpoints, a.checkpoint_slots, a.checkpoint_cu_starts);
}

namespace {

void refuse_grad(const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(!t.requires_grad(),
                              "chunk_gla_: a pool of states has no gradient, call "
                              "gla_ext.chunk_gla, or run it under torch.no_grad()");
}

at::Tensor refuse(const PoolArguments& a) {
  refuse_unsupported("chunk_gla_", {{"q", a.q}, {"k", a.k}, {"v", a.v}, {"state", a.state}},
                     {a.g, a.gv, a.checkpoints});
  if (c10::GradMode::is_enabled()) {
    for (const at::Tensor* t : {&a.q, &a.k, &a.v, static_cast<const at::Tensor*>(&a.state)})
      refuse_grad(*t);
    for (const OptionalTensor* t : {&a.g, &a.gv, &a.checkpoints})
      if (given(*t)) refuse_grad(**t);
  }
  at::AutoDispatchBelowAutograd below;
  return dispatch(a);
}

at::Tensor run_and_tell(const PoolArguments& a) {
  at::Tensor o;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    o = dispatch(a);
  }
  a.state.unsafeGetTensorImpl()->bump_version();
  if (given(a.checkpoints)) a.checkpoints->unsafeGetTensorImpl()->bump_version();
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) { m.impl("chunk_gla_", positional<refuse>); }
TORCH_LIBRARY_IMPL(gla_ext, ADInplaceOrView, m) { m.impl("chunk_gla_", positional<run_and_tell>); }

}  // namespace gla_ext
