// The entry points of chunk_gla's halves, through the dispatcher.
#include <ATen/core/dispatch/Dispatcher.h>

#include "ops.h"

namespace gla_ext {
namespace {

template <class Function>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

}  // namespace

SummaryOutputs chunk_gla_summary(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::optional<at::Tensor>& g,
                                 const std::optional<at::Tensor>& gv, std::optional<double> scale,
                                 bool batch_invariant, bool for_backward, int64_t prepared_bytes) {
  static const auto op = find<decltype(chunk_gla_summary)>("gla_ext::chunk_gla_summary");
  return op.call(q, k, v, g, gv, scale, batch_invariant, for_backward, prepared_bytes);
}

ForwardOutputs chunk_gla_apply(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::optional<at::Tensor>& g,
                               const std::optional<at::Tensor>& gv,
                               const std::optional<at::Tensor>& initial_state,
                               std::optional<double> scale, bool output_final_state,
                               bool state_v_first, bool batch_invariant, bool for_backward,
                               const at::Tensor& prepared, int64_t segments) {
  static const auto op = find<decltype(chunk_gla_apply)>("gla_ext::chunk_gla_apply");
  return op.call(q, k, v, g, gv, initial_state, scale, output_final_state, state_v_first,
                 batch_invariant, for_backward, prepared, segments);
}

std::tuple<at::Tensor, at::Tensor> chunk_gla_summary_bwd(
    const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& g, const std::optional<at::Tensor>& gv,
    std::optional<double> scale, bool batch_invariant, const at::Tensor& prepared,
    int64_t prepared_bytes) {
  static const auto op = find<decltype(chunk_gla_summary_bwd)>("gla_ext::chunk_gla_summary_bwd");
  return op.call(d_o, q, k, v, g, gv, scale, batch_invariant, prepared, prepared_bytes);
}

BackwardOutputs chunk_gla_apply_bwd(const at::Tensor& d_o, const std::optional<at::Tensor>& dht,
                                    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const std::optional<at::Tensor>& g,
                                    const std::optional<at::Tensor>& gv,
                                    const std::optional<at::Tensor>& initial_state,
                                    std::optional<double> scale, bool state_v_first,
                                    bool batch_invariant, const at::Tensor& prepared,
                                    const at::Tensor& entering, const at::Tensor& prepared_bwd) {
  static const auto op = find<decltype(chunk_gla_apply_bwd)>("gla_ext::chunk_gla_apply_bwd");
  return op.call(d_o, dht, q, k, v, g, gv, initial_state, scale, state_v_first, batch_invariant,
                 prepared, entering, prepared_bwd);
}

}  // namespace gla_ext
