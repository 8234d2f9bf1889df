// Where the states entering and leaving sequences are stored: consecutively, or in rows of a pool.
#pragma once

#include "chunk.cuh"
#include "indices.cuh"

namespace gla_ext::cuda {

// The state matrix of a sequence and head. Without `data` there is none, and reads give 0.
struct StateMatrix {
  void* data = nullptr;
  DType dtype = DType::kFloat;

  // Calls f(pointer to the elements).
  template <class F>
  __device__ __forceinline__ void with_elements(F&& f) const {
    if (dtype == DType::kFloat)
      f(static_cast<float*>(data));
    else if (dtype == DType::kBFloat16)
      f(static_cast<bf16*>(data));
    else
      f(static_cast<half*>(data));
  }
};

__device__ __forceinline__ bool is_in(const StatePool& pool, int64_t row) {
  return row >= 0 && row < pool.rows;
}

__device__ __forceinline__ StateMatrix matrix_in(const StatePool& pool, int64_t row, int64_t head) {
  if (!is_in(pool, row)) return {};
  const int64_t bytes = pool.dtype == DType::kFloat ? 4 : 2;
  return {static_cast<char*>(pool.data) + bytes * (row * pool.stride_n + head * pool.stride_h),
          pool.dtype};
}

__device__ __forceinline__ int64_t index_or(const Indices& x, int64_t i) {
  return x.data == nullptr ? i : index_at(x, i);
}

__device__ __forceinline__ bool is_on_pool(const Problem& p) {
  return p.pool.states.data != nullptr;
}

// Whether sequence n has no row in the pool. Then no state is read or written, and its results are
// 0.
__device__ __forceinline__ bool is_skipped(const Problem& p, int64_t n) {
  const Indices& slots = p.pool.slots;
  return slots.data != nullptr && !is_in(p.pool.states, index_at(slots, n));
}

// The matrix of a sequence and head among consecutive states [N, H, K, V].
__device__ __forceinline__ StateMatrix matrix_of(const Problem& p, const float* states, int64_t n,
                                                 int64_t head) {
  const int64_t matrix = static_cast<int64_t>(p.K) * p.V;
  return {states == nullptr ? nullptr : const_cast<float*>(states + (n * p.H + head) * matrix),
          DType::kFloat};
}

__device__ __forceinline__ StateMatrix initial_state(const Problem& p, int64_t n, int64_t head) {
  if (!is_on_pool(p)) return matrix_of(p, p.h0, n, head);
  if (p.pool.has_initial != nullptr && !p.pool.has_initial[n]) return {};
  return matrix_in(p.pool.states, index_or(p.pool.slots, n), head);
}

__device__ __forceinline__ StateMatrix final_state(const Problem& p, int64_t n, int64_t head) {
  if (!is_on_pool(p)) return matrix_of(p, p.ht, n, head);
  if (is_skipped(p, n)) return {};
  const Indices& write_slots = p.pool.write_slots;
  return matrix_in(p.pool.states, index_or(write_slots.data ? write_slots : p.pool.slots, n), head);
}

// The place for a checkpoint of sequence n after `tokens` of its tokens, which must end a chunk.
// Without `data` if no checkpoint is due.
__device__ __forceinline__ StateMatrix checkpoint_of(const Problem& p, int64_t n, int64_t tokens,
                                                     int64_t head) {
  const PoolRows& pool = p.pool;
  const uint32_t each = static_cast<uint32_t>(pool.checkpoint_chunks) * kChunk;
  const auto done = static_cast<uint32_t>(tokens);
  if (each == 0 || done % each != 0 || is_skipped(p, n)) return {};
  int64_t number = done / each - 1;
  if (pool.checkpoint_starts.data == nullptr) {
    number += n * (static_cast<uint32_t>(p.grid.T) / each);
  } else {
    number += index_at(pool.checkpoint_starts, n);
    if (number >= index_at(pool.checkpoint_starts, n + 1)) return {};
  }
  if (number < 0 || number >= pool.checkpoint_count) return {};
  return matrix_in(pool.checkpoints, index_or(pool.checkpoint_slots, number), head);
}

}  // namespace gla_ext::cuda
