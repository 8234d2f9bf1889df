#include "output.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace gla_ext {
namespace {

// The memory of a tensor of at least one element, in bytes. dims: (stride, last index) of each
// dimension.
struct Strided {
  uint64_t begin, item;
  std::vector<std::pair<uint64_t, uint64_t>> dims;

  explicit Strided(const at::Tensor& t)
      : begin(reinterpret_cast<uintptr_t>(t.const_data_ptr())), item(t.element_size()) {
    for (const int64_t d : c10::irange(t.dim()))
      if (t.size(d) > 1 && t.stride(d) != 0) dims.emplace_back(t.stride(d) * item, t.size(d) - 1);
  }

  // The bytes spanned by the dimensions whose strides are not multiples of `step`. The other
  // dimensions repeat these bytes at multiples of `step`. If `step` is 0, all dimensions count.
  uint64_t extent(uint64_t step) const {
    uint64_t bytes = item;
    for (const auto& [stride, last] : dims)
      if (step == 0 || stride % step != 0) bytes += stride * last;
    return bytes;
  }
};

// Whether the addresses modulo `step` show that two tensors share no memory.
bool apart_modulo(const Strided& a, const Strided& b, uint64_t step) {
  const uint64_t behind = (step + b.begin % step - a.begin % step) % step;  // from a's begin to b's
  return a.extent(step) <= behind && behind + b.extent(step) <= step;
}

// Whether two tensors may share memory. True if they do, and for some unusual views that do not.
// False for slices of one buffer that are disjoint in one of its dimensions.
bool may_overlap(const at::Tensor& first, const at::Tensor& second) {
  const auto status = at::get_overlap_status(first, second);
  if (status != at::MemOverlapStatus::TooHard) return status != at::MemOverlapStatus::No;
  if (first.numel() == 0 || second.numel() == 0) return false;
  const Strided a(first), b(second);
  if (a.begin + a.extent(0) <= b.begin || b.begin + b.extent(0) <= a.begin) return false;
  std::vector<uint64_t> steps;
  for (const Strided* t : {&a, &b})
    for (const auto& dim : t->dims) steps.push_back(dim.first);
  for (const auto& x : a.dims)
    for (const auto& y : b.dims) steps.push_back(std::gcd(x.first, y.first));
  return std::none_of(steps.begin(), steps.end(),
                      [&](uint64_t step) { return apart_modulo(a, b, step); });
}

}  // namespace

void check_out(const Checker& check, const at::Tensor& out, at::ScalarType dtype, const char* dims,
               const Sizes& sizes) {
  check.placed("out", out);
  check.like_first("out", out, dtype);
  check.shape("out", out, dims, sizes);
}

void check_out_layout(const char* op, const at::Tensor& out,
                      std::initializer_list<NamedTensor> inputs) {
  if (out.numel() == 0) return;
  TORCH_CHECK_VALUE(
      (out.size(-1) == 1 || out.stride(-1) == 1) &&
          at::has_internal_overlap(out) != at::MemOverlap::Yes,
      op, ": expected the last dimension of out to be contiguous and no two elements of it ",
      "to be the same, got strides ", out.strides());
  for (const auto& [name, t] : inputs)
    TORCH_CHECK_VALUE(t == nullptr || !may_overlap(out, *t), op,
                      ": expected out to share no memory with ", name);
}

void check_pool_layout(const char* op, const at::Tensor& state, bool written, const char* name) {
  const auto sizes = state.sizes(), strides = state.strides();
  const bool contiguous =
      (sizes[3] == 1 || strides[3] == 1) && (sizes[2] == 1 || strides[2] == sizes[3]);
  TORCH_CHECK_VALUE(contiguous, op, ": expected the last two dimensions of ", name,
                    " to be contiguous, got strides ", strides);
  if (!written || state.numel() == 0) return;
  int64_t extent = sizes[2] * sizes[3];  // that one step of the next dimension must pass
  const int inner = strides[0] < strides[1] ? 0 : 1;
  for (const int dim : {inner, 1 - inner}) {
    if (sizes[dim] == 1) continue;
    TORCH_CHECK_VALUE(strides[dim] >= extent, op, ": expected the matrices of ", name,
                      " to lie apart, got sizes ", sizes, " with strides ", strides);
    extent += strides[dim] * (sizes[dim] - 1);
  }
}

}  // namespace gla_ext
