// The operators on a pool of states: their schemas, and the entry points that call through the
// dispatcher.

#include "dispatch/op.h"
#include "ops.h"
#include "schemas.h"

namespace gla_ext {

void define_pool_operators(torch::Library& m, const std::vector<at::Tag>& tags) {
  // One form returns its result, the other takes it as `out`, of the alias set named last.
  const auto define = [&](const std::string& name, const std::string& arguments, char alias) {
    m.def((name + "(" + arguments + ") -> Tensor").c_str(), tags);
    m.def((name + ".out(" + arguments + ", *, Tensor(" + alias + "!) out) -> ()").c_str(), tags);
  };
  define("recurrent_gla_step_",
         "Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor(a!) state, Tensor? slots, "
         "float? scale, bool state_v_first, Tensor? write_slots=None",
         'b');
  define("recurrent_gla_verify",
         "Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor state, Tensor? slots, "
         "float? scale, bool state_v_first, Tensor? cu_seqlens=None",
         'a');
  m.def(
      "recurrent_gla_commit_(Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor(a!) state, Tensor? "
      "slots, Tensor accepted, bool state_v_first, Tensor? cu_seqlens=None, Tensor? "
      "write_slots=None) -> ()",
      tags);
}

at::Tensor recurrent_gla_step_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::optional<at::Tensor>& gk,
                               const std::optional<at::Tensor>& gv, at::Tensor& state,
                               const std::optional<at::Tensor>& slots, std::optional<double> scale,
                               bool state_v_first, const std::optional<at::Tensor>& write_slots) {
  static const Op<decltype(recurrent_gla_step_)> op("gla_ext::recurrent_gla_step_");
  return op(q, k, v, gk, gv, state, slots, scale, state_v_first, write_slots);
}

void recurrent_gla_step_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::optional<at::Tensor>& gk,
                            const std::optional<at::Tensor>& gv, at::Tensor& state,
                            const std::optional<at::Tensor>& slots, std::optional<double> scale,
                            bool state_v_first, const std::optional<at::Tensor>& write_slots,
                            at::Tensor& out) {
  static const Op<decltype(recurrent_gla_step_out)> op("gla_ext::recurrent_gla_step_", "out");
  op(q, k, v, gk, gv, state, slots, scale, state_v_first, write_slots, out);
}

at::Tensor recurrent_gla_verify(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const std::optional<at::Tensor>& gk,
                                const std::optional<at::Tensor>& gv, const at::Tensor& state,
                                const std::optional<at::Tensor>& slots, std::optional<double> scale,
                                bool state_v_first, const std::optional<at::Tensor>& cu_seqlens) {
  static const Op<decltype(recurrent_gla_verify)> op("gla_ext::recurrent_gla_verify");
  return op(q, k, v, gk, gv, state, slots, scale, state_v_first, cu_seqlens);
}

void recurrent_gla_verify_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const std::optional<at::Tensor>& gk,
                              const std::optional<at::Tensor>& gv, const at::Tensor& state,
                              const std::optional<at::Tensor>& slots, std::optional<double> scale,
                              bool state_v_first, const std::optional<at::Tensor>& cu_seqlens,
                              at::Tensor& out) {
  static const Op<decltype(recurrent_gla_verify_out)> op("gla_ext::recurrent_gla_verify", "out");
  op(q, k, v, gk, gv, state, slots, scale, state_v_first, cu_seqlens, out);
}

void recurrent_gla_commit_(const at::Tensor& k, const at::Tensor& v,
                           const std::optional<at::Tensor>& gk, const std::optional<at::Tensor>& gv,
                           at::Tensor& state, const std::optional<at::Tensor>& slots,
                           const at::Tensor& accepted, bool state_v_first,
                           const std::optional<at::Tensor>& cu_seqlens,
                           const std::optional<at::Tensor>& write_slots) {
  static const Op<decltype(recurrent_gla_commit_)> op("gla_ext::recurrent_gla_commit_");
  op(k, v, gk, gv, state, slots, accepted, state_v_first, cu_seqlens, write_slots);
}

}  // namespace gla_ext
