#include "call.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <string_view>
#include <type_traits>

#include "autograd/for_backward.h"
#include "cuda/sm90/sm90.h"
#include "launch_table.h"
#include "tensors.h"

namespace gla_ext::cuda {
namespace {

constexpr int64_t kMaxTokenStride = (int64_t{1} << 31) / kChunk;  // elements, see Rows

// A copy of a tensor, an output or the scores may have this stride.
void check_token_stride(const char* op, const Shape& shape) {
  const int64_t H = shape.H.expect_int(), K = shape.K.expect_int(), V = shape.V.expect_int();
  TORCH_CHECK_NOT_IMPLEMENTED(H <= (kMaxTokenStride - 1) / std::max({K, V, kChunk}), op,
                              ": expected H * max(K, V, ", kChunk, ") to be less than ",
                              kMaxTokenStride, " on CUDA, got H = ", H, ", K = ", K,
                              " and V = ", V);
}

// The grid of any kernel: its blocks are some channels and values of a chunk, or of a sequence.
void check_grid(const char* op, const ChunkGrid& grid, int64_t H, int64_t K, int64_t V) {
  constexpr int64_t kChannels = 32, kValues = 64;  // of the smallest blocks
  const int64_t blocks_each = (K + kChannels - 1) / kChannels * ((V + kValues - 1) / kValues);
  const int64_t chunks = std::max(grid.B * grid.slots, grid.N);
  TORCH_CHECK_NOT_IMPLEMENTED(H == 0 || chunks <= kMaxBlocks / blocks_each / H, op,
                              ": expected chunks * H * ceil(K / ", kChannels, ") * ceil(V / ",
                              kValues, ") to be at most ", kMaxBlocks, " on CUDA, got ", chunks,
                              " chunks, H = ", H, ", K = ", K, " and V = ", V);
}

PathChoice path_choice() {
  const char* forced = std::getenv("GLA_EXT_CUDA_PATH");
  const std::string_view path = forced == nullptr ? "" : forced;
  if (path == "fused") return PathChoice::kFused;
  if (path == "steps") return PathChoice::kSteps;
  TORCH_CHECK_VALUE(path.empty(), "GLA_EXT_CUDA_PATH: expected fused or steps, got ", path);
  return PathChoice::kAny;
}

// Asked once a device, which is the current one.
bool sm90_built(c10::DeviceIndex device) {
  enum : int8_t { kUnknown, kAbsent, kBuilt };
  static std::array<std::atomic<int8_t>, 64> known{};
  std::atomic<int8_t>& mine = known[static_cast<size_t>(device) % known.size()];
  if (mine.load(std::memory_order_relaxed) == kUnknown)
    mine.store(sm90::available() ? kBuilt : kAbsent, std::memory_order_relaxed);
  return mine.load(std::memory_order_relaxed) == kBuilt;
}

bool takes_sm90(c10::Device device) {
  const cudaDeviceProp& gpu = *at::cuda::getDeviceProperties(device.index());
  return gpu.major == 9 && gpu.minor == 0 && sm90_built(device.index());
}

// A call as far as its sizes, dtypes and GPU say.
PlanInputs plan_inputs(c10::Device device, const ChunkGrid& grid, int64_t H, int64_t K, int64_t V,
                       DType dtype, DType gate_dtype) {
  PlanInputs in{};
  in.N = grid.N;
  in.T = grid.T;
  in.H = H;
  in.K = K;
  in.V = V;
  in.packed = grid.packed;
  in.dtype = dtype;
  in.gate_dtype = gate_dtype;
  in.sm90 = takes_sm90(device);
  in.processors = multiprocessors_of(device);
  in.choice = path_choice();
  return in;
}

bool tf32_allowed() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

}  // namespace

Call::Call(const char* op, const Shape& shape, const at::Tensor& like,
           const OptionalTensor& cu_seqlens, std::optional<double> scale)
    : guard_(like.device()),
      stream_(c10::cuda::getCurrentCUDAStream(like.device().index())),
      options_(like.options()),
      op_(op) {
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
  p.dtype = dtype_of(shape.dtype);
  check_grid(op, p.grid, p.H, p.K, p.V);
  p.tf32 = p.dtype == DType::kFloat && tf32_allowed();
}

const at::Tensor& Call::hold(at::Tensor t) { return held_.emplace_back(std::move(t)); }

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
  if (key_gated) input(problem.g, *g);
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
  return given(g) ? output(rows, last_dim, g->scalar_type()) : not_asked_for(at::kFloat);
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

CallPlan Call::plan(bool batch_invariant, bool for_backward) const {
  const Problem& p = problem;
  PlanInputs in = plan_inputs(options_.device(), p.grid, p.H, p.K, p.V, p.dtype, p.g.dtype);
  in.batch_invariant = batch_invariant;
  in.aligned = true;
  for (const Rows* r : {&p.q, &p.k, &p.v, &p.g, &p.d_o})
    if (r->data != nullptr) in.aligned &= r->aligned;
  in.key_gated = key_gated;
  in.value_gated = value_gated;
  in.value_gate_dtype = value_side.g.dtype;
  in.for_backward = for_backward;
  const char* missing = in.choice == PathChoice::kFused ? why_not_fused(in) : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(missing == nullptr, op_, ": GLA_EXT_CUDA_PATH=fused expected ",
                              missing, ", got a call that only the step path takes");
  return make_plan(in);
}

void Call::run(const PassPlan& pass) {
  static_cast<Segments&>(problem.grid) = pass.segments;
  problem.items_each = static_cast<int32_t>(pass.items_each);
  allocate(pass.workspace);
  launch(pass.kernels);
}

at::Tensor Call::output_for_backward(const CallPlan& plan, int64_t bytes) {
  // Backward may be on another path by then, and could not tell.
  TORCH_CHECK_NOT_IMPLEMENTED(
      bytes == 0 || plan.path == Path::kFused, op_,
      ": expected for_backward_bytes to be 0 in the step path, got ", bytes,
      "; a graph that keeps prepared chunks for backward was compiled for the fused path, without "
      "GLA_EXT_CUDA_PATH=steps and for a GPU that has it: compile it again, without torch's caches "
      "(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1)");
  at::Tensor for_backward = at::empty({bytes}, options_.dtype(at::kByte));
  if (bytes > 0 && bytes == plan.for_backward.bytes)
    place(plan.for_backward, static_cast<char*>(for_backward.mutable_data_ptr()));
  return for_backward;
}

bool Call::input_for_backward(const CallPlan& plan, const at::Tensor& for_backward) {
  if (plan.path != Path::kFused || for_backward.numel() != plan.for_backward.bytes) return false;
  const void* data = contiguous(for_backward).const_data_ptr();
  place(plan.for_backward, static_cast<char*>(const_cast<void*>(data)));
  return true;
}

void Call::allocate(const Workspace& w) {
  if (w.bytes == 0) return;
  workspace_ = at::empty({w.bytes}, options_.dtype(at::kByte));
  auto* base = static_cast<char*>(workspace_.mutable_data_ptr());
  place(w, base);
  if (is_there(w.no_decay)) clear_decays(w, base);
  if (is_there(w.bv)) allocate_values(w, base);
}

void Call::place(const Workspace& w, char* base) {
  Problem& p = problem;
  const auto part = [&](auto*& pointer, int64_t start) {
    using Pointer = std::remove_reference_t<decltype(pointer)>;
    if (is_there(start)) pointer = reinterpret_cast<Pointer>(base + start);
  };
  const auto rows = [&](Rows& r, int64_t start, int64_t last_dim, DType dtype) {
    if (is_there(start)) r = rows_in(base + start, last_dim, dtype);
  };
  const auto states = [&](void*& pointer, DType& dtype, int64_t start) {
    part(pointer, start);
    if (is_there(start)) dtype = intermediate_dtype(p.dtype);
  };
  part(p.grid.sequences, w.sequences);
  part(p.grid.chunk_slots, w.chunk_slots);
  part(p.grid.by_last_segment, w.by_last_segment);
  part(p.grid.totals, w.totals);
  part(p.tiers, w.tiers);
  rows(p.b, w.b, p.K, DType::kFloat);
  rows(p.b_suffix, w.b_suffix, p.K, DType::kFloat);
  rows(p.A, w.A, kChunk, intermediate_dtype(p.dtype));
  rows(p.dA, w.dA, kChunk, intermediate_dtype(p.dtype));
  states(p.S, p.S_dtype, w.S);
  states(p.dS, p.dS_dtype, w.dS);
  part(p.segment_states, w.segment_states);
  part(p.segment_state_grads, w.segment_state_grads);
  part(p.segment_decays, w.segment_decays);
  part(p.prepared, w.prepared);
  rows(p.dq_intra, w.dq_intra, p.K, DType::kFloat);
  rows(p.dk_intra, w.dk_intra, p.K, DType::kFloat);
  rows(p.dg_intra, w.dg_intra, p.K, DType::kFloat);
}

Rows Call::rows_in(char* part, int64_t last_dim, DType dtype) const {
  const int64_t B = problem.grid.B, T = problem.grid.T, H = problem.H;
  return rows_of(part, dtype, {B, T, H}, {T * H * last_dim, H * last_dim, last_dim});
}

// Without gates b is one row of zeros, and every chunk is in tier 1.
void Call::clear_decays(const Workspace& w, char* base) {
  Problem& p = problem;
  p.b = rows_of(base + w.no_decay, DType::kFloat, {1, 1, 1}, {0, 0, 0});
  C10_CUDA_CHECK(cudaMemsetAsync(base + w.no_decay, 0, p.K * sizeof(float), stream_));
  const size_t flags = p.grid.B * p.grid.slots * p.H * kMaxTierBlocks;
  C10_CUDA_CHECK(cudaMemsetAsync(p.tiers, 0, flags, stream_));
}

void Call::allocate_values(const Workspace& w, char* base) {
  Problem& p = problem;
  value_side.grid = p.grid;
  const DType operand = intermediate_dtype(p.dtype);
  const auto rows = [&](Rows& r, int64_t start, DType dtype) {
    if (is_there(start)) r = rows_in(base + start, p.V, dtype);
  };
  rows(value_side.b, w.bv, DType::kFloat);
  rows(value_side.b_suffix, w.bv_suffix, DType::kFloat);
  rows(value_side.dq_intra, w.o_intra, DType::kFloat);
  rows(value_side.dk_intra, w.dv_intra, DType::kFloat);
  rows(value_side.dg_intra, w.dgv_intra, DType::kFloat);
  rows(p.v, w.v_out, operand);
  rows(p.d_o, w.do_in, operand);
  value_side.A = p.dA;
  value_side.dA = p.A;
  if (is_there(w.value_tiers)) value_side.tiers = reinterpret_cast<uint8_t*>(base + w.value_tiers);
}

void Call::run_step(std::initializer_list<Kernel> kernels, bool tiers) {
  allocate(step_workspace(problem.grid, problem.H, tiers));
  launch(step_recipe(problem.grid, kernels));
}

void Call::launch(const Recipe& kernels) const {
  for (const auto& [kernel, side] : kernels) {
    cuda::launch(kernel, side == Side::kKeys ? problem : values, value_side, stream_);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

namespace {

// Whether all rows start at multiples of 16 bytes, as far as a tensor knows where it lies: while
// tracing it does not, and what such a graph keeps prepared chunks of is copied where they do not.
bool may_be_aligned(const at::Tensor& t) {
  const c10::DispatchKeySet keys = t.key_set();
  const bool traced =
      keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Functionalize);
  return traced || !has_contiguous_rows(t) || rows_of(t).aligned;
}

}  // namespace

// By the plan that the operator will make of such a call. Without the GPU, as when tracing for one,
// nothing.
int64_t for_backward_bytes(const ForwardArguments& a) {
  if (a.q.device().index() >= c10::cuda::device_count()) return 0;
  const auto type = a.q.scalar_type();
  if (type != at::kBFloat16 || a.v.scalar_type() != type || a.k.scalar_type() != type ||
      !given(a.g) || given(a.gv))
    return 0;
  const auto gate_type = a.g->scalar_type();
  if (gate_type != at::kBFloat16 && gate_type != at::kFloat) return 0;
  const c10::cuda::CUDAGuard guard(a.q.device());
  const bool packed = given(a.cu_seqlens);
  const int64_t N = packed ? a.cu_seqlens->numel() - 1 : a.q.size(0);
  if (N < 0) return 0;
  PlanInputs plan = plan_inputs(a.q.device(), make_grid(N, a.q.size(1), packed), a.q.size(2),
                                a.q.size(3), a.v.size(3), dtype_of(type), dtype_of(gate_type));
  plan.batch_invariant = a.batch_invariant;
  plan.aligned = true;
  for (const at::Tensor* t : {&a.q, &a.k, &a.v, &*a.g}) plan.aligned &= may_be_aligned(*t);
  plan.for_backward = true;
  return make_plan(plan).for_backward.bytes;
}

}  // namespace gla_ext::cuda
