// Autocast casts q, k and v, whose gates and states keep their dtype, and all that the linear maps
// of SwiGLU, of cross entropy, of the gate and, but for its weight, of the norm take.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <utility>

#include "ops.h"

namespace gla_ext {
namespace {

// Casts what autocast casts, as long as it stands, with autocast itself off.
template <c10::DeviceType device>
class Cast {
 public:
  at::Tensor operator()(const at::Tensor& t) const {
    return at::autocast::cached_cast(dtype_, t, device);
  }
  std::optional<at::Tensor> operator()(const std::optional<at::Tensor>& t) const {
    return at::autocast::cached_cast(dtype_, t, device);
  }
  template <bool casts, typename T>
  decltype(auto) where(T& argument) const {
    if constexpr (casts)
      return (*this)(argument);
    else
      return (argument);
  }

 private:
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{
      at::autocast::get_autocast_dispatch_key_from_device_type(device)};
  at::ScalarType dtype_ = at::autocast::get_autocast_dtype(device);
};

// The kernel of the operator that `call` runs: its first `count` arguments are cast.
template <c10::DeviceType device, size_t count, auto call>
struct CastFirst;

template <c10::DeviceType device, size_t count, typename Result, typename... Args,
          Result (*call)(Args...)>
struct CastFirst<device, count, call> {
  static Result run(Args... args) { return run_at(std::index_sequence_for<Args...>{}, args...); }

 private:
  template <size_t... place>
  static Result run_at(std::index_sequence<place...>, Args... args) {
    const Cast<device> cast;
    return call(cast.template where<(place < count)>(args)...);
  }
};

// Of operators whose first arguments are q, k and v.
template <c10::DeviceType device>
void first_three_autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Cast<device> cast;
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < 3; ++i) {
    c10::IValue& t = torch::jit::peek(*stack, i, arguments);
    t = cast(t.toTensor());
  }
  op.callBoxed(stack);
}

template <c10::DeviceType device>
void register_all(torch::Library& m) {
  m.impl("chunk_gla_fwd", CastFirst<device, 3, chunk_gla_fwd>::run);
  m.impl("chunk_gla_", CastFirst<device, 3, chunk_gla_>::run);
  m.impl("chunk_gla_.out", CastFirst<device, 3, chunk_gla_out>::run);
  for (const char* op : {"chunk_gla_summary", "chunk_gla_apply", "chunk_gla_across_ranks"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&first_three_autocast<device>>());
  m.impl("recurrent_gla_fwd", CastFirst<device, 3, recurrent_gla_fwd>::run);
  m.impl("recurrent_gla_step_", CastFirst<device, 3, recurrent_gla_step_>::run);
  m.impl("recurrent_gla_step_.out", CastFirst<device, 3, recurrent_gla_step_out>::run);
  m.impl("recurrent_gla_verify", CastFirst<device, 3, recurrent_gla_verify>::run);
  m.impl("recurrent_gla_verify.out", CastFirst<device, 3, recurrent_gla_verify_out>::run);
  m.impl("recurrent_gla_commit_", CastFirst<device, 2, recurrent_gla_commit_>::run);
  m.impl("swiglu_linear", CastFirst<device, 4, swiglu_linear>::run);
  m.impl("norm_gate_linear", CastFirst<device, 3, norm_gate_linear>::run);
  m.impl("linear_cross_entropy_fwd", CastFirst<device, 3, linear_cross_entropy_fwd>::run);
  m.impl("gate_projection_fwd", CastFirst<device, 3, gate_projection_fwd>::run);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, AutocastCPU, m) { register_all<c10::DeviceType::CPU>(m); }
TORCH_LIBRARY_IMPL(gla_ext, AutocastCUDA, m) { register_all<c10::DeviceType::CUDA>(m); }

}  // namespace gla_ext
