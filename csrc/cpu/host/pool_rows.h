// The rows of a pool that the sequences of a call read and write.
#pragma once

#include <ATen/core/Tensor.h>

#include <numeric>
#include <vector>

#include "common/shape.h"

namespace gla_ext::cpu {

// The indices, or 0 to count - 1 if there are none.
inline std::vector<int64_t> values_of(const OptionalTensor& indices, int64_t count) {
  if (given(indices)) {
    const at::Tensor t = indices->to(at::kLong).contiguous();
    const auto* begin = t.const_data_ptr<int64_t>();
    return {begin, begin + t.numel()};
  }
  std::vector<int64_t> values(count);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

// The rows of N sequences; -1: none. A sequence without a row in `slots` writes none.
struct PoolRows {
  std::vector<int64_t> slots, write;
  std::vector<int64_t> read;  // slots, but -1 for sequences that start from zero

  PoolRows(const at::Tensor& pool, int64_t N, const OptionalTensor& of_slots,
           const OptionalTensor& of_write_slots, const OptionalTensor& has_initial_state) {
    const int64_t P = pool.size(0);
    const auto in_pool = [P](int64_t row) { return row >= 0 && row < P ? row : -1; };
    slots = values_of(of_slots, N);
    write = given(of_write_slots) ? values_of(of_write_slots, N) : slots;
    const at::Tensor goes_on =
        given(has_initial_state) ? has_initial_state->contiguous() : at::Tensor();
    for (int64_t n = 0; n < N; ++n) {
      slots[n] = in_pool(slots[n]);
      write[n] = slots[n] < 0 ? -1 : in_pool(write[n]);
      const bool starts = goes_on.defined() && !goes_on.const_data_ptr<bool>()[n];
      read.push_back(starts ? -1 : slots[n]);
    }
  }
};

}  // namespace gla_ext::cpu
