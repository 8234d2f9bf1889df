// The ten steps as operators of their own: each takes its inputs from memory and gives its
// intermediate back.
#include <torch/library.h>

#include "cpu/host/call.h"
#include "op.h"
#include "ops.h"

namespace gla_ext::cpu {
namespace {

template <typename Call>
using AccumulateOf = typename std::remove_reference_t<Call>::Accumulate;

at::Tensor gate_cumsum(const at::Tensor& g, const OptionalTensor& cu_seqlens) {
  const char* op = "_gate_cumsum";
  const Shape shape = check_gate_cumsum(g, cu_seqlens);
  return with_call(op, shape, cu_seqlens, 1.0, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    call.inputs({{&Problem<T>::g, g}});
    at::Tensor b = call.output(&Problem<T>::b, call.problem.K, g, shape.accumulate);
    call.run(kernels<T>().gate_cumsum);
    return b;
  });
}

std::tuple<at::Tensor, at::Tensor> chunk_states(const at::Tensor& k, const at::Tensor& v,
                                                const at::Tensor& b,
                                                const OptionalTensor& initial_state,
                                                const OptionalTensor& cu_seqlens,
                                                bool state_v_first) {
  const char* op = "_chunk_states";
  const Shape shape = check_chunk_states(k, v, b, initial_state, cu_seqlens, state_v_first);
  return with_call(op, shape, cu_seqlens, 1.0, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    using P = Problem<T>;
    call.problem.state_v_first = state_v_first;
    call.inputs({{&P::k, k}, {&P::v, v}, {&P::b, b}});
    call.input_state(&P::h0, initial_state);
    at::Tensor S = call.output_chunk_states(k, shape.accumulate);
    at::Tensor final_state = call.output_state(&P::ht, k);
    call.run(kernels<T>().state_pass);
    return std::make_tuple(S, final_state);
  });
}

at::Tensor scores_off_diagonal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& b,
                               const OptionalTensor& cu_seqlens, std::optional<double> scale) {
  const char* op = "_scores_off_diagonal";
  const Shape shape = check_scores(op, q, k, b, cu_seqlens);
  return with_call(op, shape, cu_seqlens, scale, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    using P = Problem<T>;
    call.inputs({{&P::q, q}, {&P::k, k}, {&P::b, b}});
    at::Tensor A = call.output(&P::A, kChunk, q, shape.accumulate);
    call.run(kernels<T>().scores_off_diagonal);
    return A;
  });
}

at::Tensor scores_diagonal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& b,
                           const OptionalTensor& cu_seqlens, std::optional<double> scale) {
  const char* op = "_scores_diagonal";
  const Shape shape = check_scores(op, q, k, b, cu_seqlens);
  return with_call(op, shape, cu_seqlens, scale, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    using P = Problem<T>;
    call.inputs({{&P::q, q}, {&P::k, k}, {&P::b, b}});
    at::Tensor A_diagonal = call.output(&P::A_diagonal, kSubChunk, q, shape.accumulate);
    call.run(kernels<T>().scores_diagonal);
    return A_diagonal;
  });
}

at::Tensor output(const at::Tensor& q, const at::Tensor& v, const at::Tensor& b,
                  const at::Tensor& A, const at::Tensor& A_diagonal, const at::Tensor& S,
                  const OptionalTensor& cu_seqlens, std::optional<double> scale) {
  const char* op = "_output";
  const Shape shape = check_output(q, v, b, A, A_diagonal, S, cu_seqlens);
  return with_call(op, shape, cu_seqlens, scale, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    using P = Problem<T>;
    call.inputs({{&P::q, q}, {&P::v, v}, {&P::b, b}, {&P::A, A}, {&P::A_diagonal, A_diagonal}});
    call.input_chunk_states(S);
    at::Tensor o = call.output(&P::o, call.problem.V, v, v.scalar_type());
    call.run(kernels<T>().output);
    return o;
  });
}

std::tuple<at::Tensor, at::Tensor> state_grads(const at::Tensor& q, const at::Tensor& d_o,
                                               const at::Tensor& b, const OptionalTensor& dht,
                                               const OptionalTensor& cu_seqlens,
                                               std::optional<double> scale, bool state_v_first) {
  const char* op = "_state_grads";
  const Shape shape = check_state_grads(q, d_o, b, dht, cu_seqlens, state_v_first);
  return with_call(op, shape, cu_seqlens, scale, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    using P = Problem<T>;
    call.problem.state_v_first = state_v_first;
    call.inputs({{&P::q, q}, {&P::d_o, d_o}, {&P::b, b}});
    call.input_state(&P::dht, dht);
    at::Tensor dS = call.output_chunk_state_grads(q);
    at::Tensor dh0 = call.output_state(&P::dh0, q);
    call.run(kernels<T>().state_grad_pass);
    return std::make_tuple(dS, dh0);
  });
}

at::Tensor value_grads(const at::Tensor& k, const at::Tensor& d_o, const at::Tensor& b,
                       const at::Tensor& A, const at::Tensor& A_diagonal, const at::Tensor& dS,
                       const OptionalTensor& cu_seqlens) {
  const char* op = "_value_grads";
  const Shape shape = check_value_grads(k, d_o, b, A, A_diagonal, dS, cu_seqlens);
  return with_call(op, shape, cu_seqlens, 1.0, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    using P = Problem<T>;
    call.inputs({{&P::k, k}, {&P::d_o, d_o}, {&P::b, b}, {&P::A, A}, {&P::A_diagonal, A_diagonal}});
    call.input_chunk_state_grads(dS);
    at::Tensor dv = call.output(&P::dv, call.problem.V, d_o, d_o.scalar_type());
    call.run(kernels<T>().value_grads);
    return dv;
  });
}

at::Tensor score_grads(const at::Tensor& d_o, const at::Tensor& v, const OptionalTensor& cu_seqlens,
                       std::optional<double> scale) {
  const char* op = "_score_grads";
  const Shape shape = check_score_grads(d_o, v, cu_seqlens, scale);
  return with_call(op, shape, cu_seqlens, scale, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    using P = Problem<T>;
    call.inputs({{&P::d_o, d_o}, {&P::v, v}});
    at::Tensor dA = call.output(&P::dA, kChunk, v, shape.accumulate);
    call.run(kernels<T>().score_grads);
    return dA;
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> intra_grads(const at::Tensor& q, const at::Tensor& k,
                                                           const at::Tensor& b,
                                                           const at::Tensor& dA,
                                                           const OptionalTensor& cu_seqlens) {
  const char* op = "_intra_grads";
  const Shape shape = check_intra_grads(q, k, b, dA, cu_seqlens);
  return with_call(op, shape, cu_seqlens, 1.0, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    using P = Problem<T>;
    call.inputs({{&P::q, q}, {&P::k, k}, {&P::b, b}, {&P::dA, dA}});
    const int64_t K = call.problem.K;
    at::Tensor dq = call.output(&P::dq, K, q, shape.accumulate);
    at::Tensor dk = call.output(&P::dk, K, q, shape.accumulate);
    at::Tensor dg = call.output(&P::dg, K, q, shape.accumulate);
    call.run(kernels<T>().intra_grads);
    return std::make_tuple(dq, dk, dg);
  });
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> merge_grads(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& d_o,
    const at::Tensor& b, const at::Tensor& S, const at::Tensor& dS, const at::Tensor& dq_intra,
    const at::Tensor& dk_intra, const at::Tensor& dg_intra, const OptionalTensor& cu_seqlens,
    std::optional<double> scale) {
  const char* op = "_merge_grads";
  const Shape shape =
      check_merge_grads(q, k, v, d_o, b, S, dS, dq_intra, dk_intra, dg_intra, cu_seqlens);
  return with_call(op, shape, cu_seqlens, scale, [&](auto& call) {
    using T = AccumulateOf<decltype(call)>;
    using P = Problem<T>;
    call.inputs({{&P::q, q},
                 {&P::k, k},
                 {&P::v, v},
                 {&P::d_o, d_o},
                 {&P::b, b},
                 {&P::dq_intra, dq_intra},
                 {&P::dk_intra, dk_intra},
                 {&P::dg_intra, dg_intra}});
    call.input_chunk_states(S);
    call.input_chunk_state_grads(dS);
    const int64_t K = call.problem.K;
    at::Tensor dq = call.output(&P::dq, K, q, q.scalar_type());
    at::Tensor dk = call.output(&P::dk, K, k, k.scalar_type());
    at::Tensor dg = call.output(&P::dg, K, q, shape.accumulate);
    call.run(kernels<T>().merge_grads);
    return std::make_tuple(dq, dk, dg);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CPU, m) {
  m.impl("_gate_cumsum", gate_cumsum);
  m.impl("_chunk_states", chunk_states);
  m.impl("_scores_off_diagonal", scores_off_diagonal);
  m.impl("_scores_diagonal", scores_diagonal);
  m.impl("_output", output);
  m.impl("_state_grads", state_grads);
  m.impl("_value_grads", value_grads);
  m.impl("_score_grads", score_grads);
  m.impl("_intra_grads", intra_grads);
  m.impl("_merge_grads", merge_grads);
}

}  // namespace gla_ext::cpu
