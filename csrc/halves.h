// The halves of chunk_gla composed of the whole: for devices and calls without kernels that share
// work between them.
#pragma once

#include "checks/chunk_gla.h"

namespace gla_ext::halves {

// The sum of a gate over the tokens, [B, H, D], of H heads.
at::Tensor sum_of_gates(const OptionalTensor& gate, const at::Tensor& q, const Shape& shape);

// What follows leave `prepared` and `entering` of the given sizes unused.
SummaryOutputs summary(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const OptionalTensor& g, const OptionalTensor& gv,
                       std::optional<double> scale, bool batch_invariant, bool for_backward,
                       int64_t prepared_bytes);
ForwardOutputs apply(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const OptionalTensor& g, const OptionalTensor& gv,
                     const OptionalTensor& initial_state, std::optional<double> scale,
                     bool output_final_state, bool state_v_first, bool batch_invariant,
                     bool for_backward, const at::Tensor& prepared, int64_t segments);
std::tuple<at::Tensor, at::Tensor> summary_bwd(const at::Tensor& d_o, const at::Tensor& q,
                                               const at::Tensor& k, const at::Tensor& v,
                                               const OptionalTensor& g, const OptionalTensor& gv,
                                               std::optional<double> scale, bool batch_invariant,
                                               const at::Tensor& prepared, int64_t prepared_bytes);
BackwardOutputs apply_bwd(const at::Tensor& d_o, const OptionalTensor& dht, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, const OptionalTensor& g,
                          const OptionalTensor& gv, const OptionalTensor& initial_state,
                          std::optional<double> scale, bool state_v_first, bool batch_invariant,
                          const at::Tensor& prepared, const at::Tensor& entering,
                          const at::Tensor& prepared_bwd);

}  // namespace gla_ext::halves
