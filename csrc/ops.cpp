// Schemas of gla_ext, those on a pool from ops_pool.cpp, and the
// entry points that call through the dispatcher.
#include <torch/library.h>

#include "arguments.h"
#include "dispatch/op.h"
#include "schemas.h"

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  m.set_python_module("gla_ext.ops");
  // Inductor pads the rows of what it allocates, and copies what has not the exact strides of eager
  // mode unless an operator says that their order is enough. These read rows of any distance.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order};

  m.def(
      "chunk_gla_fwd(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor? initial_state, "
      "Tensor? cu_seqlens, "
      "float? scale, bool output_final_state, bool state_v_first, bool "
      "batch_invariant, int for_backward_bytes=-1) -> (Tensor o, Tensor final_state, Tensor "
      "for_backward)",
      tags);
  m.def(
      "chunk_gla_bwd(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, "
      "Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool state_v_first, "
      "bool batch_invariant, Tensor? for_backward=None, bool gate_gradient=True) -> (Tensor dq, "
      "Tensor dk, Tensor dv, "
      "Tensor dg, "
      "Tensor dgv, Tensor dh0)",
      tags);

  m.def(
      "chunk_gla_summary(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor? "
      "initial_state, float? scale, bool state_v_first, bool batch_invariant, bool for_backward, "
      "int prepared_bytes=0) -> (Tensor summary, Tensor prepared)",
      tags);
  m.def(
      "chunk_gla_apply(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor? initial_state, "
      "float? scale, bool output_final_state, bool state_v_first, bool batch_invariant, bool "
      "for_backward, Tensor prepared, int segments=0) -> (Tensor o, Tensor final_state, Tensor "
      "entering)",
      tags);
  m.def(
      "chunk_gla_summary_bwd(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, "
      "Tensor? gv, float? scale, bool state_v_first, bool batch_invariant, Tensor prepared, int "
      "prepared_bytes=0) -> (Tensor state_grad, Tensor prepared_bwd)",
      tags);
  m.def(
      "chunk_gla_apply_bwd(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? g, "
      "Tensor? gv, Tensor? initial_state, float? scale, bool state_v_first, bool batch_invariant, "
      "Tensor prepared, Tensor entering, Tensor prepared_bwd) -> (Tensor dq, Tensor dk, Tensor dv, "
      "Tensor dg, Tensor dgv, Tensor dh0)",
      tags);
  m.def(
      "chunk_gla_fold(Tensor summaries, Tensor? decays, Tensor? boundary, int size, SymInt each, "
      "SymInt rows, SymInt H, SymInt K, SymInt V, bool key_gated, bool value_gated, bool "
      "state_v_first, int[] places, int[] reach, int[] entered) -> (Tensor x, Tensor decays)",
      tags);
  m.def(
      "chunk_gla_across_ranks(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? gv, Tensor? "
      "initial_state, Tensor? cu_seqlens, float? scale, bool output_final_state, bool "
      "state_v_first, bool batch_invariant, bool for_backward, int rank, int size, str group, "
      "int[] counts, int[] before, int[] after, int[] spans) -> (Tensor o, Tensor final_state)",
      tags);

  m.def(
      "recurrent_gla_fwd(Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor? "
      "initial_state, Tensor? cu_seqlens, float? scale, bool output_final_state, bool reverse, "
      "bool state_v_first) -> (Tensor o, Tensor final_state)",
      tags);
  m.def(
      "recurrent_gla_bwd(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? "
      "gv, Tensor? initial_state, Tensor? cu_seqlens, float? scale, bool reverse, bool "
      "state_v_first) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dgk, Tensor dgv, Tensor dh0)",
      tags);

  gla_ext::define_pool_operators(m, tags);

  const std::string loss_options =
      "int ignore_index, float label_smoothing, float logit_scale, float? logit_softcapping";
  const auto define = [&](const std::string& schema) { m.def(schema.c_str(), tags); };
  define("cross_entropy_fwd(Tensor logits, Tensor target, " + loss_options +
         ", float lse_square_scale, bool inplace_backward) -> (Tensor loss, Tensor z_loss, Tensor "
         "lse)");
  define("cross_entropy_bwd(Tensor dloss, Tensor logits, Tensor target, Tensor lse, " +
         loss_options + ", float lse_square_scale) -> Tensor");
  define("cross_entropy_bwd_(Tensor dloss, Tensor(a!) logits, Tensor target, Tensor lse, " +
         loss_options + ", float lse_square_scale) -> ()");
  define("cross_entropy_with_grad_(Tensor(a!) logits, Tensor target, " + loss_options +
         ", float lse_square_scale) -> Tensor");
  define("linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, " +
         loss_options +
         ", int num_chunks, bool with_dx, bool with_dweight) -> (Tensor loss, "
         "Tensor dx, Tensor dweight, Tensor dbias)");

  // A decoded token's layer. overlaps: the kernel may start before the one before it on the stream
  // has ended, and read weights, and the step states; nothing that may still run writes them.
  m.def(
      "norm_linear(Tensor x, Tensor? norm_weight, float eps, Tensor[] weights, bool "
      "overlaps=False) -> Tensor[]",
      tags);
  m.def(
      "norm_swiglu(Tensor x, Tensor? norm_weight, float eps, Tensor gate_weight, Tensor "
      "up_weight, bool overlaps=False) -> Tensor",
      tags);
  m.def("linear_residual(Tensor x, Tensor weight, Tensor residual, bool overlaps=False) -> Tensor",
        tags);
  m.def(
      "norm_gate_linear_residual(Tensor o, Tensor? norm_weight, float eps, Tensor gate, Tensor "
      "weight, Tensor residual, bool overlaps=False) -> Tensor",
      tags);
  m.def(
      "recurrent_gla_low_rank_step_(Tensor q, Tensor k, Tensor v, Tensor h, Tensor gate_weight, "
      "Tensor? gate_bias, float normalizer, float? clamp_min, Tensor(a!) state, Tensor? slots, "
      "float? scale, bool state_v_first, bool overlaps=False) -> Tensor",
      tags);

  // The steps, by the names of csrc/README.md; forward 1 and 2 are backward 1 and 2.
  m.def("_gate_cumsum(Tensor g, Tensor? cu_seqlens) -> Tensor", tags);
  m.def(
      "_chunk_states(Tensor k, Tensor v, Tensor b, Tensor? initial_state, Tensor? cu_seqlens, bool "
      "state_v_first) "
      "-> (Tensor S, Tensor final_state)",
      tags);
  m.def(
      "_scores_off_diagonal(Tensor q, Tensor k, Tensor b, Tensor? cu_seqlens, float? scale) -> "
      "Tensor",
      tags);
  m.def(
      "_scores_diagonal(Tensor q, Tensor k, Tensor b, Tensor? cu_seqlens, float? scale) -> Tensor",
      tags);
  m.def(
      "_output(Tensor q, Tensor v, Tensor b, Tensor A, Tensor A_diagonal, Tensor S, Tensor? "
      "cu_seqlens, "
      "float? scale) -> Tensor",
      tags);
  m.def(
      "_state_grads(Tensor q, Tensor do, Tensor b, Tensor? dht, Tensor? cu_seqlens, float? scale, "
      "bool state_v_first) -> (Tensor dS, Tensor dh0)",
      tags);
  m.def(
      "_value_grads(Tensor k, Tensor do, Tensor b, Tensor A, Tensor A_diagonal, Tensor dS, Tensor? "
      "cu_seqlens) "
      "-> Tensor",
      tags);
  m.def("_score_grads(Tensor do, Tensor v, Tensor? cu_seqlens, float? scale) -> Tensor", tags);
  m.def(
      "_intra_grads(Tensor q, Tensor k, Tensor b, Tensor dA, Tensor? cu_seqlens) "
      "-> (Tensor dq, Tensor dk, Tensor dg)",
      tags);
  m.def(
      "_merge_grads(Tensor q, Tensor k, Tensor v, Tensor do, Tensor b, Tensor S, Tensor dS, Tensor "
      "dq, Tensor dk, "
      "Tensor dg, Tensor? cu_seqlens, float? scale) -> (Tensor dq, Tensor dk, Tensor dg)",
      tags);
}

namespace gla_ext {

ForwardOutputs chunk_gla_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const std::optional<at::Tensor>& g,
                             const std::optional<at::Tensor>& gv,
                             const std::optional<at::Tensor>& initial_state,
                             const std::optional<at::Tensor>& cu_seqlens,
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

BackwardOutputs chunk_gla_bwd(const at::Tensor& d_o, const std::optional<at::Tensor>& dht,
                              const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const std::optional<at::Tensor>& g,
                              const std::optional<at::Tensor>& gv,
                              const std::optional<at::Tensor>& initial_state,
                              const std::optional<at::Tensor>& cu_seqlens,
                              std::optional<double> scale, bool state_v_first, bool batch_invariant,
                              const std::optional<at::Tensor>& for_backward, bool gate_gradient) {
  static const Op<decltype(chunk_gla_bwd)> op("gla_ext::chunk_gla_bwd");
  return op(d_o, dht, q, k, v, g, gv, initial_state, cu_seqlens, scale, state_v_first,
            batch_invariant, for_backward, gate_gradient);
}

RecurrentForwardOutputs recurrent_gla_fwd(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const std::optional<at::Tensor>& gk,
                                          const std::optional<at::Tensor>& gv,
                                          const std::optional<at::Tensor>& initial_state,
                                          const std::optional<at::Tensor>& cu_seqlens,
                                          std::optional<double> scale, bool output_final_state,
                                          bool reverse, bool state_v_first) {
  static const Op<decltype(recurrent_gla_fwd)> op("gla_ext::recurrent_gla_fwd");
  return op(q, k, v, gk, gv, initial_state, cu_seqlens, scale, output_final_state, reverse,
            state_v_first);
}

BackwardOutputs recurrent_gla_bwd(const at::Tensor& d_o, const std::optional<at::Tensor>& dht,
                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const std::optional<at::Tensor>& gk,
                                  const std::optional<at::Tensor>& gv,
                                  const std::optional<at::Tensor>& initial_state,
                                  const std::optional<at::Tensor>& cu_seqlens,
                                  std::optional<double> scale, bool reverse, bool state_v_first) {
  static const Op<decltype(recurrent_gla_bwd)> op("gla_ext::recurrent_gla_bwd");
  return op(d_o, dht, q, k, v, gk, gv, initial_state, cu_seqlens, scale, reverse, state_v_first);
}

std::tuple<at::Tensor, std::optional<at::Tensor>> chunk_gla(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& g, std::optional<double> scale,
    const std::optional<at::Tensor>& initial_state, bool output_final_state, bool state_v_first,
    const std::optional<at::Tensor>& cu_seqlens, const std::optional<at::Tensor>& gv) {
  auto [o, final_state, for_backward] =
      chunk_gla_fwd(q, k, v, g, gv, initial_state, cu_seqlens, scale, output_final_state,
                    state_v_first, /*batch_invariant=*/false);
  std::optional<at::Tensor> state;
  if (output_final_state) state = std::move(final_state);
  return {std::move(o), std::move(state)};
}

}  // namespace gla_ext
