// gla_ext's C++ interface. Every function here calls through the dispatcher, so autograd, autocast
// and torch.compile see one operator.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace gla_ext {

// A tensor that may be absent: std::nullopt, or a tensor that is not defined.
using OptionalTensor = std::optional<at::Tensor>;

// Gated linear attention (Yang et al., arXiv 2312.06635):
// S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t v_tᵀ, o_t = scale S_tᵀ q_t.
//
//   q              [B, T, H, K]
//   k              [B, T, HK, K]. HK is H or a divisor: head h of q reads head h / (H / HK)
//   g              [B, T, HK, K], log of the decay, <= 0, or [B, T, HK]: one for all channels of a
//                  head; absent: no decay
//   v, gv          [B, T, HK, V], gv = log of the decay of value channels; absent: no decay
//   scale          K^-0.5 unless given
//   initial_state  [N, H, K, V] ([N, H, V, K] if state_v_first), fp32 (fp64 with fp64 inputs)
//   cu_seqlens     [N + 1] int32 or int64: N sequences packed in one batch row; N = B without it
//
// Returns o [B, T, H, V] and, if asked for, the final state in the layout of initial_state.
std::tuple<at::Tensor, OptionalTensor> chunk_gla(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
    std::optional<double> scale = {}, const OptionalTensor& initial_state = {},
    bool output_final_state = false, bool state_v_first = false,
    const OptionalTensor& cu_seqlens = {}, const OptionalTensor& gv = {});

// The operators behind it. An output that was not asked for is a 0-element tensor. `for_backward`
// is what forward has made and backward uses again. A tensor of the size that the device's plan
// knows is used; one of another size is allocated and not used. kPlannedBytes means the plan's size
// if autograd will compute a gradient, and no bytes otherwise. Autograd alone then has the tensor
// (chunk_gla/for_backward.h).
constexpr int64_t kPlannedBytes = -1;
using ForwardOutputs =  // o, final_state, for_backward
    std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using BackwardOutputs =  // dq, dk, dv, dg, dgv, dh0
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// gate_gradient: whether dg is asked for; one gate a head has a faster way without.
ForwardOutputs chunk_gla_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const OptionalTensor& g, const OptionalTensor& gv,
                             const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                             std::optional<double> scale, bool output_final_state,
                             bool state_v_first, bool batch_invariant,
                             int64_t for_backward_bytes = kPlannedBytes);

BackwardOutputs chunk_gla_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                              const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
                              const OptionalTensor& gv, const OptionalTensor& initial_state,
                              const OptionalTensor& cu_seqlens, std::optional<double> scale,
                              bool state_v_first, bool batch_invariant,
                              const OptionalTensor& for_backward = {}, bool gate_gradient = true);

// chunk_gla on a pool of states [P, H, K, V] of fp32, bf16 or fp16 (fp64 with fp64 inputs), without
// a gradient. Sequence n starts from row slots[n] (n without slots), or from 0 where
// has_initial_state[n] is false, and leaves its state in row write_slots[n], or slots[n]. A slot
// outside the pool: o = 0, no state is touched; such a write slot: no state is written.
//
// checkpoint_every (a multiple of 64 tokens; 0: none): the states after each so many tokens of a
// sequence go to `checkpoints` [Q, H, K, V], or the pool itself. Checkpoint j of sequence n has
// number checkpoint_cu_starts[n] + j, or without these n (T / every) + j, and the row
// checkpoint_slots[number], or its number.
at::Tensor chunk_gla_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const OptionalTensor& g, const OptionalTensor& gv, at::Tensor& state,
                      const OptionalTensor& slots, const OptionalTensor& write_slots,
                      const OptionalTensor& has_initial_state, const OptionalTensor& cu_seqlens,
                      std::optional<double> scale, bool state_v_first, bool batch_invariant,
                      int64_t checkpoint_every = 0, const OptionalTensor& checkpoints = {},
                      const OptionalTensor& checkpoint_slots = {},
                      const OptionalTensor& checkpoint_cu_starts = {});
// With o in `out`.
void chunk_gla_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const OptionalTensor& g, const OptionalTensor& gv, at::Tensor& state,
                   const OptionalTensor& slots, const OptionalTensor& write_slots,
                   const OptionalTensor& has_initial_state, const OptionalTensor& cu_seqlens,
                   std::optional<double> scale, bool state_v_first, bool batch_invariant,
                   int64_t checkpoint_every, const OptionalTensor& checkpoints,
                   const OptionalTensor& checkpoint_slots,
                   const OptionalTensor& checkpoint_cu_starts, at::Tensor& out);

// The two halves of chunk_gla over several ranks (context parallel), for sequences that are not
// packed. Each rank sums up what its tokens add to the state. The state that enters a rank follows
// from all ranks' summaries. The halves have no gradient of their own.
//
// The summary is one tensor to be sent, fp32 (fp64 with fp64 inputs). It begins with the state
// [B, H, K, V] after the tokens, which starts from initial_state or 0. If there is g, its sum over
// the tokens follows, [B, H, K], in natural log; if there is gv, its sum, [B, H, V]. `prepared` is
// what the first half makes and the second reads. The device's plan knows its size,
// `prepared_bytes`. If that is 0, the second half makes it again.
std::tuple<at::Tensor, at::Tensor> chunk_gla_summary(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
    const OptionalTensor& gv, const OptionalTensor& initial_state, std::optional<double> scale,
    bool state_v_first, bool batch_invariant, bool for_backward, int64_t prepared_bytes);

// o, final_state and what enters each segment [B, segments, H, K, V], which backward reads.
ForwardOutputs chunk_gla_apply(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const OptionalTensor& g, const OptionalTensor& gv,
                               const OptionalTensor& initial_state, std::optional<double> scale,
                               bool output_final_state, bool state_v_first, bool batch_invariant,
                               bool for_backward, const at::Tensor& prepared, int64_t segments);

// Returns the gradient [B, H, K, V] of the state that enters the tokens. The gradient of the state
// that leaves them is dht, or 0 without dht. Also returns what the second half reads.
std::tuple<at::Tensor, at::Tensor> chunk_gla_summary_bwd(
    const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q, const at::Tensor& k,
    const at::Tensor& v, const OptionalTensor& g, const OptionalTensor& gv,
    std::optional<double> scale, bool state_v_first, bool batch_invariant,
    const at::Tensor& prepared, int64_t prepared_bytes);

BackwardOutputs chunk_gla_apply_bwd(const at::Tensor& d_o, const OptionalTensor& dht,
                                    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const OptionalTensor& g, const OptionalTensor& gv,
                                    const OptionalTensor& initial_state,
                                    std::optional<double> scale, bool state_v_first,
                                    bool batch_invariant, const at::Tensor& prepared,
                                    const at::Tensor& entering, const at::Tensor& prepared_bwd);

// In forward: the state that enters a rank's part of the text, from the summaries of all ranks,
// gathered in one tensor. In backward: the gradient of the state that leaves the part, from the
// summaries of backward and the `decays` that the call in forward returned. A rank hands on `each`
// rows. `places`, `reach` and `entered` have one element: the rank; how many ranks before it, in
// backward after it, reach it; and, for packed sequences, the row that they enter. Without
// `entered` they enter each row. Rows that nothing enters are `boundary`'s, or 0. Returns x,
// [rows, H, K, V] or v first, and in forward the decays of all ranks.
std::tuple<at::Tensor, at::Tensor> chunk_gla_fold(
    const at::Tensor& summaries, const OptionalTensor& decays, const OptionalTensor& boundary,
    int64_t size, const c10::SymInt& each, const c10::SymInt& rows, const c10::SymInt& H,
    const c10::SymInt& K, const c10::SymInt& V, bool key_gated, bool value_gated,
    bool state_v_first, at::IntArrayRef places, at::IntArrayRef reach, at::IntArrayRef entered);

// The recurrence itself, token by token, with a gate on value channels too and in reverse time if
// asked for: S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t v_tᵀ. gk [B, T, HK, K] and gv
// [B, T, HK, V] may be absent.
using RecurrentForwardOutputs = std::tuple<at::Tensor, at::Tensor>;  // o, final_state

RecurrentForwardOutputs recurrent_gla_fwd(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
    const OptionalTensor& gv, const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
    std::optional<double> scale, bool output_final_state, bool reverse, bool state_v_first);

// dq, dk, dv, dgk, dgv, dh0.
BackwardOutputs recurrent_gla_bwd(const at::Tensor& d_o, const OptionalTensor& dht,
                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const OptionalTensor& gk, const OptionalTensor& gv,
                                  const OptionalTensor& initial_state,
                                  const OptionalTensor& cu_seqlens, std::optional<double> scale,
                                  bool reverse, bool state_v_first);

// Decoding: rows of T tokens, or with cu_seqlens N packed drafts, on a pool of states
// [P, H, K, V] stored in any of the three shorter types, of which row n has slots[n] (n without
// slots; outside 0 .. P - 1: o = 0, no state is touched). step_ writes the state after the last
// token, verify nothing, commit_ the state after accepted[n] tokens: to slots[n], or where
// write_slots[n] says, outside 0 .. P - 1 nowhere. step_'s other form writes o into `out`.
at::Tensor recurrent_gla_step_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const OptionalTensor& gk, const OptionalTensor& gv,
                               at::Tensor& state, const OptionalTensor& slots,
                               std::optional<double> scale, bool state_v_first,
                               const OptionalTensor& write_slots = std::nullopt);

void recurrent_gla_step_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const OptionalTensor& gk, const OptionalTensor& gv, at::Tensor& state,
                            const OptionalTensor& slots, std::optional<double> scale,
                            bool state_v_first, const OptionalTensor& write_slots, at::Tensor& out);

at::Tensor recurrent_gla_verify(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const OptionalTensor& gk, const OptionalTensor& gv,
                                const at::Tensor& state, const OptionalTensor& slots,
                                std::optional<double> scale, bool state_v_first,
                                const OptionalTensor& cu_seqlens = std::nullopt);

void recurrent_gla_verify_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const OptionalTensor& gk, const OptionalTensor& gv,
                              const at::Tensor& state, const OptionalTensor& slots,
                              std::optional<double> scale, bool state_v_first,
                              const OptionalTensor& cu_seqlens, at::Tensor& out);

void recurrent_gla_commit_(const at::Tensor& k, const at::Tensor& v, const OptionalTensor& gk,
                           const OptionalTensor& gv, at::Tensor& state, const OptionalTensor& slots,
                           const at::Tensor& accepted, bool state_v_first,
                           const OptionalTensor& cu_seqlens = std::nullopt,
                           const OptionalTensor& write_slots = std::nullopt);

// A step of T tokens that writes them to the rows' buffers [P, L, HK, K | V], and to the state only
// what a row's buffer held, count[slot] tokens, where T more do not fit.
at::Tensor recurrent_gla_buffered_step_(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const OptionalTensor& gk,
                                        at::Tensor& state, const OptionalTensor& slots,
                                        at::Tensor& buffer_k, at::Tensor& buffer_v,
                                        at::Tensor& buffer_g, const at::Tensor& count,
                                        std::optional<double> scale, bool state_v_first);

// The root mean square norm over the last dimension (arXiv 1910.07467), times a weight [V] and an
// activated gate of x's shape, each of which may be absent, rounded once:
// y = x rstd weight activation(gate), rstd = (mean(x^2) + eps)^-0.5. The activation is one of relu,
// sigmoid, logsigmoid, silu (or swish), sqrelu, gelu (by tanh). Backward gives y too if asked for
// an output.
using NormForwardOutputs = std::tuple<at::Tensor, at::Tensor>;  // y, rstd [...]
using NormBackwardOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // dx, dweight, dgate, y; 0
                                                                 // elements where absent

NormForwardOutputs rms_norm_gate_fwd(const at::Tensor& x, const OptionalTensor& weight,
                                     const OptionalTensor& gate, std::string_view activation,
                                     double eps);

NormBackwardOutputs rms_norm_gate_bwd(const at::Tensor& dy, const at::Tensor& x,
                                      const OptionalTensor& weight, const OptionalTensor& gate,
                                      const at::Tensor& rstd, std::string_view activation,
                                      bool output = false);

// The linear map of the norm of heads, with o and gate [..., H, V], norm_weight [V] and weight
// [N, H V]: linear(y, weight), where y is the above [..., H V]. Saved for backward are o, gate, the
// weights and rstd, and no y.
at::Tensor norm_gate_linear(const at::Tensor& o, const at::Tensor& gate, const at::Tensor& weight,
                            const OptionalTensor& norm_weight, std::string_view activation,
                            double eps);

// The same of a residual stream to which x is added first: stream = residual + x, rounded to the
// residual's dtype, which is x's or fp32, and y = stream rstd weight in x's dtype. dstream is the
// gradient of the stream from elsewhere. dresidual is that of both; dx the same in dy's dtype, 0
// elements where that is the stream's.
using NormResidualForwardOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // y stream rstd
using NormResidualBackwardOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dx, dresidual, dweight

NormResidualForwardOutputs rms_norm_residual_fwd(const at::Tensor& x, const at::Tensor& residual,
                                                 const OptionalTensor& weight, double eps);

NormResidualBackwardOutputs rms_norm_residual_bwd(const at::Tensor& dy,
                                                  const OptionalTensor& dstream,
                                                  const at::Tensor& stream,
                                                  const OptionalTensor& weight,
                                                  const at::Tensor& rstd);

// SwiGLU (arXiv 2002.05202) of tensors of one shape [..., D], rounded once: y = silu(gate) up. The
// product of backward is y again, 0 elements unless asked for.
using SwigluBackwardOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dgate, dup, y

at::Tensor swiglu_fwd(const at::Tensor& gate, const at::Tensor& up);

SwigluBackwardOutputs swiglu_bwd(const at::Tensor& dy, const at::Tensor& gate, const at::Tensor& up,
                                 bool product);

// linear(silu(gate) up, weight, bias) with weight [N, D] and bias [N], which saves gate, up and
// weight for backward, and no product.
at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         const OptionalTensor& bias = {});

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
                                                const OptionalTensor& bias,
                                                const OptionalTensor& cache,
                                                const OptionalTensor& cu_seqlens,
                                                bool output_state);

ConvolutionBackwardOutputs short_convolution_bwd(const at::Tensor& dy, const OptionalTensor& dstate,
                                                 const at::Tensor& x, const at::Tensor& weight,
                                                 const OptionalTensor& bias,
                                                 const OptionalTensor& cache,
                                                 const OptionalTensor& cu_seqlens);

// The same on a pool of caches [P, D, W], of which sequence n has slots[n] (n without slots;
// outside 0 .. P - 1: y = 0, no cache is touched): read, or 0 where has_initial_state says so, and
// written there or to write_slots[n], outside 0 .. P - 1 nowhere. Tokens after the last offset give
// y = 0.
at::Tensor short_convolution_(const at::Tensor& x, const at::Tensor& weight,
                              const OptionalTensor& bias, at::Tensor& state,
                              const OptionalTensor& slots, const OptionalTensor& write_slots,
                              const OptionalTensor& has_initial_state,
                              const OptionalTensor& cu_seqlens);

// The same, y in `out`.
void short_convolution_out(const at::Tensor& x, const at::Tensor& weight,
                           const OptionalTensor& bias, at::Tensor& state,
                           const OptionalTensor& slots, const OptionalTensor& write_slots,
                           const OptionalTensor& has_initial_state,
                           const OptionalTensor& cu_seqlens, at::Tensor& out);

// Cross entropy of logits [N, V] with labels `target` [N], int32 or int64. common/cross_entropy.h
// has the loss of a token, and what the options do. ignore_index: a label that does not count.
// loss, z_loss (what of it is lse_square_scale lse²) and lse are [N], fp32 (fp64 for fp64 logits).
// inplace_backward: under autograd backward writes the gradient over the logits.
using CrossEntropyForwardOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // loss, z_loss, lse

CrossEntropyForwardOutputs cross_entropy_fwd(const at::Tensor& logits, const at::Tensor& target,
                                             int64_t ignore_index, double label_smoothing,
                                             double logit_scale,
                                             std::optional<double> logit_softcapping,
                                             double lse_square_scale, bool inplace_backward);

at::Tensor cross_entropy_bwd(const at::Tensor& dloss, const at::Tensor& logits,
                             const at::Tensor& target, const at::Tensor& lse, int64_t ignore_index,
                             double label_smoothing, double logit_scale,
                             std::optional<double> logit_softcapping, double lse_square_scale);

// The same over the logits.
void cross_entropy_bwd_(const at::Tensor& dloss, at::Tensor& logits, const at::Tensor& target,
                        const at::Tensor& lse, int64_t ignore_index, double label_smoothing,
                        double logit_scale, std::optional<double> logit_softcapping,
                        double lse_square_scale);

// The loss [N], and over the logits the gradient of its sum, in one kernel.
at::Tensor cross_entropy_with_grad_(at::Tensor& logits, const at::Tensor& target,
                                    int64_t ignore_index, double label_smoothing,
                                    double logit_scale, std::optional<double> logit_softcapping,
                                    double lse_square_scale);

// The sum of the losses of logits x weightᵀ + bias, x [N, D], weight [V, D], bias [V], which are
// there for a num_chunks-th of x at a time, and its gradients: dx [N, D]; dweight and dbias in fp32
// (fp64 for fp64 inputs). Under autograd these are made where they are wanted, and not returned.
using LinearCrossEntropyOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // loss, dx, dweight, dbias; 0
                                                                 // elements unless asked for
LinearCrossEntropyOutputs linear_cross_entropy_fwd(
    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& target, int64_t ignore_index, double label_smoothing, double logit_scale,
    std::optional<double> logit_softcapping, int64_t num_chunks, bool with_dx, bool with_dweight);

// The gate's low-rank projection: g = max(logsigmoid(h weightᵀ + bias) / normalizer, clamp_min), h
// [..., R], weight [K, R], bias [K] or absent (0), rounded once.
using GateProjectionBackwardOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dh, dweight, dbias; the last 0 elements
                                                     // where absent

at::Tensor gate_projection_fwd(const at::Tensor& h, const at::Tensor& weight,
                               const OptionalTensor& bias, double normalizer,
                               std::optional<double> clamp_min);

GateProjectionBackwardOutputs gate_projection_bwd(const at::Tensor& dg, const at::Tensor& h,
                                                  const at::Tensor& weight,
                                                  const OptionalTensor& bias, double normalizer,
                                                  std::optional<double> clamp_min);

}  // namespace gla_ext
