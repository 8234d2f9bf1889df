// The entry points of chunk_gla's halves, through the dispatcher.

#include "dispatch/op.h"
#include "ops.h"

namespace gla_ext {

std::tuple<at::Tensor, at::Tensor> chunk_gla_summary(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::optional<at::Tensor>& g, const std::optional<at::Tensor>& gv,
    const std::optional<at::Tensor>& initial_state, std::optional<double> scale, bool state_v_first,
    bool batch_invariant, bool for_backward, int64_t prepared_bytes) {
  static const Op<decltype(chunk_gla_summary)> op("gla_ext::chunk_gla_summary");
  return op(q, k, v, g, gv, initial_state, scale, state_v_first, batch_invariant, for_backward,
            prepared_bytes);
}

ForwardOutputs chunk_gla_apply(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::optional<at::Tensor>& g,
                               const std::optional<at::Tensor>& gv,
                               const std::optional<at::Tensor>& initial_state,
                               std::optional<double> scale, bool output_final_state,
                               bool state_v_first, bool batch_invariant, bool for_backward,
                               const at::Tensor& prepared, int64_t segments) {
  static const Op<decltype(chunk_gla_apply)> op("gla_ext::chunk_gla_apply");
  return op(q, k, v, g, gv, initial_state, scale, output_final_state, state_v_first,
            batch_invariant, for_backward, prepared, segments);
}

std::tuple<at::Tensor, at::Tensor> chunk_gla_summary_bwd(
    const at::Tensor& d_o, const std::optional<at::Tensor>& dht, const at::Tensor& q,
    const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& g,
    const std::optional<at::Tensor>& gv, std::optional<double> scale, bool state_v_first,
    bool batch_invariant, const at::Tensor& prepared, int64_t prepared_bytes) {
  static const Op<decltype(chunk_gla_summary_bwd)> op("gla_ext::chunk_gla_summary_bwd");
  return op(d_o, dht, q, k, v, g, gv, scale, state_v_first, batch_invariant, prepared,
            prepared_bytes);
}

BackwardOutputs chunk_gla_apply_bwd(const at::Tensor& d_o, const std::optional<at::Tensor>& dht,
                                    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const std::optional<at::Tensor>& g,
                                    const std::optional<at::Tensor>& gv,
                                    const std::optional<at::Tensor>& initial_state,
                                    std::optional<double> scale, bool state_v_first,
                                    bool batch_invariant, const at::Tensor& prepared,
                                    const at::Tensor& entering, const at::Tensor& prepared_bwd) {
  static const Op<decltype(chunk_gla_apply_bwd)> op("gla_ext::chunk_gla_apply_bwd");
  return op(d_o, dht, q, k, v, g, gv, initial_state, scale, state_v_first, batch_invariant,
            prepared, entering, prepared_bwd);
}

std::tuple<at::Tensor, at::Tensor> chunk_gla_fold(
    const at::Tensor& summaries, const std::optional<at::Tensor>& decays,
    const std::optional<at::Tensor>& boundary, int64_t size, const c10::SymInt& each,
    const c10::SymInt& rows, const c10::SymInt& H, const c10::SymInt& K, const c10::SymInt& V,
    bool key_gated, bool value_gated, bool state_v_first, at::IntArrayRef places,
    at::IntArrayRef reach, at::IntArrayRef entered) {
  using Function = std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
      int64_t, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt, bool, bool, bool,
      at::IntArrayRef, at::IntArrayRef, at::IntArrayRef);
  static const Op<Function> op("gla_ext::chunk_gla_fold");
  return op(summaries, decays, boundary, size, each, rows, H, K, V, key_gated, value_gated,
            state_v_first, places, reach, entered);
}

}  // namespace gla_ext
