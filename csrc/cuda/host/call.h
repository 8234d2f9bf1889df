// From checked tensors to the Problem that the kernels take.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "chunk_gla/op.h"
#include "cuda/plan/plan.h"
#include "launch.h"

namespace gla_ext::cuda {

// One call of chunk_gla's kernels. Holds the workspace and the copies that some inputs need.
class Call : Launch {
 public:
  // `like` is any of the inputs.
  Call(const char* op, const Shape& shape, const at::Tensor& like, const OptionalTensor& cu_seqlens,
       std::optional<double> scale, bool value_gated = false);

  // The dtype in which kernels read q, k, v and do and write gradients: that of the inputs, or fp32
  // if gates on values need it.
  at::ScalarType dtype;
  bool fp16_in_fp32 = false;
  Problem problem;
  Problem value_side;  // with gates on values: the value side, see launchers.h
  bool key_gated = false, value_gated = false;
  bool gate_gradient = true;  // whether backward computes dg

  // Takes a tensor [B, T, H, D] of any strides. It may have fewer heads, a divisor of H.
  void input(Rows& rows, const at::Tensor& t);
  void input(Rows& rows, const at::Tensor& t, at::ScalarType dtype);
  // Takes the given gates, once v and, in backward, do are in `problem`. A gate per head is in
  // `problem` as rows of one column, until `run` copies it to all channels for kernels that need
  // that.
  void input_gates(const OptionalTensor& g, const OptionalTensor& gv);
  // All inputs among an operator's arguments; in backward also do.
  template <class Arguments>
  void inputs(const Arguments& a, const at::Tensor* d_o = nullptr) {
    problem.whole_scores = true;
    problem.state_v_first = a.state_v_first;
    input(problem.q, a.q, dtype);
    input(problem.k, a.k, dtype);
    input(problem.v, a.v, dtype);
    if (d_o != nullptr) input(problem.d_o, *d_o, dtype);
    input_gates(a.g, a.gv);
  }
  // A state of every sequence; null if absent.
  const float* input_state(const OptionalTensor& t);
  void input_chunk_states(void*& states, DType& dtype, const at::Tensor& t);

  // Fresh outputs.
  at::Tensor output(Rows& rows, int64_t last_dim, at::ScalarType dtype);
  // The gradient of a gate; it has 0 elements if the gate is absent.
  at::Tensor gate_grad(Rows& rows, int64_t last_dim, const OptionalTensor& g);
  // That of a gate per head, [B, T, H, 1]; 0 elements also if the gradient is not wanted.
  at::Tensor head_gate_grad(Rows& rows, const OptionalTensor& g);
  at::Tensor output_state(float*& state);
  at::Tensor output_state_if(bool asked_for, float*& state) {
    return asked_for ? output_state(state) : not_asked_for(at::kFloat);
  }
  // Entries that no sequence needs are zero.
  at::Tensor output_chunk_states(void*& states, DType& dtype, at::ScalarType type);
  at::Tensor not_asked_for(at::ScalarType dtype) const;

  // Makes `input` copy tensors whose rows do not start at multiples of 16 bytes. Call it first.
  void align_inputs() { aligns_inputs_ = true; }

  // The plan for the tensors passed so far. for_backward: forward stores results for backward.
  CallPlan plan(bool batch_invariant, bool for_backward, bool in_halves = false) const;
  // The memory for these results, of the size that the caller was told. Unused if the plan's
  // differs.
  at::Tensor output_for_backward(const CallPlan& plan, int64_t bytes);
  // In backward, takes that memory. Returns whether it is used: not by the steps, nor if the plan's
  // size differs, as it then did in forward.
  bool input_for_backward(const CallPlan& plan, const at::Tensor& for_backward);
  // Allocates the workspace and launches the kernels of a pass.
  void run(const PassPlan& pass);
  // In halves: the kernels of the summary, which write to `left` (the plan has its size); and the
  // others, which read it.
  void run_summary(const PassPlan& pass, const at::Tensor& left);
  void run_rest(const PassPlan& pass, const at::Tensor& left);
  // Like `run`, for a step on its own. tiers: with tiers, made from b.
  void run_step(std::initializer_list<Kernel> kernels, bool tiers = false);

 private:
  const at::Tensor& contiguous(const at::Tensor& t);
  void allocate(const Workspace& workspace);
  void launch(const Recipe& kernels, int first, int end) const;
  void start(const PassPlan& pass);
  void place(const Workspace& workspace, const at::Tensor& memory);
  void place(const Workspace& workspace, char* base);
  void clear_decays();
  void spread_head_gate();
  Rows rows_in(char* part, int64_t last_dim, DType dtype) const;

  at::TensorOptions options_;
  const char* op_;
  at::Tensor workspace_, offsets_;
  at::Tensor head_gate_;  // [B, T, HK], if there is a gate per head
  bool aligns_inputs_ = false;
};

}  // namespace gla_ext::cuda
