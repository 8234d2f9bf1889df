// Several linear maps of one input, as one product or with one gradient of the input, by torch's
// operations. In C++, because a Python function takes some 250 us of a layer's step on the host.
#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include "dispatch/linear_map.h"
#include "dispatch/schema.h"

namespace gla_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Whether foreach and in-place operators may be called: not for gradients of gradients,
// is_grads_batched, or sharded tensors.
bool may_be_written(const at::Tensor& t) {
  return !at::GradMode::is_enabled() && !at::isBatchedTensor(t) &&
         !t.key_set().has(c10::DispatchKey::Python);
}

// An operator may not return its input, as `to` does, and a call that does nothing takes time.
at::Tensor cast(const at::Tensor& t, at::ScalarType dtype) {
  return t.scalar_type() == dtype ? t : t.to(dtype);
}

// The weights as one matrix. Each is cast as it is copied there, so it is read and written once.
at::Tensor joined(at::TensorList weights, at::ScalarType dtype) {
  const int64_t columns = weights[0].size(1);
  bool keeps_cat = weights[0].scalar_type() == dtype;
  std::vector<int64_t> rows;
  int64_t sum = 0;
  for (const at::Tensor& weight : weights) {
    keeps_cat |= weight.size(1) != columns || !may_be_written(weight);
    rows.push_back(weight.size(0));
    sum += rows.back();
  }
  if (keeps_cat) return cast(at::cat(weights), dtype);
  at::Tensor whole = at::empty({sum, columns}, weights[0].options().dtype(dtype));
  at::_foreach_copy_(whole.split_with_sizes(rows), weights);  // one launch
  return whole;
}

// x Wᵀ for each of the weights, which are alike and cast to `dtype`. together: the results
// are parts of one tensor.
variable_list products(const at::Tensor& x, at::TensorList weights, at::ScalarType dtype,
                       bool together) {
  if (!together) {
    variable_list results;
    for (const at::Tensor& weight : weights) results.push_back(at::linear(x, cast(weight, dtype)));
    return results;
  }
  std::vector<int64_t> widths;
  for (const at::Tensor& weight : weights) widths.push_back(weight.size(0));
  return at::linear(x, joined(weights, dtype)).split_with_sizes(widths, -1);
}

// Parts of dw, each with its own memory: views could only be freed all together.
variable_list parts_of(const at::Tensor& dw, at::IntArrayRef rows, at::ScalarType dtype) {
  const variable_list views = dw.split_with_sizes(rows);
  variable_list parts;
  if (!may_be_written(dw)) {
    for (const at::Tensor& view : views)
      parts.push_back(view.to(dtype, /*non_blocking=*/false, /*copy=*/true));
    return parts;
  }
  for (const at::Tensor& view : views)
    parts.push_back(at::empty_like(view, view.options().dtype(dtype)));
  at::_foreach_copy_(parts, views);  // one launch
  return parts;
}

// The sum of dy W over the maps. Where allowed, each product is added to the sum in place.
at::Tensor sum_of_products(const variable_list& grads, at::TensorList weights,
                           at::ScalarType dtype) {
  at::Tensor dx = at::matmul(grads[0], cast(weights[0], dtype));
  for (size_t i = 1; i < grads.size(); ++i) {
    const at::Tensor weight = cast(weights[i], dtype);
    if (may_be_written(grads[i]) && may_be_written(dx)) {
      at::Tensor rows = as_matrix(dx);
      at::addmm_out(rows, rows, as_matrix(grads[i]), weight);  // FlopCounterMode knows no addmm_
    } else {
      dx = dx + at::matmul(grads[i], weight);
    }
  }
  return dx;
}

class JointProjection : public torch::autograd::Function<JointProjection> {
 public:
  // Saves x and the weights if a gradient needs them, but not the joined weights.
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, at::TensorList weights,
                               at::ScalarType dtype, bool together) {
    at::AutoDispatchBelowADInplaceOrView below;
    // Autocast has already cast x and the weights.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    bool some_dw = false;
    for (const at::Tensor& weight : weights) some_dw |= weight.requires_grad();
    variable_list saved{some_dw ? x : at::Tensor()};
    if (x.requires_grad()) saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["dtype"] = static_cast<int64_t>(dtype);
    ctx->saved_data["dtype_of_weights"] = static_cast<int64_t>(weights[0].scalar_type());
    ctx->saved_data["together"] = together;
    return products(x, weights, dtype, together);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    // Runs in the dtypes of forward, whatever autocast is active around backward.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    const auto own = static_cast<at::ScalarType>(ctx->saved_data["dtype_of_weights"].toInt());
    const variable_list saved = ctx->get_saved_variables();
    const bool needs_dx = ctx->needs_input_grad(0);
    variable_list trained;
    std::vector<int64_t> rows;
    for (size_t i = 0; i < grads.size(); ++i)
      if (ctx->needs_input_grad(1 + i)) {
        trained.push_back(grads[i]);
        rows.push_back(grads[i].size(-1));
      }
    variable_list result(grads.size() + 3);
    if (!ctx->saved_data["together"].toBool()) {
      if (needs_dx) result[0] = sum_of_products(grads, {saved.data() + 1, grads.size()}, dtype);
      for (size_t i = 0; i < grads.size(); ++i)
        if (ctx->needs_input_grad(1 + i))
          result[1 + i] = cast(at::mm(as_matrix(grads[i]).t(), as_matrix(saved[0])), own);
      return result;
    }
    at::Tensor dy;
    if (needs_dx || trained.size() == grads.size()) dy = at::cat(grads, -1);
    if (needs_dx) {
      const at::TensorList weights(saved.data() + 1, grads.size());
      result[0] = at::matmul(dy, joined(weights, dtype));
    }
    if (trained.empty()) return result;
    if (trained.size() < grads.size()) dy = at::cat(trained, -1);
    const at::Tensor dw = at::mm(as_matrix(dy).t(), as_matrix(saved[0]));
    const variable_list parts = parts_of(dw, rows, own);
    for (size_t i = 0, part = 0; i < grads.size(); ++i)
      if (ctx->needs_input_grad(1 + i)) result[1 + i] = parts[part++];
    return result;
  }
};

variable_list joint_projection_autograd(const at::Tensor& x, at::TensorList weights,
                                        at::ScalarType dtype, bool together) {
  return JointProjection::apply(x, weights, dtype, together);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gla_ext, m) {
  define_composite(m,
                   "joint_projection(Tensor x, Tensor[] weights, ScalarType dtype, bool "
                   "together=True) -> Tensor[]",
                   products);
}

TORCH_LIBRARY_IMPL(gla_ext, Autograd, m) { m.impl("joint_projection", joint_projection_autograd); }

}  // namespace gla_ext
