// What both kernels of a step with buffers find out about a row and head.
#pragma once

#include "run.cuh"

namespace gla_ext::cuda {
namespace recurrent {

struct BufferRow {
  int run, row, head, key_head;  // run: number among the heads of all rows
  int slot;                      // -1: none
  int held;                      // tokens in the buffer, n
  bool folds;                    // they go into the state first

  __device__ __forceinline__ BufferRow(const Recurrence& p, const Buffers& b, int row, int head)
      : run(row * p.H + head), row(row), head(head), slot(-1), held(0), folds(false) {
    key_head = b.group == 1 ? head : head / b.group;
    const int64_t own = p.slots.data != nullptr ? index_at(p.slots, row) : row;
    if (own < 0 || own >= p.slots_in_pool) return;
    slot = static_cast<int>(own);
    held = static_cast<int>(clamp(index_at(b.count, slot), 0, b.L));
    folds = held + p.T > b.L;
  }
  // Number of its key head, and whether it is the first of the heads that share it.
  __device__ __forceinline__ int64_t keys(const Buffers& b) const {
    return int64_t{row} * b.HK + key_head;
  }
  __device__ __forceinline__ bool owns_keys(const Buffers& b) const {
    return key_head * b.group == head;
  }
  // Offset in elements to a new token's row, and to that of a place of the buffer.
  __device__ __forceinline__ int64_t offset(const Rows& r, int t) const {
    return uint32_t(row) * r.stride_b + uint32_t(t) * r.stride_t + head_offset(r, head);
  }
  __device__ __forceinline__ int64_t buffer_offset(const Rows& r, int place) const {
    return uint32_t(slot) * r.stride_b + uint32_t(place) * r.stride_t + head_offset(r, head);
  }
};

// A grid of `blocks` blocks for each of B rows, and the row of a block, which may be B or more.
inline dim3 blocks_of_rows(int blocks, int64_t B) {
  const unsigned rows = static_cast<unsigned>(B < 32768 ? B : 32768);
  return {static_cast<unsigned>(blocks), rows, static_cast<unsigned>((B + rows - 1) / rows)};
}
__device__ __forceinline__ int row_of_block() {
  return static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
}

}  // namespace recurrent
}  // namespace gla_ext::cuda
