// The structs that the host passes to the CPU kernels: plain, no torch header.
#pragma once

#include <cstdint>

#include "common/chunk.h"

namespace gla_ext::cpu {

constexpr int64_t kSubChunks = kChunk / kSubChunk;

// The width of a row of a tile: a multiple of every vector length in use.
constexpr int64_t kPad = 16;  // elements
constexpr int64_t padded(int64_t n) { return (n + kPad - 1) / kPad * kPad; }

enum class DType : uint8_t { kBFloat16, kHalf, kFloat, kDouble };

// A tensor [B, T, H, D] whose last dimension is contiguous; strides in elements. `group` heads of
// the Problem share one of its heads: head h reads head h / group.
struct Rows {
  void* data = nullptr;
  DType dtype = DType::kFloat;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
  int64_t group = 1;

  int64_t head_offset(int64_t head) const { return (group == 1 ? head : head / group) * stride_h; }
};

// Sequence n: `length` tokens of batch row `row` from token `start`. In tensors with a chunk
// dimension, its chunks are consecutive from `first_chunk`.
struct Sequence {
  int64_t n, row, start, length, first_chunk;

  int64_t chunks() const { return (length + kChunk - 1) / kChunk; }
};

// One chunk of one head.
struct Chunk {
  int64_t row, start, length;  // batch row, first token, tokens (1 .. kChunk)
  int64_t head;
  int64_t state;  // index of the [K, V] matrix in S and dS
};

// Everything a step may read or write. Absent tensors have data == nullptr. Sums are accumulated in
// T: float, or double for fp64 inputs.
template <typename T>
struct Problem {
  using Accumulate = T;

  int64_t H = 0, K = 0, V = 0;
  T scale = 1;
  // With bf16 inputs, operands of matrix products are rounded to bf16, as a tensor core takes them.
  bool round_operands = false;
  // Whether a token's operands depend on its past alone (docs/numerics.md).
  bool past_alone = false;
  bool state_v_first = false;  // layout of h0, ht, dht, dh0: [V, K] instead of [K, V]

  Rows q, k, v, d_o;       // [B, T, H, K | V]; k, v, g and gv may have HK heads
  Rows g;                  // natural-log gates [B, T, H, K], or absent and then b is read;
                           // without both nothing decays
  Rows b;                  // gate cumsum in chunks, log2 units [B, T, H, K]
  Rows o, dq, dk, dv, dg;  // outputs
  Rows gv, dgv;            // natural-log gates on value channels [B, T, H, V], or absent
  bool reverse = false;    // only for the recurrence: the last token comes first
  Rows A, A_diagonal, dA;  // [B, T, H, C], [B, T, H, c], [B, T, H, C]
  Rows dq_intra, dk_intra, dg_intra;  // [B, T, H, K], from step 6 to step 7

  const T* h0 = nullptr;   // [N, H, K, V]
  const T* dht = nullptr;  // [N, H, K, V]
  T* ht = nullptr;         // [N, H, K, V]
  T* dh0 = nullptr;        // [N, H, K, V]
  // Checkpoints are states after every checkpoint_chunks chunks (0: none). Those of sequence n
  // start at number first_checkpoint[n] of [.., H, K, V].
  int64_t checkpoint_chunks = 0;
  const int64_t* first_checkpoint = nullptr;
  T* checkpoints = nullptr;
  void* S = nullptr;  // [chunks, H, K, V], the state that enters each chunk
  DType S_dtype = DType::kFloat;
  bool S_is_local = false;  // S holds only the chunks of one (sequence, head)
  T* dS = nullptr;          // [chunks, H, K, V], the gradient of the state that leaves each chunk

  Chunk chunk(const Sequence& sequence, int64_t index, int64_t head) const {
    const int64_t done = index * kChunk;
    const int64_t left = sequence.length - done;
    return {sequence.row, sequence.start + done, left < kChunk ? left : kChunk, head,
            S_is_local ? index : (sequence.first_chunk + index) * H + head};
  }
};

}  // namespace gla_ext::cpu
