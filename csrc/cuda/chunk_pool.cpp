// chunk_gla_ on CUDA: check, plan, allocate, launch. The kernels read and write the pool.
#include "checks/chunk_pool.h"

#include <torch/library.h>

#include "host/call.h"
#include "host/tensors.h"

namespace gla_ext::cuda {
namespace {

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
  const auto hold = [&](const OptionalTensor& t) -> const void* {
    return given(t) ? held.emplace_back(t->contiguous()).const_data_ptr() : nullptr;
  };
  const auto indices = [&](const OptionalTensor& t) -> Indices {
    return {hold(t), given(t) && t->scalar_type() == at::kLong};
  };
  PoolRows rows;
  rows.states = pool_of(a.state);
  rows.slots = indices(a.slots);
  rows.write_slots = indices(a.write_slots);
  rows.has_initial = static_cast<const bool*>(hold(a.has_initial_state));
  if (a.checkpoint_every == 0) return rows;
  rows.checkpoint_chunks = static_cast<int32_t>(a.checkpoint_every / kChunk);
  rows.checkpoints = given(a.checkpoints) ? pool_of(*a.checkpoints) : rows.states;
  rows.checkpoint_slots = indices(a.checkpoint_slots);
  rows.checkpoint_starts = indices(a.checkpoint_cu_starts);
  rows.checkpoint_count =
      given(a.checkpoint_slots) ? a.checkpoint_slots->numel() : rows.checkpoints.rows;
  return rows;
}

at::Tensor chunk_gla_on_pool_cuda(const PoolArguments& a) {
  Shape shape = check_chunk_gla_on_pool(a);
  check_pool_layouts(a);
  const bool in_fp32 =
      shape.dtype != at::kDouble && becomes_fp32(dtype_of(shape.dtype), given(a.gv));
  if (in_fp32) shape.dtype = at::kFloat;
  Call call("chunk_gla_", shape, a.q, a.cu_seqlens, a.scale);
  Problem& p = call.problem;
  p.tf32 |= in_fp32;
  p.whole_scores = true;
  p.state_v_first = a.state_v_first;
  call.input(p.q, a.q, shape.dtype);
  call.input(p.k, a.k, shape.dtype);
  call.input(p.v, a.v, shape.dtype);
  call.input_gates(a.g, a.gv);
  std::vector<at::Tensor> held;
  p.pool = rows_of(a, held);
  at::Tensor o = call.output(p.o, p.V, shape.dtype);
  if (a.state.size(0) == 0) return o.zero_();  // no sequence has a row
  call.run(call.plan(a.batch_invariant, /*for_backward=*/false).forward);
  return in_fp32 ? o.to(at::kHalf) : o;
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, CUDA, m) { m.impl("chunk_gla_", positional<chunk_gla_on_pool_cuda>); }

}  // namespace gla_ext::cuda
