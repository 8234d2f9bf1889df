#include "plan_inputs.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "chunk_gla/for_backward.h"
#include "common/heads.h"
#include "cuda/sm90/sm90.h"
#include "tensors.h"

namespace gla_ext::cuda {
namespace {

PathChoice path_choice() {
  const char* forced = std::getenv("GLA_EXT_CUDA_PATH");
  const std::string_view path = forced == nullptr ? "" : forced;
  if (path == "fused") return PathChoice::kFused;
  if (path == "steps") return PathChoice::kSteps;
  TORCH_CHECK_VALUE(path.empty(), "GLA_EXT_CUDA_PATH: expected fused or steps, got ", path);
  return PathChoice::kAny;
}

// `device` must be the current one; the answer is kept.
template <bool (*available)()>
bool is_built(c10::DeviceIndex device) {
  enum : int8_t { kUnknown, kAbsent, kBuilt };
  static std::array<std::atomic<int8_t>, 64> known{};
  std::atomic<int8_t>& mine = known[static_cast<size_t>(device) % known.size()];
  if (mine.load(std::memory_order_relaxed) == kUnknown)
    mine.store(available() ? kBuilt : kAbsent, std::memory_order_relaxed);
  return mine.load(std::memory_order_relaxed) == kBuilt;
}

// Whether all rows start at multiples of 16 bytes, or this is not known while tracing. A traced
// graph may keep prepared chunks; then inputs with other rows are copied.
bool may_be_aligned(const at::Tensor& t) {
  const c10::DispatchKeySet keys = t.key_set();
  const bool traced =
      keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Functionalize);
  return traced || !has_contiguous_rows(t) || rows_of(t).aligned;
}

}  // namespace

bool takes_sm90(c10::Device device) {
  const cudaDeviceProp& gpu = *at::cuda::getDeviceProperties(device.index());
  return gpu.major == 9 && gpu.minor == 0 && is_built<sm90::available>(device.index());
}

bool takes_dependent_launch(c10::Device device) {
  return is_built<sm90::dependent_launch_available>(device.index());
}

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

namespace {

// The inputs of a plan for a call that is only asked about, under autograd. Absent if the fused
// path cannot run it, or without the GPU, as when tracing for one.
std::optional<PlanInputs> inputs_of(const ForwardArguments& a) {
  if (a.q.device().index() >= c10::cuda::device_count()) return std::nullopt;
  const auto type = a.q.scalar_type();
  if (type != at::kBFloat16 || a.v.scalar_type() != type || a.k.scalar_type() != type ||
      !given(a.g) || given(a.gv))
    return std::nullopt;
  const auto gate_type = a.g->scalar_type();
  if (gate_type != at::kBFloat16 && gate_type != at::kFloat) return std::nullopt;
  const c10::cuda::CUDAGuard guard(a.q.device());
  const bool packed = given(a.cu_seqlens);
  const int64_t N = packed ? a.cu_seqlens->numel() - 1 : a.q.size(0);
  if (N < 0) return std::nullopt;
  PlanInputs in = plan_inputs(a.q.device(), make_grid(N, a.q.size(1), packed), a.q.size(2),
                              a.q.size(3), a.v.size(3), dtype_of(type), dtype_of(gate_type));
  in.batch_invariant = a.batch_invariant;
  in.aligned = true;
  for (const at::Tensor* t : {&a.q, &a.k, &a.v}) in.aligned &= may_be_aligned(*t);
  in.head_gated = is_head_gate(a.g);
  if (!in.head_gated) in.aligned &= may_be_aligned(*a.g);
  return in;
}

}  // namespace

// Taken from the plan that the operator will make for such a call.
int64_t for_backward_bytes(const ForwardArguments& a) {
  std::optional<PlanInputs> in = inputs_of(a);
  if (!in.has_value()) return 0;
  in->for_backward = true;
  return make_plan(*in).for_backward.bytes();
}

HalfSizes half_sizes(const ForwardArguments& a, bool for_backward) {
  std::optional<PlanInputs> in = inputs_of(a);
  if (!in.has_value() || in->packed || in->T == 0 || in->N == 0) return {};
  in->in_halves = true;
  in->for_backward = for_backward;
  const CallPlan plan = make_plan(*in);
  if (plan.path != Path::kFused) return {};
  return {plan.forward.summary.bytes(), plan.forward.segments.segments,
          plan.backward.summary.bytes(), plan.for_backward.bytes() > 0};
}

}  // namespace gla_ext::cuda
