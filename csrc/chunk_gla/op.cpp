// chunk_gla, forward and backward.
#include "op.h"

#include <algorithm>

#include "dispatch/autocast.h"
#include "dispatch/differentiable.h"
#include "dispatch/meta.h"
#include "dispatch/op.h"
#include "dispatch/schema.h"
#include "dispatch/tokens.h"
#include "for_backward.h"

namespace gla_ext {

ForwardOutputs chunk_gla_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const OptionalTensor& g, const OptionalTensor& gv,
                             const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                             std::optional<double> scale, bool output_final_state,
                             bool state_v_first, bool batch_invariant, int64_t for_backward_bytes) {
  static const Op<decltype(chunk_gla_fwd)> op("gla_ext::chunk_gla_fwd");
  return op(q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state, state_v_first,
            batch_invariant, for_backward_bytes);
}

ForwardOutputs dispatch(const ForwardArguments& a) {
  return chunk_gla_fwd(a.q, a.k, a.v, a.g, a.gv, a.initial_state, a.cu_seqlens, a.scale,
                       a.output_final_state, a.state_v_first, a.batch_invariant,
                       a.for_backward_bytes);
}

BackwardOutputs chunk_gla_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
                              const OptionalTensor& gv, const OptionalTensor& initial_state,
                              const OptionalTensor& cu_seqlens, std::optional<double> scale,
                              bool state_v_first, bool batch_invariant,
                              const OptionalTensor& for_backward, bool gate_gradient) {
  static const Op<decltype(chunk_gla_bwd)> op("gla_ext::chunk_gla_bwd");
  return op(d_o, dht, q, k, v, g, gv, initial_state, cu_seqlens, scale, state_v_first,
            batch_invariant, for_backward, gate_gradient);
}

BackwardOutputs dispatch(const BackwardArguments& a) {
  return chunk_gla_bwd(a.d_o, a.dht, a.q, a.k, a.v, a.g, a.gv, a.initial_state, a.cu_seqlens,
                       a.scale, a.state_v_first, a.batch_invariant, a.for_backward,
                       a.gate_gradient);
}

std::tuple<at::Tensor, OptionalTensor> chunk_gla(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
    std::optional<double> scale, const OptionalTensor& initial_state, bool output_final_state,
    bool state_v_first, const OptionalTensor& cu_seqlens, const OptionalTensor& gv) {
  auto [o, final_state, for_backward] =
      chunk_gla_fwd(q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state,
                    state_v_first, /*batch_invariant=*/false);
  OptionalTensor state;
  if (output_final_state) state = std::move(final_state);
  return {std::move(o), std::move(state)};
}

// Checks of the operators' arguments.
namespace {

// The inputs of both passes.
template <class Arguments>
Shape check_inputs(const char* op, const Arguments& a) {
  const Checker check(op, "q", a.q);
  Shape shape = check_tokens(check, {op, &a.q, &a.k, &a.v, &a.g, &a.gv, "g"});
  check.offsets(a.cu_seqlens, shape);
  check.state("initial_state", a.initial_state, shape, a.state_v_first);
  return shape;
}

}  // namespace

Shape check_chunk_gla_fwd(const ForwardArguments& a, const char* op) { return check_inputs(op, a); }

int64_t check_for_backward_bytes(const char* op, int64_t for_backward_bytes) {
  TORCH_CHECK_VALUE(for_backward_bytes >= kPlannedBytes, op,
                    ": expected for_backward_bytes to be at least ", kPlannedBytes, ", got ",
                    for_backward_bytes);
  return std::max<int64_t>(for_backward_bytes, 0);
}

Shape check_chunk_gla_bwd(const BackwardArguments& a) {
  const char* op = "chunk_gla_bwd";
  const Shape shape = check_inputs(op, a);
  const Checker check(op, "q", a.q);
  check_output_grad(check, a.d_o, shape);
  check.state("dht", a.dht, shape, a.state_v_first);
  if (given(a.for_backward)) {
    check.device("for_backward", *a.for_backward);
    check.dtype("for_backward", *a.for_backward, at::kByte, " (as chunk_gla_fwd leaves it)");
    check.rank("for_backward", *a.for_backward, 1, "[bytes]");
  }
  return shape;
}

namespace {

// Results of the operators while a graph is traced.
ForwardOutputs chunk_gla_fwd_meta(const ForwardArguments& a) {
  const Shape s = check_chunk_gla_fwd(a);
  return {fresh_output(s, a.v), boundary_state_if(a.output_final_state, s, a.q, a.state_v_first),
          empty({check_for_backward_bytes("chunk_gla", a.for_backward_bytes)}, a.q, at::kByte)};
}

BackwardOutputs chunk_gla_bwd_meta(const BackwardArguments& a) {
  return fresh_gradients(check_chunk_gla_bwd(a), a.q, a.k, a.v, a.gate_gradient ? a.g : kAbsent,
                         a.gv, a.initial_state, a.state_v_first);
}

// Saves the inputs and what the device's plan keeps for backward (for_backward.h).
struct ChunkGla {
  static constexpr const char *fwd = "chunk_gla_fwd", *bwd = "chunk_gla_bwd";

  static size_t setup_context(AutogradContext* ctx, const variable_list& outputs,
                              const ForwardArguments& a) {
    save(ctx, {a.q, a.k, a.v, a.g, a.gv, a.initial_state, a.cu_seqlens,
               /*for_backward=*/outputs[2]});
    ctx->saved_data["scale"] = a.scale;
    ctx->saved_data["state_v_first"] = a.state_v_first;
    ctx->saved_data["batch_invariant"] = a.batch_invariant;
    return a.output_final_state ? 2 : 1;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &g = saved[3], &gv = saved[4],
                     &initial_state = saved[5];
    const at::Tensor d_o = grads[0].defined() ? grads[0] : zero_output_grad(q, v);
    const OptionalTensor dht = grads.size() > 1 ? or_absent(grads[1]) : std::nullopt;
    const bool gate_gradient = g.defined() && ctx->needs_input_grad(3);
    auto [dq, dk, dv, dg, dgv, dh0] =
        chunk_gla_bwd(d_o, dht, q, k, v, or_absent(g), or_absent(gv), or_absent(initial_state),
                      or_absent(saved[6]), ctx->saved_data["scale"].toOptional<double>(),
                      ctx->saved_data["state_v_first"].toBool(),
                      ctx->saved_data["batch_invariant"].toBool(), saved[7], gate_gradient);
    return {dq,
            dk,
            dv,
            gate_gradient ? dg : at::Tensor(),
            grad_of(gv, dgv),
            grad_of(initial_state, dh0)};
  }
};

bool needs_gradient(std::initializer_list<at::Tensor> tensors,
                    std::initializer_list<OptionalTensor> optional) {
  const auto needs = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
  return std::any_of(tensors.begin(), tensors.end(), needs) ||
         std::any_of(optional.begin(), optional.end(),
                     [&](const OptionalTensor& t) { return t.has_value() && needs(*t); });
}

ForwardOutputs chunk_gla_fwd_autograd(const ForwardArguments& a) {
  refuse_unsupported(ChunkGla::fwd, a.q, a.k, a.v, a.g, a.gv, a.initial_state);
  if (!at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView below;
    return dispatch(a);
  }
  const bool planned = a.for_backward_bytes == kPlannedBytes &&
                       needs_gradient({a.q, a.k, a.v}, {a.g, a.gv, a.initial_state});
  const int64_t bytes = planned ? for_backward_bytes(a) : a.for_backward_bytes;
  auto [o, final_state, for_backward] = Differentiable<chunk_gla_fwd, ChunkGla>::record(
      a.q, a.k, a.v, a.g, a.gv, a.initial_state, a.cu_seqlens, a.scale, a.output_final_state,
      a.state_v_first, a.batch_invariant, bytes);
  // Autograd keeps for_backward. The operator's caller did not ask for it and gets an empty tensor.
  if (planned && bytes > 0) for_backward = for_backward.new_empty({0});
  return {o, final_state, for_backward};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define(m,
         "chunk_gla_fwd(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor? "
         "initial_state, Tensor? cu_seqlens, float? scale, bool output_final_state, bool "
         "state_v_first, bool batch_invariant, int for_backward_bytes=-1) -> (Tensor o, Tensor "
         "final_state, Tensor for_backward)");
  define(m,
         "chunk_gla_bwd(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? "
         "gv, Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool state_v_first, bool "
         "batch_invariant, Tensor? for_backward=None, bool gate_gradient=True) -> (Tensor dq, "
         "Tensor dk, Tensor dv, Tensor dg, Tensor dgv, Tensor dh0)");
  autocast_first<3, chunk_gla_fwd>(m, "chunk_gla_fwd");
}

TORCH_LIBRARY_IMPL(gla_ext, Meta, m) {
  m.impl(ChunkGla::fwd, by_arguments<chunk_gla_fwd, chunk_gla_fwd_meta>);
  m.impl(ChunkGla::bwd, by_arguments<chunk_gla_bwd, chunk_gla_bwd_meta>);
}

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) {
  m.impl(ChunkGla::fwd, by_arguments<chunk_gla_fwd, chunk_gla_fwd_autograd>);
  m.impl(ChunkGla::bwd, DifferentiableOnce<chunk_gla_bwd, ChunkGla>::run);
}

}  // namespace gla_ext
