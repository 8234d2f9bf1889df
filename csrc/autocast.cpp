// Autocast casts q, k and v; gates and states keep their dtype.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops.h"

namespace gla_ext {
namespace {

template <c10::DeviceType device>
ForwardOutputs chunk_gla_fwd_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& g, const std::optional<at::Tensor>& gv,
                                      const std::optional<at::Tensor>& initial_state,
                                      const std::optional<at::Tensor>& cu_seqlens,
                                      std::optional<double> scale, bool output_final_state,
                                      bool state_v_first, bool save_states, bool batch_invariant) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const at::Tensor& t) {
    return at::autocast::cached_cast(dtype, t, device);
  };
  return chunk_gla_fwd(cast(q), cast(k), cast(v), g, gv, initial_state, cu_seqlens, scale,
                       output_final_state, state_v_first, save_states, batch_invariant);
}

}  // namespace

TORCH_LIBRARY_IMPL(gla_ext, AutocastCPU, m) {
  m.impl("chunk_gla_fwd", chunk_gla_fwd_autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(gla_ext, AutocastCUDA, m) {
  m.impl("chunk_gla_fwd", chunk_gla_fwd_autocast<c10::DeviceType::CUDA>);
}

}  // namespace gla_ext
