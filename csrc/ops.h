// gla_ext's C++ interface. Every function here calls through the dispatcher, so autograd, autocast
// and torch.compile see one operator.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace gla_ext {

// Gated linear attention (Yang et al., arXiv 2312.06635):
// S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t v_tᵀ, o_t = scale S_tᵀ q_t.
//
//   q              [B, T, H, K]
//   k, g           [B, T, HK, K], g = log of the decay, <= 0; absent: no decay; [B, T, HK]: one of
//                  all channels of a head. HK is H or a divisor: head h of q reads head
//                  h / (H / HK)
//   v, gv          [B, T, HK, V], gv = log of the decay of value channels; absent: no decay
//   scale          K^-0.5 unless given
//   initial_state  [N, H, K, V] ([N, H, V, K] if state_v_first), fp32 (fp64 with fp64 inputs)
//   cu_seqlens     [N + 1] int32 or int64: N sequences packed in one batch row; N = B without it
//
// Returns o [B, T, H, V] and, if asked for, the final state in the layout of initial_state.
std::tuple<at::Tensor, std::optional<at::Tensor>> chunk_gla(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& g, std::optional<double> scale = {},
    const std::optional<at::Tensor>& initial_state = {}, bool output_final_state = false,
    bool state_v_first = false, const std::optional<at::Tensor>& cu_seqlens = {},
    const std::optional<at::Tensor>& gv = {});

// The operators behind it. An output that was not asked for is a 0-element tensor. `for_backward`:
// what forward has made and backward uses again, of a size that the device's plan knows; another
// size is allocated and not used. kPlannedBytes: that size under autograd with a gradient to come,
// which then alone has the tensor (autograd/for_backward.h), else nothing.
constexpr int64_t kPlannedBytes = -1;
using ForwardOutputs =  // o, final_state, for_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using BackwardOutputs =  // dq, dk, dv, dg, dgv, dh0
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// gate_gradient: whether dg is asked for; one gate a head has a faster way without.
ForwardOutputs chunk_gla_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const std::optional<at::Tensor>& g,
                             const std::optional<at::Tensor>& gv,
                             const std::optional<at::Tensor>& initial_state,
                             const std::optional<at::Tensor>& cu_seqlens,
                             std::optional<double> scale, bool output_final_state,
                             bool state_v_first, bool batch_invariant,
                             int64_t for_backward_bytes = kPlannedBytes);

BackwardOutputs chunk_gla_bwd(const at::Tensor& d_o, const std::optional<at::Tensor>& dht,
                              const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const std::optional<at::Tensor>& g,
                              const std::optional<at::Tensor>& gv,
                              const std::optional<at::Tensor>& initial_state,
                              const std::optional<at::Tensor>& cu_seqlens,
                              std::optional<double> scale, bool state_v_first, bool batch_invariant,
                              const std::optional<at::Tensor>& for_backward = {},
                              bool gate_gradient = true);

// The recurrence itself, token by token, with a gate on value channels too and in reverse time if
// asked for: S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_tᵀ. gk [B, T, HK, K] and gv
// [B, T, HK, V] may be absent.
using RecurrentForwardOutputs = std::tuple<at::Tensor, at::Tensor>;  // o, final_state

RecurrentForwardOutputs recurrent_gla_fwd(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const std::optional<at::Tensor>& gk,
                                          const std::optional<at::Tensor>& gv,
                                          const std::optional<at::Tensor>& initial_state,
                                          const std::optional<at::Tensor>& cu_seqlens,
                                          std::optional<double> scale, bool output_final_state,
                                          bool reverse, bool state_v_first);

// dq, dk, dv, dgk, dgv, dh0.
BackwardOutputs recurrent_gla_bwd(const at::Tensor& d_o, const std::optional<at::Tensor>& dht,
                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const std::optional<at::Tensor>& gk,
                                  const std::optional<at::Tensor>& gv,
                                  const std::optional<at::Tensor>& initial_state,
                                  const std::optional<at::Tensor>& cu_seqlens,
                                  std::optional<double> scale, bool reverse, bool state_v_first);

// Decoding: rows of T tokens on a pool of states [P, H, K, V], of which row b has slots[b] (b
// without slots; outside 0 .. P - 1: o = 0, no state is touched). step_ writes the state after the
// last token, verify nothing, commit_ the state after accepted[b] tokens.
at::Tensor recurrent_gla_step_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::optional<at::Tensor>& gk,
                               const std::optional<at::Tensor>& gv, at::Tensor& state,
                               const std::optional<at::Tensor>& slots, std::optional<double> scale,
                               bool state_v_first);

at::Tensor recurrent_gla_verify(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const std::optional<at::Tensor>& gk,
                                const std::optional<at::Tensor>& gv, const at::Tensor& state,
                                const std::optional<at::Tensor>& slots, std::optional<double> scale,
                                bool state_v_first);

void recurrent_gla_commit_(const at::Tensor& k, const at::Tensor& v,
                           const std::optional<at::Tensor>& gk, const std::optional<at::Tensor>& gv,
                           at::Tensor& state, const std::optional<at::Tensor>& slots,
                           const at::Tensor& accepted, bool state_v_first);

// The root mean square norm over the last dimension (arXiv 1910.07467), times a weight [V] and an
// activated gate of x's shape, each of which may be absent, rounded once:
// y = x rstd weight activation(gate), rstd = (mean(x^2) + eps)^-0.5. The activation is one of relu,
// sigmoid, logsigmoid, silu (or swish), sqrelu, gelu (by tanh).
using NormForwardOutputs = std::tuple<at::Tensor, at::Tensor>;  // y, rstd [...]
using NormBackwardOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dx, dweight, dgate; 0 elements where absent

NormForwardOutputs rms_norm_gate_fwd(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                                     const std::optional<at::Tensor>& gate,
                                     std::string_view activation, double eps);

NormBackwardOutputs rms_norm_gate_bwd(const at::Tensor& dy, const at::Tensor& x,
                                      const std::optional<at::Tensor>& weight,
                                      const std::optional<at::Tensor>& gate, const at::Tensor& rstd,
                                      std::string_view activation);

// SwiGLU (arXiv 2002.05202) of tensors of one shape [..., D], rounded once: y = silu(gate) up. The
// product of backward is y again, 0 elements unless asked for.
using SwigluBackwardOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dgate, dup, y

at::Tensor swiglu_fwd(const at::Tensor& gate, const at::Tensor& up);

SwigluBackwardOutputs swiglu_bwd(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up,
                                 bool product);

// linear(silu(gate) up, weight, bias) with weight [N, D] and bias [N], which saves gate, up and
// weight for backward, and no product.
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias = {});

// A causal convolution of every channel over the last W tokens, then SiLU, rounded once:
// y_t = silu(bias + sum_s weight_{W-1-s} x_{t-s}).
//
//   x           [B, T, D]
//   weight      [D, 1, W]
//   bias        [D], or absent
//   cache       [N, D, W], the last W inputs before each sequence; absent: 0
//   cu_seqlens  as above; the tokens after the last offset are a sequence of their own, without
//               inputs before it and without a state
//
// y [B, T, D] and, if asked for, the cache after these tokens.
using ConvolutionForwardOutputs = std::tuple<at::Tensor, at::Tensor>;  // y, state
using ConvolutionBackwardOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // dx, dweight, dbias, dcache; the
                                                                 // last two 0 elements where absent

ConvolutionForwardOutputs short_convolution_fwd(const at::Tensor& x, const at::Tensor& weight,
                                                const std::optional<at::Tensor>& bias,
                                                const std::optional<at::Tensor>& cache,
                                                const std::optional<at::Tensor>& cu_seqlens,
                                                bool output_state);

ConvolutionBackwardOutputs short_convolution_bwd(const at::Tensor& dy,
                                                 const std::optional<at::Tensor>& dstate,
                                                 const at::Tensor& x, const at::Tensor& weight,
                                                 const std::optional<at::Tensor>& bias,
                                                 const std::optional<at::Tensor>& cache,
                                                 const std::optional<at::Tensor>& cu_seqlens);

}  // namespace gla_ext
