// chunk_gla_ has no gradient: it says so instead of losing it. One key below, where inference mode
// passes too, it tells autograd, which may have saved the pool, that it writes to it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "arguments.h"
#include "refuse.h"

namespace gla_ext {

at::Tensor dispatch(const PoolArguments& a) {
  if (a.out != nullptr) {
    chunk_gla_out(a.q, a.k, a.v, a.g, a.gv, a.state, a.slots, a.write_slots, a.has_initial_state,
                  a.cu_seqlens, a.scale, a.state_v_first, a.batch_invariant, a.checkpoint_every,
                  a.checkpoints, a.checkpoint_slots, a.checkpoint_cu_starts, *a.out);
    return *a.out;
  }
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
    if (a.out != nullptr) refuse_grad(*a.out);
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
  tell_autograd(a.state);
  if (given(a.checkpoints)) tell_autograd(*a.checkpoints);
  if (a.out != nullptr) tell_autograd(*a.out);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl("chunk_gla_", positional<refuse>);
  m.impl("chunk_gla_.out", positional_out<refuse>);
}

TORCH_LIBRARY_IMPL(gla_ext, ADInplaceOrView, m) {
  m.impl("chunk_gla_", positional<run_and_tell>);
  m.impl("chunk_gla_.out", positional_out<run_and_tell>);
}

}  // namespace gla_ext
