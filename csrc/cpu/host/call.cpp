#include "call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "common/heads.h"
#include "dispatch/checker.h"
#include "plan.h"
#include "steps/op.h"

namespace gla_ext::cpu {

DType dtype_of(at::ScalarType t) {
  switch (t) {
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kHalf;
    case at::kFloat:
      return DType::kFloat;
    default:
      TORCH_INTERNAL_ASSERT(t == at::kDouble);
      return DType::kDouble;
  }
}

namespace {

Rows rows_of(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), dtype_of(t.scalar_type()), t.stride(0),
          t.stride(1), t.stride(2)};
}

std::vector<Sequence> sequences_of(const char* op, const OptionalTensor& cu_seqlens, int64_t B,
                                   int64_t T) {
  std::vector<Sequence> sequences;
  if (!given(cu_seqlens)) {
    for (int64_t n = 0; n < B; ++n) {
      sequences.push_back({n, n, 0, T, 0});
      sequences.back().first_chunk = n * sequences.back().chunks();
    }
    return sequences;
  }
  const at::Tensor offsets = checked_offsets(op, *cu_seqlens, T);
  const auto* begin = offsets.const_data_ptr<int64_t>();
  int64_t chunk = 0;
  for (int64_t n = 0; n + 1 < offsets.numel(); ++n) {
    sequences.push_back({n, 0, begin[n], begin[n + 1] - begin[n], chunk});
    chunk += sequences.back().chunks();
  }
  return sequences;
}

}  // namespace

template <typename T>
Call<T>::Call(const char* op, const Shape& shape, const OptionalTensor& cu_seqlens,
              std::optional<double> scale)
    : B(shape.B.expect_int()),
      tokens(shape.T.expect_int()),
      N(shape.N.expect_int()),
      chunks(shape.chunks.expect_int()),
      packed(shape.packed),
      sequences_(sequences_of(op, cu_seqlens, B, tokens)) {
  problem.H = shape.H.expect_int();
  problem.K = shape.K.expect_int();
  problem.V = shape.V.expect_int();
  problem.round_operands = shape.dtype == at::kBFloat16;
  problem.scale = static_cast<T>(resolve_scale(scale, problem.K));
}

template <typename T>
const at::Tensor& Call<T>::keep(at::Tensor t) {
  return kept_.emplace_back(std::move(t));
}

template <typename T>
void Call<T>::inputs(std::initializer_list<Input> tensors) {
  for (const auto& [rows, t] : tensors) {
    const bool contiguous_rows = t.size(3) == 1 || t.stride(3) == 1;
    Rows& filled = problem.*rows;
    filled = rows_of(keep(contiguous_rows ? t : t.contiguous()));
    if (t.size(2) > 0 && problem.H > 0) filled.group = problem.H / t.size(2);
  }
}

template <typename T>
void Call<T>::tokens_of(const at::Tensor* q, const at::Tensor& k, const at::Tensor& v,
                        const OptionalTensor& g, const OptionalTensor& gv) {
  using P = Problem<T>;
  if (q != nullptr) inputs({{&P::q, *q}});
  inputs({{&P::k, k}, {&P::v, v}});
  if (given(g)) inputs({{&P::g, over_channels(*g, problem.K)}});
  if (given(gv)) inputs({{&P::gv, *gv}});
}

template <typename T>
void Call<T>::input_state(const T* Problem<T>::* states, const OptionalTensor& t) {
  if (given(t)) problem.*states = keep(t->contiguous()).template const_data_ptr<T>();
}

template <typename T>
void Call<T>::input_chunk_states(const at::Tensor& S) {
  problem.S = const_cast<void*>(keep(S.contiguous()).const_data_ptr());
  problem.S_dtype = dtype_of(S.scalar_type());
}

template <typename T>
void Call<T>::input_chunk_state_grads(const at::Tensor& dS) {
  problem.dS = const_cast<T*>(keep(dS.contiguous()).template const_data_ptr<T>());
}

template <typename T>
at::Tensor Call<T>::rows_tensor(int64_t last_dim, const at::Tensor& like,
                                at::ScalarType dtype) const {
  at::Tensor t = at::empty({B, tokens, problem.H, last_dim}, like.options().dtype(dtype));
  clear_tail(t);
  return t;
}

template <typename T>
void Call<T>::clear_tail(const at::Tensor& t) const {
  if (!packed) return;
  const int64_t end = sequences_.empty() ? 0 : sequences_.back().start + sequences_.back().length;
  t.narrow(1, end, tokens - end).zero_();
}

template <typename T>
at::Tensor Call<T>::output(Rows Problem<T>::* rows, int64_t last_dim, const at::Tensor& like,
                           at::ScalarType dtype) {
  at::Tensor t = rows_tensor(last_dim, like, dtype);
  problem.*rows = rows_of(t);
  return t;
}

template <typename T>
void Call<T>::output_into(Rows Problem<T>::* rows, const at::Tensor& out) {
  clear_tail(out);
  problem.*rows = rows_of(out);
}

template <typename T>
at::Tensor Call<T>::gate_grad(Rows Problem<T>::* rows, int64_t last_dim, const OptionalTensor& g,
                              const at::Tensor& like) {
  const at::ScalarType accumulate = c10::CppTypeToScalarType<T>::value;
  if (given(g)) return output(rows, last_dim, *g, gate_grad_dtype(g, accumulate));
  return at::empty({0}, like.options().dtype(accumulate));
}

template <typename T>
at::Tensor Call<T>::output_state(T* Problem<T>::* states, const at::Tensor& like, bool asked_for) {
  const auto& p = problem;
  const auto options = like.options().dtype(c10::CppTypeToScalarType<T>::value);
  if (!asked_for) return at::empty({0}, options);
  at::Tensor t = p.state_v_first ? at::empty({N, p.H, p.V, p.K}, options)
                                 : at::empty({N, p.H, p.K, p.V}, options);
  problem.*states = t.template mutable_data_ptr<T>();
  return t;
}

template <typename T>
BackwardOutputs Call<T>::gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const OptionalTensor& g, const OptionalTensor& gv,
                                   const OptionalTensor& h0) {
  using P = Problem<T>;
  return {
      output(&P::dq, problem.K, q, q.scalar_type()), output(&P::dk, problem.K, k, k.scalar_type()),
      output(&P::dv, problem.V, v, v.scalar_type()), gate_grad(&P::dg, problem.K, g, q),
      gate_grad(&P::dgv, problem.V, gv, q),          output_state(&P::dh0, q, given(h0))};
}

template <typename T>
at::Tensor Call<T>::chunk_states(const at::Tensor& like, at::ScalarType dtype) const {
  const auto options = like.options().dtype(dtype);
  const std::vector<int64_t> sizes{B, chunks, problem.H, problem.K, problem.V};
  return packed ? at::zeros(sizes, options) : at::empty(sizes, options);
}

template <typename T>
at::Tensor Call<T>::output_chunk_states(const at::Tensor& like, at::ScalarType dtype) {
  at::Tensor t = chunk_states(like, dtype);
  problem.S = t.mutable_data_ptr();
  problem.S_dtype = dtype_of(dtype);
  return t;
}

template <typename T>
at::Tensor Call<T>::output_chunk_state_grads(const at::Tensor& like) {
  at::Tensor t = chunk_states(like, c10::CppTypeToScalarType<T>::value);
  problem.dS = t.template mutable_data_ptr<T>();
  return t;
}

template <typename T>
bool Call<T>::sweeps(bool backward) const {
  const auto& p = problem;
  return make_plan({N, tokens, p.H, p.K, p.V, packed, backward}, at::get_num_threads()).mode ==
         Mode::kSweep;
}

template <typename T>
void Call<T>::run_forward(const at::Tensor& q) {
  if (sweeps(/*backward=*/false)) return run(kernels<T>().forward_sweep);
  const at::Tensor S = output_chunk_states(q, chunk_states_dtype(q));
  run(kernels<T>().state_pass);
  run(kernels<T>().forward_chunk);
}

template <typename T>
void Call<T>::run(typename Kernels<T>::SequenceTask task, bool states_behind_workspace) const {
  int64_t elements = kernels<T>().workspace_size(problem.K, problem.V, problem.gv.data != nullptr);
  if (states_behind_workspace) {
    int64_t longest = 0;
    for (const Sequence& s : sequences_) longest = std::max(longest, s.chunks());
    elements += longest * problem.K * problem.V;
  }
  const int64_t H = problem.H;
  for_each_task<T>(
      static_cast<int64_t>(sequences_.size()) * H, elements,
      [&](T* workspace, int64_t i) { task(problem, workspace, sequences_[i / H], i % H); });
}

template <typename T>
void Call<T>::run(typename Kernels<T>::ChunkTask task) const {
  std::vector<Chunk> tasks;
  for (const Sequence& s : sequences_)
    for (int64_t n = 0; n < s.chunks(); ++n)
      for (int64_t head = 0; head < problem.H; ++head) tasks.push_back(problem.chunk(s, n, head));
  for_each_task<T>(static_cast<int64_t>(tasks.size()),
                   kernels<T>().workspace_size(problem.K, problem.V, problem.gv.data != nullptr),
                   [&](T* workspace, int64_t i) { task(problem, workspace, tasks[i]); });
}

template class Call<float>;
template class Call<double>;

}  // namespace gla_ext::cpu
