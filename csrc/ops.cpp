// Schemas of gla_ext, those on a pool from ops_pool.cpp, and the
// entry points that call through the dispatcher.
#include "ops.h"

#include <torch/library.h>

#include "dispatch/op.h"
#include "schemas.h"

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  m.set_python_module("gla_ext.ops");
  // Inductor pads the rows of what it allocates, and copies what has not the exact strides of eager
  // mode unless an operator says that their order is enough. These read rows of any distance.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_fixed_stride_order};

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

  m.def(
      "rms_norm_gate_fwd(Tensor x, Tensor? weight, Tensor? gate, str activation, float eps) -> "
      "(Tensor y, Tensor rstd)",
      tags);
  m.def(
      "rms_norm_gate_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? gate, Tensor rstd, str "
      "activation, bool output=False) -> (Tensor dx, Tensor dweight, Tensor dgate, Tensor y)",
      tags);
  m.def(
      "norm_gate_linear(Tensor o, Tensor gate, Tensor weight, Tensor? norm_weight, str activation, "
      "float eps) -> Tensor",
      tags);

  m.def(
      "rms_norm_residual_fwd(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor y, "
      "Tensor stream, Tensor rstd)",
      tags);
  m.def(
      "rms_norm_residual_bwd(Tensor dy, Tensor? dstream, Tensor stream, Tensor? weight, Tensor "
      "rstd) -> (Tensor dx, Tensor dresidual, Tensor dweight)",
      tags);

  m.def(
      "short_convolution_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? cache, Tensor? "
      "cu_seqlens, bool output_state) -> (Tensor y, Tensor state)",
      tags);
  m.def(
      "short_convolution_bwd(Tensor dy, Tensor? dstate, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor? cache, Tensor? cu_seqlens) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor "
      "dcache)",
      tags);

  gla_ext::define_pool_operators(m, tags);

  m.def(
      "joint_projection(Tensor x, Tensor[] weights, ScalarType dtype, bool together=True) -> "
      "Tensor[]",
      tags);

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

  m.def(
      "gate_projection_fwd(Tensor h, Tensor weight, Tensor? bias, float normalizer, float? "
      "clamp_min) -> Tensor",
      tags);
  m.def(
      "gate_projection_bwd(Tensor dg, Tensor h, Tensor weight, Tensor? bias, float normalizer, "
      "float? clamp_min) -> (Tensor dh, Tensor dweight, Tensor dbias)",
      tags);

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
}

namespace gla_ext {

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

NormForwardOutputs rms_norm_gate_fwd(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                                     const std::optional<at::Tensor>& gate,
                                     std::string_view activation, double eps) {
  static const Op<decltype(rms_norm_gate_fwd)> op("gla_ext::rms_norm_gate_fwd");
  return op(x, weight, gate, activation, eps);
}

NormBackwardOutputs rms_norm_gate_bwd(const at::Tensor& dy, const at::Tensor& x,
                                      const std::optional<at::Tensor>& weight,
                                      const std::optional<at::Tensor>& gate, const at::Tensor& rstd,
                                      std::string_view activation, bool output) {
  static const Op<decltype(rms_norm_gate_bwd)> op("gla_ext::rms_norm_gate_bwd");
  return op(dy, x, weight, gate, rstd, activation, output);
}

at::Tensor norm_gate_linear(const at::Tensor& o, const at::Tensor& gate, const at::Tensor& weight,
                            const std::optional<at::Tensor>& norm_weight,
                            std::string_view activation, double eps) {
  static const Op<decltype(norm_gate_linear)> op("gla_ext::norm_gate_linear");
  return op(o, gate, weight, norm_weight, activation, eps);
}

ConvolutionForwardOutputs short_convolution_fwd(const at::Tensor& x, const at::Tensor& weight,
                                                const std::optional<at::Tensor>& bias,
                                                const std::optional<at::Tensor>& cache,
                                                const std::optional<at::Tensor>& cu_seqlens,
                                                bool output_state) {
  static const Op<decltype(short_convolution_fwd)> op("gla_ext::short_convolution_fwd");
  return op(x, weight, bias, cache, cu_seqlens, output_state);
}

ConvolutionBackwardOutputs short_convolution_bwd(const at::Tensor& dy,
                                                 const std::optional<at::Tensor>& dstate,
                                                 const at::Tensor& x, const at::Tensor& weight,
                                                 const std::optional<at::Tensor>& bias,
                                                 const std::optional<at::Tensor>& cache,
                                                 const std::optional<at::Tensor>& cu_seqlens) {
  static const Op<decltype(short_convolution_bwd)> op("gla_ext::short_convolution_bwd");
  return op(dy, dstate, x, weight, bias, cache, cu_seqlens);
}

}  // namespace gla_ext
