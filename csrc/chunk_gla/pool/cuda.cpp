// chunk_gla_ on CUDA: check, plan, allocate, launch. The kernels read and write the pool. Sequences
// of one token go to the recurrence, which reads no chunk for them, but not in batch_invariant
// mode. There a sequence must have the same bits in one piece and in segments, and its last segment
// may be one token.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>

#include "common/heads.h"
#include "common/tensors.h"
#include "cuda/host/call.h"
#include "cuda/host/tensors.h"
#include "op.h"
#include "recurrent_gla/cuda_pool.h"

namespace gla_ext::cuda {
namespace {

// The longest sequences that the recurrence takes. Only the length decides, so a sequence's bits do
// not depend on other sequences. Checkpoints come after 64 tokens, so it has none to make.
constexpr int64_t kRecurrentTokens = 1;

StatePool pool_of(const at::Tensor& t) {
  StatePool pool;
  pool.data = const_cast<void*>(t.const_data_ptr());
  pool.dtype = dtype_of(t.scalar_type());
  pool.rows = t.size(0);
  pool.stride_n = t.stride(0);
  pool.stride_h = t.stride(1);
  return pool;
}

// The tensors behind the pointers are held by `held`.
PoolRows rows_of(const PoolArguments& a, std::vector<at::Tensor>& held) {
  const auto hold = [&](const OptionalTensor& t) {
    const OptionalTensor c = contiguous(t);
    if (given(c)) held.push_back(*c);
    return c;
  };
  PoolRows rows;
  rows.states = pool_of(a.state);
  rows.slots = indices_of(hold(a.slots));
  rows.write_slots = indices_of(hold(a.write_slots));
  rows.has_initial = static_cast<const bool*>(data_of(hold(a.has_initial_state)));
  if (a.checkpoint_every == 0) return rows;
  rows.checkpoint_chunks = static_cast<int32_t>(a.checkpoint_every / kChunk);
  rows.checkpoints = given(a.checkpoints) ? pool_of(*a.checkpoints) : rows.states;
  rows.checkpoint_slots = indices_of(hold(a.checkpoint_slots));
  rows.checkpoint_starts = indices_of(hold(a.checkpoint_cu_starts));
  rows.checkpoint_count =
      given(a.checkpoint_slots) ? a.checkpoint_slots->numel() : rows.checkpoints.rows;
  return rows;
}

// The short sequences of a call whose Problem is ready.
Recurrence short_sequences_of(const Call& call, const PoolArguments& a, const PoolRows& rows) {
  const Problem& p = call.problem;
  Recurrence r{.B = p.grid.B, .T = p.grid.T, .N = p.grid.N, .H = p.H, .K = p.K, .V = p.V};
  r.scale = p.scale;
  r.state_v_first = p.state_v_first;
  r.q = p.q;
  r.k = p.k;
  r.v = p.v;
  r.gk = p.g;
  r.gk_step = is_head_gate(a.g) ? 0 : 1;
  r.gv = call.value_side.g;
  r.o = p.o;
  r.cu_seqlens = {p.grid.cu_seqlens, p.grid.offsets_are_int64};
  use_pool(r, a.state, /*write=*/true);
  r.slots = rows.slots;
  r.write_slots = rows.write_slots;
  r.has_initial = rows.has_initial;
  r.most_tokens = kRecurrentTokens;
  return r;
}

// Leaves short packed sequences to the recurrence. `others` gets the rows of the others.
void leave_short_sequences(Problem& p, at::Tensor& others) {
  p.short_sequences = {.most_tokens = kRecurrentTokens, .slots = p.pool.slots};
  p.short_sequences.others = others.mutable_data_ptr<int64_t>();
  p.pool.slots = {others.const_data_ptr(), /*are_int64=*/true};
}

// The tensor to which kernels write o: the caller's `out`, if its layout is that of a fresh tensor.
at::Tensor o_of(Call& call, const PoolArguments& a) {
  Problem& p = call.problem;
  const bool is_like_fresh = a.out != nullptr && a.out->scalar_type() == call.dtype &&
                             a.out->is_contiguous() && starts_aligned(a.out->const_data_ptr());
  if (!is_like_fresh) return call.output(p.o, p.V, call.dtype);
  p.o = cuda::rows_of(*a.out);
  return *a.out;
}

at::Tensor chunk_gla_on_pool_cuda(const PoolArguments& a) {
  const Shape shape = check_chunk_gla_on_pool(a);
  check_pool_layouts(a);
  Call call("chunk_gla_", shape, a.q, a.cu_seqlens, a.scale, given(a.gv));
  Problem& p = call.problem;
  call.inputs(a);
  p.past_alone = a.batch_invariant;
  std::vector<at::Tensor> held;
  p.pool = rows_of(a, held);
  at::Tensor o = o_of(call, a);
  at::Tensor result = o;
  if (a.out != nullptr)
    result = *a.out;
  else if (call.fp16_in_fp32)
    result = at::empty_like(o, o.options().dtype(at::kHalf));
  if (a.state.size(0) == 0) return result.zero_();  // no sequence has a row
  const PassPlan pass = call.plan(a.batch_invariant, /*for_backward=*/false).forward;
  const Recurrence short_sequences = short_sequences_of(call, a, p.pool);
  const bool may_recur = !a.batch_invariant;
  if (may_recur && p.grid.packed && p.grid.N > 0)
    leave_short_sequences(p,
                          held.emplace_back(at::empty({p.grid.N}, a.q.options().dtype(at::kLong))));
  // This allocates before it launches, so a call that lacks memory changes no state.
  const bool all_short = !p.grid.packed && p.grid.T <= kRecurrentTokens;
  if (!may_recur || !all_short) call.run(pass);
  // Packed sequences may have any length, which only the device knows.
  if (may_recur && (p.grid.packed || all_short)) {
    recurrent_forward(short_sequences, at::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  if (!result.is_same(o)) result.copy_(o);
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) { register_on_pool<chunk_gla_on_pool_cuda>(m); }

}  // namespace gla_ext::cuda
