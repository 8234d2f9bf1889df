// The recurrent operators on CUDA, over sequences and on a pool of states: check, allocate, launch.
#include <limits>
#include <numeric>
#include <vector>

#include "buffered.h"
#include "common/heads.h"
#include "cuda/host/launch.h"
#include "cuda/host/plan_inputs.h"
#include "cuda_pool.h"
#include "dispatch/output.h"
#include "low_rank_step.h"
#include "op.h"

namespace gla_ext::cuda {
namespace {

// Called once the states' strides and pointers are set.
void find_state_alignment(Recurrence& p) {
  const int64_t columns = p.state_v_first ? p.K : p.V;
  p.state_aligned = columns % 4 == 0 && p.state_stride_n % 4 == 0 && p.state_stride_h % 4 == 0 &&
                    starts_aligned(p.state_in) && starts_aligned(p.state_out);
}

}  // namespace

void use_pool(Recurrence& p, const at::Tensor& state, bool write) {
  p.state_in = state.const_data_ptr();
  if (write) p.state_out = const_cast<void*>(p.state_in);
  p.state_dtype = dtype_of(state.scalar_type());
  p.slots_in_pool = state.size(0);
  // The stride of a single matrix may be anything; it must not prevent 16-byte access.
  p.state_stride_n = state.size(0) > 1 ? state.stride(0) : 0;
  p.state_stride_h = state.size(1) > 1 ? state.stride(1) : 0;
  find_state_alignment(p);
}

namespace {

class RecurrentCall : Launch {
 public:
  RecurrentCall(const char* op, const Shape& shape, const at::Tensor& like,
                std::optional<double> scale)
      : Launch(like.device()), options_(like.options()), op_(op) {
    check_supported(op, shape, like.device());
    p.B = shape.B.expect_int();
    p.T = shape.T.expect_int();
    p.N = shape.N.expect_int();
    p.K = static_cast<int32_t>(shape.K.expect_int());
    p.V = static_cast<int32_t>(shape.V.expect_int());
    check_heads(op, shape);
    p.H = static_cast<int32_t>(shape.H.expect_int());
    p.scale = static_cast<float>(resolve_scale(scale, p.K));
  }

  Recurrence p;

  void input(Rows& rows, const at::Tensor& t) {
    rows = rows_of(has_contiguous_rows(t) ? t : hold(t.contiguous()));
    share_heads(op_, rows, t.size(2), p.H);
  }
  void input(Rows& rows, const OptionalTensor& t) {
    if (given(t)) input(rows, *t);
  }
  // A gate per head is read in place, except by drafts, which read four channels at once.
  void input_key_gate(const OptionalTensor& t, bool by_channels = false) {
    if (!given(t)) return;
    const bool in_place = is_head_gate(t) && !by_channels;
    if (in_place) p.gk_step = 0;
    input(p.gk, in_place ? t->unsqueeze(-1) : over_channels(*t, p.K));
  }
  const float* input_state(const OptionalTensor& t) {
    if (!given(t)) return nullptr;
    return contiguous(*t).const_data_ptr<float>();
  }
  void input(Indices& indices, const OptionalTensor& t) {
    if (given(t)) indices = indices_of(contiguous(*t));
  }

  // Fresh outputs; a gradient only if its tensor is given.
  at::Tensor output(Rows& rows, int64_t last_dim, at::ScalarType dtype) {
    at::Tensor t = at::empty({p.B, p.T, p.H, last_dim}, options_.dtype(dtype));
    rows = rows_of(t);
    return t;
  }
  at::Tensor gradient(Rows& rows, int64_t last_dim, const OptionalTensor& of) {
    return given(of) ? output(rows, last_dim, gate_grad_dtype(of, at::kFloat)) : not_asked_for();
  }
  template <class States>  // float or void
  at::Tensor output_states_if(bool asked_for, States*& states) {
    if (!asked_for) return not_asked_for();
    at::Tensor t = at::empty({p.N, p.H, p.state_v_first ? p.V : p.K, p.state_v_first ? p.K : p.V},
                             options_.dtype(at::kFloat));
    states = t.mutable_data_ptr<float>();
    return t;
  }
  at::Tensor not_asked_for() const { return at::empty({0}, options_.dtype(at::kFloat)); }

  // States of every sequence, contiguous.
  void use_sequence_states() {
    p.state_stride_h = int64_t{p.K} * p.V;
    p.state_stride_n = p.state_stride_h * p.H;
    find_state_alignment(p);
  }

  // Shared memory that a block may have on this GPU.
  static int shared_bytes() {
    int device = 0, bytes = 0;
    C10_CUDA_CHECK(cudaGetDevice(&device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
  }
  void forward() { launch(recurrent_forward, p); }
  void low_rank_step(LowRankGate gate) {
    gate.overlaps = gate.overlaps && takes_dependent_launch(options_.device());
    launch(recurrent_low_rank_step, p, gate);
  }
  void buffered_step(const BufferedStep& a) {
    Buffers b;
    b.HK = static_cast<int32_t>(a.k.size(2));
    b.group = static_cast<int32_t>(p.H / std::max(b.HK, 1));
    b.L = static_cast<int32_t>(a.buffer_k.size(1));
    b.Kp = (p.K + 7) / 8 * 8;
    input(b.k, a.buffer_k);
    input(b.v, a.buffer_v);
    input(b.g, a.buffer_g);
    input(b.count, a.count);
    // As many tokens at once as find room on the GPU together with all rows and heads: there are
    // registers for eight blocks of one token.
    const int64_t rooms = 8 * multiprocessors() / std::max<int64_t>(p.B * p.H, 1);
    b.tokens = static_cast<int32_t>(std::clamp<int64_t>(rooms, 1, std::min<int64_t>(p.T, 4)));
    const int64_t queries = p.B * p.H * p.T, keys = p.B * b.HK;
    float** parts[]{&b.scores, &b.queries, &b.keys, &b.values};
    const int64_t sizes[]{queries * kMostBuffered, queries * b.Kp, keys * kFoldRows * b.Kp,
                          keys * p.T * p.V};
    float* next = scratch(std::accumulate(std::begin(sizes), std::end(sizes), int64_t{0}));
    for (int i = 0; i < 4; ++i) *parts[i] = next, next += sizes[i];
    launch(recurrent_buffered_step, p, b, takes_dependent_launch(options_.device()));
  }
  void verify() { launch(recurrent_verify, p, multiprocessors()); }
  void backward() {
    const auto plan = plan_recurrent_backward(p, multiprocessors());
    if (plan.kept > 0) p.kept = scratch(plan.kept);
    if (plan.replayed > 0) p.replayed = scratch(plan.replayed);
    if (plan.partials > 0) p.partials = scratch(plan.partials);
    launch(recurrent_backward, p, plan);
  }

 private:
  float* scratch(int64_t floats) {
    return hold(at::empty({floats}, options_.dtype(at::kFloat))).mutable_data_ptr<float>();
  }
  // The grid of a kernel has a block for at least kValues values of a head of a sequence.
  void check_heads(const char* op, const Shape& shape) const {
    constexpr int64_t kValues = 16;
    const int64_t H = shape.H.expect_int(), blocks = (p.V + kValues - 1) / kValues;
    TORCH_CHECK_NOT_IMPLEMENTED(
        H <= kMaxBlocks / blocks / (p.N + 1), op, ": expected (N + 1) * H * ceil(V / ", kValues,
        ") to be at most ", kMaxBlocks, " on CUDA, got N = ", p.N, ", H = ", H, " and V = ", p.V);
  }
  at::TensorOptions options_;
  const char* op_;
};

// The inputs of both passes over sequences, and do in backward.
template <class Arguments>
void take_inputs(RecurrentCall& call, const Arguments& a, const at::Tensor* d_o = nullptr) {
  Recurrence& p = call.p;
  p.reverse = a.reverse;
  p.state_v_first = a.state_v_first;
  call.input(p.q, a.q);
  call.input(p.k, a.k);
  call.input(p.v, a.v);
  call.input_key_gate(a.gk);
  call.input(p.gv, a.gv);
  if (d_o != nullptr) call.input(p.d_o, *d_o);
  call.input(p.cu_seqlens, a.cu_seqlens);
  p.state_in = call.input_state(a.initial_state);
}

RecurrentForwardOutputs recurrent_gla_fwd_cuda(const RecurrentForwardArguments& a) {
  RecurrentCall call("fused_recurrent_gla", check_recurrent_fwd(a), a.q, a.scale);
  Recurrence& p = call.p;
  take_inputs(call, a);
  at::Tensor o = call.output(p.o, p.V, a.v.scalar_type());
  at::Tensor final_state = call.output_states_if(a.output_final_state, p.state_out);
  call.use_sequence_states();
  call.forward();
  return {o, final_state};
}

BackwardOutputs recurrent_gla_bwd_cuda(const RecurrentBackwardArguments& a) {
  RecurrentCall call("recurrent_gla_bwd", check_recurrent_bwd(a), a.q, a.scale);
  Recurrence& p = call.p;
  take_inputs(call, a, &a.d_o);
  p.dht = call.input_state(a.dht);
  at::Tensor dq = call.output(p.dq, p.K, a.q.scalar_type());
  at::Tensor dk = call.output(p.dk, p.K, a.k.scalar_type());
  at::Tensor dv = call.output(p.dv, p.V, a.v.scalar_type());
  at::Tensor dgk = call.gradient(p.dgk, p.K, a.gk), dgv = call.gradient(p.dgv, p.V, a.gv);
  at::Tensor dh0 = call.output_states_if(given(a.initial_state), p.dh0);
  call.use_sequence_states();
  call.backward();
  return with_shared_heads({dq, dk, dv, sum_over_channels(dgk, a.gk), dgv, dh0}, a.k.size(2));
}

at::Tensor run_on_pool(const TokenInputs& in, const PoolInputs& pool, std::optional<double> scale,
                       bool write) {
  const Shape shape = check_pool(in, pool);
  check_layouts(in, pool, write);
  RecurrentCall call(in.op, shape, *in.k, scale);
  Recurrence& p = call.p;
  p.state_v_first = pool.state_v_first;
  call.input(p.k, *in.k);
  call.input(p.v, *in.v);
  call.input_key_gate(*in.gk, /*by_channels=*/!write);
  call.input(p.gv, *in.gv);
  call.input(p.slots, pool.slots);
  if (pool.write_slots != nullptr) call.input(p.write_slots, *pool.write_slots);
  if (pool.cu_seqlens != nullptr) call.input(p.cu_seqlens, *pool.cu_seqlens);
  if (pool.accepted != nullptr) call.input(p.accepted, *pool.accepted);
  at::Tensor o;
  if (in.q != nullptr) {
    call.input(p.q, *in.q);
    if (pool.out != nullptr)
      p.o = rows_of(o = *pool.out);
    else
      o = call.output(p.o, p.V, in.v->scalar_type());
  }
  use_pool(p, pool.state, write);
  if (write)
    call.forward();
  else
    call.verify();
  return o;
}

// The inputs of a token step that have the same name in each, and its o.
template <class Arguments>
at::Tensor take_step(RecurrentCall& call, const Arguments& a) {
  Recurrence& p = call.p;
  p.state_v_first = a.state_v_first;
  call.input(p.q, a.q);
  call.input(p.k, a.k);
  call.input(p.v, a.v);
  call.input(p.slots, a.slots);
  use_pool(p, a.state, /*write=*/true);
  return call.output(p.o, p.V, a.v.scalar_type());
}

at::Tensor low_rank_step_cuda(const LowRankStep& a) {
  const char* op = "recurrent_gla_low_rank_step_";
  Shape shape = check_low_rank_step(a);
  const int64_t R = a.h.size(2), K = a.k.size(3);
  const bool is_short = a.q.scalar_type() == at::kBFloat16 || a.q.scalar_type() == at::kHalf;
  const at::Tensor h = a.h.is_contiguous() ? a.h : a.h.contiguous();
  const at::Tensor weight =
      a.gate_weight.is_contiguous() ? a.gate_weight : a.gate_weight.contiguous();
  if (!is_short || a.state.scalar_type() != at::kFloat || R % 8 != 0 || R > kMostLowRank ||
      !starts_aligned(h.const_data_ptr()) || !starts_aligned(weight.const_data_ptr()))
    return composed_low_rank_step(a);
  check_pool_layout(op, a.state, /*written=*/true);
  shape.N = shape.B;  // a run is a row
  RecurrentCall call(op, shape, a.q, a.scale);
  at::Tensor o = take_step(call, a);
  LowRankGate gate{.h = h.const_data_ptr(), .h_stride = R, .rank = static_cast<int32_t>(R)};
  // A head's K rows of the weight, and its K biases, are passed as a row of one token.
  call.input(gate.weight, weight.view({1, 1, a.k.size(2), K * R}));
  if (given(a.gate_bias)) call.input(gate.bias, a.gate_bias->reshape({1, 1, a.k.size(2), K}));
  gate.per_normalizer = static_cast<float>(1 / a.normalizer);
  gate.clamp_min = a.clamp_min.has_value() ? static_cast<float>(*a.clamp_min)
                                           : -std::numeric_limits<float>::infinity();
  const auto is_copied = [](const OptionalTensor& t) { return given(t) && !t->is_contiguous(); };
  // Inputs that are read early must not be made by the previous kernel.
  gate.overlaps =
      a.overlaps && !is_copied(a.gate_weight) && !is_copied(a.gate_bias) && !is_copied(a.slots);
  call.low_rank_step(gate);
  return o;
}

at::Tensor buffered_step_cuda(const BufferedStep& a) {
  const char* op = "recurrent_gla_buffered_step_";
  Shape shape = check_buffered_step(a);
  check_buffer_layouts(a);
  TORCH_CHECK_NOT_IMPLEMENTED(a.buffer_k.size(1) <= kMostBuffered, op,
                              ": expected L, the tokens of ", "a buffer, to be at most ",
                              kMostBuffered, " on CUDA, got ", a.buffer_k.size(1));
  TORCH_CHECK_NOT_IMPLEMENTED(a.state.size(0) <= kMaxBlocks, op, ": expected at most ", kMaxBlocks,
                              " slots on CUDA, got ", a.state.size(0));
  RecurrentCall call(op, shape, a.q, a.scale);
  TORCH_CHECK_NOT_IMPLEMENTED(
      call.p.K <= kMostBufferedKeys || call.shared_bytes() >= kManyKeysBytes, op,
      ": expected K to be at most ", kMostBufferedKeys, " on a GPU of less than ",
      kManyKeysBytes >> 10, " KiB of shared memory a block, got ", call.p.K);
  at::Tensor o = take_step(call, a);
  call.input_key_gate(a.gk);
  call.buffered_step(a);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) {
  m.impl("recurrent_gla_fwd", by_arguments<recurrent_gla_fwd, recurrent_gla_fwd_cuda>);
  m.impl("recurrent_gla_bwd", by_arguments<recurrent_gla_bwd, recurrent_gla_bwd_cuda>);
  m.impl("recurrent_gla_low_rank_step_", positional<low_rank_step_cuda>);
  m.impl("recurrent_gla_buffered_step_",
         by_arguments<recurrent_gla_buffered_step_, buffered_step_cuda>);
  RecurrentOnPool<run_on_pool>::register_in(m);
}

}  // namespace gla_ext::cuda
