// Autocast casts q, k and v, whose gates and states keep their dtype, and all that the linear maps
// of SwiGLU, of cross entropy and of the gate take.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "arguments.h"

namespace gla_ext {
namespace {

// Casts what autocast casts, as long as it stands, with autocast itself off.
template <c10::DeviceType device>
class Cast {
 public:
  at::Tensor operator()(const at::Tensor& t) const {
    return at::autocast::cached_cast(dtype_, t, device);
  }
  std::optional<at::Tensor> operator()(const std::optional<at::Tensor>& t) const {
    return at::autocast::cached_cast(dtype_, t, device);
  }

 private:
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{
      at::autocast::get_autocast_dispatch_key_from_device_type(device)};
  at::ScalarType dtype_ = at::autocast::get_autocast_dtype(device);
};

template <c10::DeviceType device>
ForwardOutputs chunk_gla_fwd_autocast(const ForwardArguments& a) {
  const Cast<device> cast;
  const at::Tensor q = cast(a.q), k = cast(a.k), v = cast(a.v);
  return dispatch({q, k, v, a.g, a.gv, a.initial_state, a.cu_seqlens, a.scale, a.output_final_state,
                   a.state_v_first, a.batch_invariant, a.for_backward_bytes});
}

template <c10::DeviceType device>
at::Tensor chunk_gla_on_pool_autocast(const PoolArguments& a) {
  const Cast<device> cast;
  const at::Tensor q = cast(a.q), k = cast(a.k), v = cast(a.v);
  return dispatch({q, k, v, a.g, a.gv, a.state, a.slots, a.write_slots, a.has_initial_state,
                   a.cu_seqlens, a.scale, a.state_v_first, a.batch_invariant, a.checkpoint_every,
                   a.checkpoints, a.checkpoint_slots, a.checkpoint_cu_starts, a.out});
}

// Of operators whose first arguments are q, k and v.
template <c10::DeviceType device>
void first_three_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Cast<device> cast;
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < 3; ++i) {
    c10::IValue& t = torch::jit::peek(*stack, i, arguments);
    t = cast(t.toTensor());
  }
  op.callBoxed(stack);
}

using Optional = std::optional<at::Tensor>;

template <c10::DeviceType device>
RecurrentForwardOutputs recurrent_gla_fwd_autocast(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Optional& gk,
    const Optional& gv, const Optional& initial_state, const Optional& cu_seqlens,
    std::optional<double> scale, bool output_final_state, bool reverse, bool state_v_first) {
  const Cast<device> cast;
  return recurrent_gla_fwd(cast(q), cast(k), cast(v), gk, gv, initial_state, cu_seqlens, scale,
                           output_final_state, reverse, state_v_first);
}

template <c10::DeviceType device>
at::Tensor recurrent_gla_step_autocast(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const Optional& gk, const Optional& gv,
                                       at::Tensor& state, const Optional& slots,
                                       std::optional<double> scale, bool state_v_first,
                                       const Optional& write_slots) {
  const Cast<device> cast;
  return recurrent_gla_step_(cast(q), cast(k), cast(v), gk, gv, state, slots, scale, state_v_first,
                             write_slots);
}

template <c10::DeviceType device>
void recurrent_gla_step_out_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const Optional& gk, const Optional& gv, at::Tensor& state,
                                     const Optional& slots, std::optional<double> scale,
                                     bool state_v_first, const Optional& write_slots,
                                     at::Tensor& out) {
  const Cast<device> cast;
  recurrent_gla_step_out(cast(q), cast(k), cast(v), gk, gv, state, slots, scale, state_v_first,
                         write_slots, out);
}

template <c10::DeviceType device>
at::Tensor recurrent_gla_verify_autocast(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, const Optional& gk,
                                         const Optional& gv, const at::Tensor& state,
                                         const Optional& slots, std::optional<double> scale,
                                         bool state_v_first, const Optional& cu_seqlens) {
  const Cast<device> cast;
  return recurrent_gla_verify(cast(q), cast(k), cast(v), gk, gv, state, slots, scale, state_v_first,
                              cu_seqlens);
}

template <c10::DeviceType device>
void recurrent_gla_verify_out_autocast(const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const Optional& gk, const Optional& gv,
                                       const at::Tensor& state, const Optional& slots,
                                       std::optional<double> scale, bool state_v_first,
                                       const Optional& cu_seqlens, at::Tensor& out) {
  const Cast<device> cast;
  recurrent_gla_verify_out(cast(q), cast(k), cast(v), gk, gv, state, slots, scale, state_v_first,
                           cu_seqlens, out);
}

template <c10::DeviceType device>
void recurrent_gla_commit_autocast(const at::Tensor& k, const at::Tensor& v, const Optional& gk,
                                   const Optional& gv, at::Tensor& state, const Optional& slots,
                                   const at::Tensor& accepted, bool state_v_first,
                                   const Optional& cu_seqlens, const Optional& write_slots) {
  const Cast<device> cast;
  recurrent_gla_commit_(cast(k), cast(v), gk, gv, state, slots, accepted, state_v_first, cu_seqlens,
                        write_slots);
}

template <c10::DeviceType device>
at::Tensor swiglu_linear_autocast(const at::Tensor& gate, const at::Tensor& up,
                                  const at::Tensor& weight, const Optional& bias) {
  const Cast<device> cast;
  return swiglu_linear(cast(gate), cast(up), cast(weight), cast(bias));
}

template <c10::DeviceType device>
LinearCrossEntropyOutputs linear_cross_entropy_fwd_autocast(
    const at::Tensor& x, const at::Tensor& weight, const Optional& bias, const at::Tensor& target,
    int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight) {
  const Cast<device> cast;
  return linear_cross_entropy_fwd(cast(x), cast(weight), cast(bias), target, ignore_index,
                                  label_smoothing, logit_scale, logit_softcapping, num_chunks,
                                  with_dx, with_dweight);
}

template <c10::DeviceType device>
at::Tensor gate_projection_fwd_autocast(const at::Tensor& h, const at::Tensor& weight,
                                        const Optional& bias, double normalizer,
                                        std::optional<double> clamp_min) {
  const Cast<device> cast;
  return gate_projection_fwd(cast(h), cast(weight), cast(bias), normalizer, clamp_min);
}

template <c10::DeviceType device>
void register_all(torch::Library& m) {
  m.impl("chunk_gla_fwd", positional<chunk_gla_fwd_autocast<device>>);
  m.impl("chunk_gla_", positional<chunk_gla_on_pool_autocast<device>>);
  m.impl("chunk_gla_.out", positional_out<chunk_gla_on_pool_autocast<device>>);
  for (const char* op : {"chunk_gla_summary", "chunk_gla_apply", "chunk_gla_across_ranks"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&first_three_autocast<device>>());
  m.impl("recurrent_gla_fwd", recurrent_gla_fwd_autocast<device>);
  m.impl("recurrent_gla_step_", recurrent_gla_step_autocast<device>);
  m.impl("recurrent_gla_step_.out", recurrent_gla_step_out_autocast<device>);
  m.impl("recurrent_gla_verify", recurrent_gla_verify_autocast<device>);
  m.impl("recurrent_gla_verify.out", recurrent_gla_verify_out_autocast<device>);
  m.impl("recurrent_gla_commit_", recurrent_gla_commit_autocast<device>);
  m.impl("swiglu_linear", swiglu_linear_autocast<device>);
  m.impl("linear_cross_entropy_fwd", linear_cross_entropy_fwd_autocast<device>);
  m.impl("gate_projection_fwd", gate_projection_fwd_autocast<device>);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, AutocastCPU, m) { register_all<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(gla_ext, AutocastCUDA, m) { register_all<c10::DeviceType::CUDA>(m); }

}  // namespace gla_ext
