// What both kernels of a step with buffers find out about a row and head.
#pragma once

#include "run.cuh"

namespace gla_ext::cuda {
namespace recurrent {

__host__ __device__ inline int padded_keys(int K) { return (K + 7) / 8 * 8; }

struct BufferRow {
  int64_t slot;  // -1: none
  int row, run;  // of the batch; of its heads
  int keys;      // of its key heads
  int head;
  bool owns_keys;  // of the heads that share a key head, the first one
  int held;        // tokens in the buffer, n
  bool folds;      // they go into the state first

  __device__ __forceinline__ BufferRow(const Recurrence& p, const Buffers& b, unsigned index) {
    const auto heads = static_cast<unsigned>(p.H);
    row = static_cast<int>(index / heads), run = static_cast<int>(index);
    head = static_cast<int>(index % heads);
    const int group = p.H / b.HK;
    keys = row * b.HK + head / group;
    owns_keys = head % group == 0;
    slot = p.slots.data != nullptr ? index_at(p.slots, row) : row;
    if (slot < 0 || slot >= p.slots_in_pool) {
      slot = -1, held = 0, folds = false;
      return;
    }
    held = static_cast<int>(clamp(index_at(b.count, slot), 0, b.L));
    folds = held + p.T > b.L;
  }
  // Offset in elements to a new token's row, and to that of a place of the buffer.
  __device__ __forceinline__ int64_t offset(const Rows& r, int t) const {
    return row * r.stride_b + t * r.stride_t + head_offset(r, head);
  }
  __device__ __forceinline__ int64_t buffer_offset(const Rows& r, int place) const {
    return slot * r.stride_b + place * r.stride_t + head_offset(r, head);
  }
};

}  // namespace recurrent
}  // namespace gla_ext::cuda
