#include "row_layout.h"

#include <optional>
#include <utility>

namespace gla_ext {
namespace {

// The single stride between the rows that dimensions [first, last) count, if there is one.
std::optional<int64_t> row_stride(const at::Tensor& t, int64_t first, int64_t last) {
  int64_t stride = 0, rows = 1;
  for (int64_t dim = last - 1; dim >= first; --dim) {
    if (t.size(dim) == 1) continue;
    if (rows == 1)
      stride = t.stride(dim);
    else if (t.stride(dim) != stride * rows)
      return {};
    rows *= t.size(dim);
  }
  return stride;
}

std::optional<RowStrides> row_strides(const at::Tensor& t, int64_t split) {
  if (t.size(-1) != 1 && t.stride(-1) != 1) return {};
  const auto outer = row_stride(t, 0, split), inner = row_stride(t, split, t.dim() - 1);
  if (!outer.has_value() || !inner.has_value()) return {};
  return RowStrides{*outer, *inner};
}

}  // namespace

RowLayout lay_out_rows(std::vector<at::Tensor> tensors) {
  RowLayout layout;
  layout.width = tensors[0].size(-1);
  layout.rows = tensors[0].numel() / layout.width;
  layout.tensors = std::move(tensors);
  if (layout.rows == 0) return layout;
  const int64_t leading = layout.tensors[0].dim() - 1;
  int64_t best_split = 0;
  size_t fewest_copies = layout.tensors.size() + 1;
  for (int64_t split = 0; split == 0 || split < leading; ++split) {
    size_t copies = 0;
    for (const at::Tensor& t : layout.tensors) copies += !row_strides(t, split).has_value();
    if (copies < fewest_copies) best_split = split, fewest_copies = copies;
  }
  for (int64_t dim = best_split; dim < leading; ++dim)
    layout.inner_rows *= layout.tensors[0].size(dim);
  for (at::Tensor& t : layout.tensors) {
    if (!row_strides(t, best_split).has_value()) t = t.contiguous();
    layout.strides.push_back(*row_strides(t, best_split));
  }
  return layout;
}

RowLayout lay_out_elements(std::vector<at::Tensor> tensors) {
  RowLayout layout = lay_out_rows(std::move(tensors));
  for (const at::Tensor& t : layout.tensors)
    if (!t.is_contiguous()) return layout;
  layout.width *= layout.rows;
  layout.rows = layout.inner_rows = 1;
  for (RowStrides& strides : layout.strides) strides = {};
  return layout;
}

}  // namespace gla_ext
