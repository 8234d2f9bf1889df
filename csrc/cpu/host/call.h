// Converts checked tensors to what the kernels take.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <initializer_list>
#include <vector>

#include "chunk_gla/op.h"
#include "cpu/kernels.h"
#include "parallel.h"

namespace gla_ext::cpu {

DType dtype_of(at::ScalarType t);

// A call's tensors as a Problem. Holds the contiguous copies that some inputs need.
template <typename T>
class Call {
 public:
  Call(const char* op, const Shape& shape, const OptionalTensor& cu_seqlens,
       std::optional<double> scale);

  Problem<T> problem;
  int64_t B, tokens, N, chunks;
  bool packed;

  // Inputs [B, T, H, D], each with the field it fills. Their heads may be a divisor of H.
  struct Input {
    Rows Problem<T>::* rows;
    const at::Tensor& tensor;
  };
  void inputs(std::initializer_list<Input> tensors);
  // Takes q, unless it is null, k, v and the given gates as inputs.
  void tokens_of(const at::Tensor* q, const at::Tensor& k, const at::Tensor& v,
                 const OptionalTensor& g, const OptionalTensor& gv);
  void input_state(const T* Problem<T>::* states, const OptionalTensor& t);
  void input_chunk_states(const at::Tensor& S);
  void input_chunk_state_grads(const at::Tensor& dS);

  // Fresh outputs. Tokens and chunks that no sequence owns are zero.
  at::Tensor output(Rows Problem<T>::* rows, int64_t last_dim, const at::Tensor& like,
                    at::ScalarType dtype);
  // An output that the caller has given. Its last dimension is contiguous.
  void output_into(Rows Problem<T>::* rows, const at::Tensor& out);
  // It has 0 elements unless it is asked for.
  at::Tensor output_state(T* Problem<T>::* states, const at::Tensor& like, bool asked_for = true);
  // dq, dk, dv, dg, dgv and dh0, of H heads; 0 elements if the input is absent.
  BackwardOutputs gradients(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const OptionalTensor& g, const OptionalTensor& gv,
                            const OptionalTensor& h0);
  at::Tensor output_chunk_states(const at::Tensor& like, at::ScalarType dtype);
  at::Tensor output_chunk_state_grads(const at::Tensor& like);

  void run(typename Kernels<T>::SequenceTask task, bool states_behind_workspace = false) const;
  void run(typename Kernels<T>::ChunkTask task) const;
  // Runs forward of all chunks by the plan for this call.
  void run_forward(const at::Tensor& q);
  bool sweeps(bool backward) const;
  const std::vector<Sequence>& sequences() const { return sequences_; }

 private:
  at::Tensor gate_grad(Rows Problem<T>::* rows, int64_t last_dim, const OptionalTensor& g,
                       const at::Tensor& like);
  at::Tensor chunk_states(const at::Tensor& like, at::ScalarType dtype) const;
  at::Tensor rows_tensor(int64_t last_dim, const at::Tensor& like, at::ScalarType dtype) const;
  void clear_tail(const at::Tensor& t) const;  // the tokens after every packed sequence
  const at::Tensor& keep(at::Tensor t);

  std::vector<Sequence> sequences_;
  std::vector<at::Tensor> kept_;
};

extern template class Call<float>;
extern template class Call<double>;

// The Problem type of a generic lambda's Call. Its Accumulate is T.
template <class Call>
using ProblemOf = std::decay_t<decltype(std::declval<Call>().problem)>;

// The sum over the first dimension, in its order, so that it does not depend on the threads.
template <typename T>
at::Tensor sum_of_parts(const at::Tensor& parts) {
  at::Tensor sums = at::zeros(parts.sizes().slice(1), parts.options());
  T* sum = sums.mutable_data_ptr<T>();
  const T* part = parts.const_data_ptr<T>();
  for (int64_t n = 0; n < parts.size(0); ++n)
    for (int64_t i = 0; i < sums.numel(); ++i) sum[i] += *part++;
  return sums;
}

// Calls f(float{}), or f(double{}) for fp64 inputs.
template <typename F>
auto with_accumulate(at::ScalarType accumulate, F&& f) {
  return accumulate == at::kDouble ? f(double{}) : f(float{});
}

// Calls f(Call<float or double>), by the accumulation dtype.
template <typename F>
auto with_call(const char* op, const Shape& shape, const OptionalTensor& cu_seqlens,
               std::optional<double> scale, F&& f) {
  return with_accumulate(shape.accumulate, [&](auto type) {
    Call<decltype(type)> call(op, shape, cu_seqlens, scale);
    return f(call);
  });
}

}  // namespace gla_ext::cpu
