#include "call.h"

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "common/heads.h"
#include "dispatch/checker.h"
#include "launchers.h"
#include "plan_inputs.h"
#include "tensors.h"

namespace gla_ext::cuda {
namespace {

constexpr int64_t kMaxTokenStride = (int64_t{1} << 31) / kChunk;  // elements, see Rows

// Checks the largest token stride of copied tensors, outputs and scores.
void check_token_stride(const char* op, const Shape& shape) {
  const int64_t H = shape.H.expect_int(), K = shape.K.expect_int(), V = shape.V.expect_int();
  TORCH_CHECK_NOT_IMPLEMENTED(H <= (kMaxTokenStride - 1) / std::max({K, V, kChunk}), op,
                              ": expected H * max(K, V, ", kChunk, ") to be less than ",
                              kMaxTokenStride, " on CUDA, got H = ", H, ", K = ", K,
                              " and V = ", V);
}

// Checks the size of grids. A block has some channels and values of a chunk, or of a sequence.
void check_grid(const char* op, const ChunkGrid& grid, int64_t H, int64_t K, int64_t V) {
  constexpr int64_t kChannels = 32, kValues = 64;  // of the smallest blocks
  const int64_t blocks_each = (K + kChannels - 1) / kChannels * ((V + kValues - 1) / kValues);
  const int64_t chunks = std::max(grid.B * grid.entries, grid.N);
  TORCH_CHECK_NOT_IMPLEMENTED(H == 0 || chunks <= kMaxBlocks / blocks_each / H, op,
                              ": expected chunks * H * ceil(K / ", kChannels, ") * ceil(V / ",
                              kValues, ") to be at most ", kMaxBlocks, " on CUDA, got ", chunks,
                              " chunks, H = ", H, ", K = ", K, " and V = ", V);
}

bool tf32_allowed() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

}  // namespace

Call::Call(const char* op, const Shape& shape, const at::Tensor& like,
           const OptionalTensor& cu_seqlens, std::optional<double> scale, bool value_gated)
    : Launch(like.device()), dtype(shape.dtype), options_(like.options()), op_(op) {
  check_supported(op, shape, like.device());
  check_token_stride(op, shape);
  Problem& p = problem;
  p.grid = make_grid(shape.N.expect_int(), shape.T.expect_int(), shape.packed);
  p.grid.B = shape.B.expect_int();
  if (shape.packed) {
    offsets_ = cu_seqlens->contiguous();
    p.grid.cu_seqlens = offsets_.const_data_ptr();
    p.grid.offsets_are_int64 = offsets_.scalar_type() == at::kLong;
  }
  p.H = static_cast<int32_t>(shape.H.expect_int());
  p.K = static_cast<int32_t>(shape.K.expect_int());
  p.V = static_cast<int32_t>(shape.V.expect_int());
  p.scale = static_cast<float>(resolve_scale(scale, p.K));
  p.processors = multiprocessors_of(like.device());
  fp16_in_fp32 = becomes_fp32(dtype_of(dtype), value_gated);
  if (fp16_in_fp32) dtype = at::kFloat;
  p.dtype = dtype_of(dtype);
  check_grid(op, p.grid, p.H, p.K, p.V);
  p.tf32 = fp16_in_fp32 || (p.dtype == DType::kFloat && tf32_allowed());
}

const at::Tensor& Call::contiguous(const at::Tensor& t) {
  if (!t.is_contiguous()) return hold(t.contiguous());
  return starts_aligned(t.const_data_ptr()) ? t : hold(t.clone());
}

void Call::input(Rows& rows, const at::Tensor& t) {
  const bool addressable = t.stride(1) < kMaxTokenStride;
  rows = rows_of(has_contiguous_rows(t) && addressable ? t : hold(t.contiguous()));
  if (aligns_inputs_ && !rows.aligned) rows = rows_of(hold(t.clone(at::MemoryFormat::Contiguous)));
  share_heads(op_, rows, t.size(2), problem.H);
}

void Call::input(Rows& rows, const at::Tensor& t, at::ScalarType dtype) {
  input(rows, t.scalar_type() == dtype ? t : hold(t.to(dtype)));
}

void Call::input_gates(const OptionalTensor& g, const OptionalTensor& gv) {
  key_gated = given(g);
  value_gated = given(gv);
  if (is_head_gate(g)) head_gate_ = *g;
  if (key_gated) input(problem.g, is_head_gate(g) ? g->unsqueeze(-1) : *g);
  if (!value_gated) return;
  check_grid(op_, problem.grid, problem.H, problem.V, problem.K);
  value_side.H = problem.H;
  value_side.K = problem.V;
  value_side.V = problem.K;
  value_side.scale = problem.scale;
  value_side.dtype = problem.dtype;
  value_side.tf32 = problem.tf32;
  value_side.whole_scores = true;
  value_side.q = problem.d_o;
  value_side.k = problem.v;
  input(value_side.g, *gv);
}

void Call::spread_head_gate() {
  if (head_gate_.defined()) input(problem.g, over_channels(head_gate_, problem.K));
}

const float* Call::input_state(const OptionalTensor& t) {
  return given(t) ? contiguous(*t).const_data_ptr<float>() : nullptr;
}

void Call::input_chunk_states(void*& states, DType& dtype, const at::Tensor& t) {
  states = const_cast<void*>(contiguous(t).const_data_ptr());
  dtype = dtype_of(t.scalar_type());
}

at::Tensor Call::output(Rows& rows, int64_t last_dim, at::ScalarType dtype) {
  at::Tensor t =
      at::empty({problem.grid.B, problem.grid.T, problem.H, last_dim}, options_.dtype(dtype));
  rows = rows_of(t);
  return t;
}

at::Tensor Call::gate_grad(Rows& rows, int64_t last_dim, const OptionalTensor& g) {
  return given(g) ? output(rows, last_dim, gate_grad_dtype(g, at::kFloat))
                  : not_asked_for(at::kFloat);
}

at::Tensor Call::head_gate_grad(Rows& rows, const OptionalTensor& g) {
  return given(g) && gate_gradient ? output(rows, 1, g->scalar_type()) : not_asked_for(at::kFloat);
}

at::Tensor Call::output_state(float*& state) {
  const Problem& p = problem;
  at::Tensor t =
      at::empty({p.grid.N, p.H, p.state_v_first ? p.V : p.K, p.state_v_first ? p.K : p.V},
                options_.dtype(at::kFloat));
  state = t.mutable_data_ptr<float>();
  return t;
}

at::Tensor Call::output_chunk_states(void*& states, DType& dtype, at::ScalarType type) {
  const Problem& p = problem;
  const std::array<int64_t, 5> sizes{p.grid.B, p.grid.chunks, p.H, p.K, p.V};
  const auto options = options_.dtype(type);
  at::Tensor t = p.grid.packed ? at::zeros(sizes, options) : at::empty(sizes, options);
  states = t.mutable_data_ptr();
  dtype = dtype_of(type);
  return t;
}

at::Tensor Call::not_asked_for(at::ScalarType dtype) const {
  return at::empty({0}, options_.dtype(dtype));
}

CallPlan Call::plan(bool batch_invariant, bool for_backward, bool in_halves) const {
  const Problem& p = problem;
  PlanInputs in = plan_inputs(options_.device(), p.grid, p.H, p.K, p.V, p.dtype, p.g.dtype);
  in.batch_invariant = batch_invariant;
  in.aligned = true;
  for (const Rows* r : {&p.q, &p.k, &p.v, &p.d_o})
    if (r->data != nullptr) in.aligned &= r->aligned;
  in.head_gated = head_gate_.defined();
  if (key_gated && !in.head_gated) in.aligned &= p.g.aligned;
  in.gate_gradient = gate_gradient;
  in.key_gated = key_gated;
  in.value_gated = value_gated;
  in.value_gate_dtype = value_side.g.dtype;
  in.for_backward = for_backward;
  in.in_halves = in_halves;
  in.on_pool = p.pool.states.data != nullptr;
  const char* missing = in.choice == PathChoice::kFused ? why_not_fused(in) : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(missing == nullptr, op_, ": GLA_EXT_CUDA_PATH=fused expected ",
                              missing, ", got a call that only the step path takes");
  return make_plan(in);
}

void Call::start(const PassPlan& pass) {
  if (!pass.reads_head_gates) spread_head_gate();
  static_cast<Segments&>(problem.grid) = pass.segments;
  problem.items_each = static_cast<int32_t>(pass.items_each);
}

void Call::run(const PassPlan& pass) {
  start(pass);
  allocate(pass.workspace);
  launch(pass.kernels, 0, pass.kernels.size());
}

void Call::run_summary(const PassPlan& pass, const at::Tensor& left) {
  start(pass);
  place(pass.summary, left);
  if (pass.summary.has(Buffer::kSummaries)) problem.segment_states = problem.summaries;
  if (pass.summary.has(Buffer::kSummaryGrads)) problem.segment_state_grads = problem.summary_grads;
  launch(pass.kernels, 0, pass.summary_kernels);
}

void Call::run_rest(const PassPlan& pass, const at::Tensor& left) {
  start(pass);
  place(pass.summary, left);
  allocate(pass.workspace);
  launch(pass.kernels, pass.summary_kernels, pass.kernels.size());
}

at::Tensor Call::output_for_backward(const CallPlan& plan, int64_t bytes) {
  // Backward may be on another path by then, and could not notice.
  TORCH_CHECK_NOT_IMPLEMENTED(
      bytes == 0 || plan.path == Path::kFused, op_,
      ": expected for_backward_bytes to be 0 in the step path, got ", bytes,
      "; a graph that keeps prepared chunks for backward was compiled for the fused path, without "
      "GLA_EXT_CUDA_PATH=steps and for a GPU that has it: compile it again, without torch's caches "
      "(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)");
  at::Tensor for_backward = at::empty({bytes}, options_.dtype(at::kByte));
  if (bytes > 0 && bytes == plan.for_backward.bytes())
    place(plan.for_backward, static_cast<char*>(for_backward.mutable_data_ptr()));
  return for_backward;
}

bool Call::input_for_backward(const CallPlan& plan, const at::Tensor& for_backward) {
  if (plan.path != Path::kFused || for_backward.numel() != plan.for_backward.bytes()) return false;
  const void* data = contiguous(for_backward).const_data_ptr();
  place(plan.for_backward, static_cast<char*>(const_cast<void*>(data)));
  return true;
}

void Call::allocate(const Workspace& w) {
  if (w.bytes() == 0) return;
  workspace_ = at::empty({w.bytes()}, options_.dtype(at::kByte));
  place(w, static_cast<char*>(workspace_.mutable_data_ptr()));
  if (w.has(Buffer::kNoDecay)) clear_decays();
  if (!w.has(Buffer::kBv)) return;
  value_side.grid = problem.grid;
  value_side.A = problem.dA;
  value_side.dA = problem.A;
}

void Call::place(const Workspace& w, const at::Tensor& memory) {
  place(w, static_cast<char*>(const_cast<void*>(memory.const_data_ptr())));
}

// Assigns each of its buffers to the field that kernels read.
void Call::place(const Workspace& w, char* base) {
  Problem &p = problem, &v = value_side;
  const DType short_type = intermediate_dtype(p.dtype), fp32 = DType::kFloat;
  const auto pointer = [&](Buffer buffer, auto*& field) {
    using Pointer = std::remove_reference_t<decltype(field)>;
    if (w.has(buffer)) field = reinterpret_cast<Pointer>(base + w.start(buffer));
  };
  const auto states = [&](Buffer buffer, void*& field, DType& dtype) {
    pointer(buffer, field);
    if (w.has(buffer)) dtype = short_type;
  };
  const auto rows = [&](Buffer buffer, Rows& field, int64_t last_dim, DType dtype) {
    if (w.has(buffer)) field = rows_in(base + w.start(buffer), last_dim, dtype);
  };
  static_assert(kBuffers == 30, "each has its line below");
  pointer(Buffer::kSequences, p.grid.sequences);
  pointer(Buffer::kChunkEntries, p.grid.chunk_entries);
  pointer(Buffer::kByLastSegment, p.grid.by_last_segment);
  pointer(Buffer::kCutSequences, p.cut_sequences);
  pointer(Buffer::kTotals, p.grid.totals);
  pointer(Buffer::kTiers, p.tiers);
  rows(Buffer::kB, p.b, p.K, fp32);
  rows(Buffer::kBSuffix, p.b_suffix, p.K, fp32);
  if (w.has(Buffer::kNoDecay))
    p.b = rows_of(base + w.start(Buffer::kNoDecay), fp32, {1, 1, 1}, {0, 0, 0});
  rows(Buffer::kA, p.A, kChunk, short_type);
  rows(Buffer::kDA, p.dA, kChunk, short_type);
  states(Buffer::kS, p.S, p.S_dtype);
  states(Buffer::kDS, p.dS, p.dS_dtype);
  rows(Buffer::kDqIntra, p.dq_intra, p.K, fp32);
  rows(Buffer::kDkIntra, p.dk_intra, p.K, fp32);
  rows(Buffer::kDgIntra, p.dg_intra, p.K, fp32);
  rows(Buffer::kBv, v.b, p.V, fp32);
  rows(Buffer::kBvSuffix, v.b_suffix, p.V, fp32);
  pointer(Buffer::kValueTiers, v.tiers);
  rows(Buffer::kVOut, p.v, p.V, short_type);
  rows(Buffer::kDoIn, p.d_o, p.V, short_type);
  rows(Buffer::kOIntra, v.dq_intra, p.V, fp32);
  rows(Buffer::kDvIntra, v.dk_intra, p.V, fp32);
  rows(Buffer::kDgvIntra, v.dg_intra, p.V, fp32);
  pointer(Buffer::kSegmentStates, p.segment_states);
  pointer(Buffer::kSegmentStateGrads, p.segment_state_grads);
  pointer(Buffer::kSegmentDecays, p.segment_decays);
  pointer(Buffer::kPrepared, p.prepared);
  pointer(Buffer::kSummaries, p.summaries);
  pointer(Buffer::kSummaryGrads, p.summary_grads);
}

Rows Call::rows_in(char* part, int64_t last_dim, DType dtype) const {
  const int64_t B = problem.grid.B, T = problem.grid.T, H = problem.H;
  return rows_of(part, dtype, {B, T, H}, {T * H * last_dim, H * last_dim, last_dim});
}

// Without gates b is one row of zeros, and every chunk is in tier 1.
void Call::clear_decays() {
  const Problem& p = problem;
  C10_CUDA_CHECK(cudaMemsetAsync(p.b.data, 0, p.K * sizeof(float), stream()));
  const size_t flags = p.grid.B * p.grid.entries * p.H * kMaxTierBlocks;
  C10_CUDA_CHECK(cudaMemsetAsync(p.tiers, 0, flags, stream()));
}

void Call::run_step(std::initializer_list<Kernel> kernels, bool tiers) {
  allocate(step_workspace(problem.grid, problem.H, tiers));
  const Recipe recipe = step_recipe(problem.grid, kernels);
  launch(recipe, 0, recipe.size());
}

void Call::launch(const Recipe& kernels, int first, int end) const {
  for (const auto* entry = kernels.begin() + first; entry != kernels.begin() + end; ++entry) {
    const auto [kernel, side] = *entry;
    cuda::launch(kernel, side == Side::kKeys ? problem : value_side, value_side, stream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

}  // namespace gla_ext::cuda
