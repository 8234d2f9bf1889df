// Gates: their log2 form, the tier of a chunk, and the exponents of operands.
//
// A chunk is in tier 1 if all of its b, including 0 before the first token, stay within a range of
// kTierRange. One integer reference r per channel then serves the whole chunk: q^ = q 2^(b - r) and
// k^ = k 2^(r - b) neither overflow nor underflow, and the chunk is ordinary linear attention. Any
// other chunk has strong gates and is called a strong chunk: its scores are anchored at sub-chunks
// (steps/strong/).
//
// Past alone (forward of batch-invariant calls): r = 0, |b| may be up to kPastTierRange, and of a
// strong chunk only the rows from the first out of range on are strong.
#pragma once

#include "tile.cuh"

namespace gla_ext::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kReset = -150.f;        // log2 units; 2^x of a clamped gate is exactly 0
constexpr float kTierRange = 112.f;     // range of b in a tier-1 chunk, its start included
constexpr float kPastTierRange = 80.f;  // 2^-b reaches twice as high with r = 0

// 2^x, or 0 if that is below the smallest normal number.
__device__ __forceinline__ float exp2_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Converts a natural-log gate to x. NaN stays NaN.
__device__ __forceinline__ float to_log2(float g) {
  const float x = g * kLog2E;
  return x < kReset ? kReset : x;
}

// The reference of tier 1, the middle of the range if all gates have one sign. It is an integer, so
// that 2^r is exact.
__device__ __forceinline__ float reference_of(float b_last) { return rintf(0.5f * b_last); }

// Whether |b - mid| exceeds half of tier 1's range, or |b_last| the whole; true for NaN.
__device__ __forceinline__ bool out_of_tier1(float b, float b_last) {
  return !(fabsf(b - 0.5f * b_last) <= kTierRange / 2) || !(fabsf(b_last) <= kTierRange);
}

// The same past alone.
__device__ __forceinline__ bool out_of_past_tier1(float b) { return !(fabsf(b) <= kPastTierRange); }

__device__ __forceinline__ bool in_tier1(const Problem& p, const Chunk& chunk) {
  const uint8_t* flags = p.tiers + chunk.entry * kMaxTierBlocks;
  bool out = false;
  for (int i = 0; i * kTierBlock < p.K; ++i) out |= flags[i] != 0;
  return !out;
}

// The first row of a chunk whose scores the strong kernels make: kChunk in tier 1, and 0 in a
// strong chunk, unless the call is one of past alone.
__device__ __forceinline__ int first_strong_row(const Problem& p, const Chunk& chunk) {
  const uint8_t* flags = p.tiers + chunk.entry * kMaxTierBlocks;
  int rows = 0;
  for (int i = 0; i * kTierBlock < p.K; ++i) rows = max(rows, static_cast<int>(flags[i]));
  return static_cast<int>(kChunk) - rows;
}

// The largest of the numbers, 0 to kChunk, that the threads of a block have. All must call it.
__device__ __forceinline__ int largest_of_block(int x) {
  int largest = 0;
#pragma unroll 1
  for (int step = kChunk; step > 0; step /= 2)
    if (__syncthreads_or(x >= largest + step)) largest += step;
  return largest;
}

// Strong chunks are few, or nearly all of them. As many blocks as fill a GPU look at every
// strong_blocks-th chunk and call f(chunk, part of `parts`) for the strong ones. Host and device
// compute the same number of blocks. It is a prime, so that a block's chunks come from different
// heads: one head with strong gates then loads all blocks equally.
__host__ __device__ inline int64_t strong_blocks(int64_t chunk_heads) {
  constexpr int64_t kEnough = 263;
  return chunk_heads < kEnough ? chunk_heads : kEnough;
}

template <class F>
__device__ __forceinline__ void for_strong_chunks(const Problem& p, int parts, F&& f,
                                                  unsigned block = blockIdx.x) {
  // The host keeps the number of chunks within a grid's 31 bits.
  const auto chunks = static_cast<uint32_t>(p.grid.B * p.grid.entries * p.H);
  const auto step = static_cast<uint32_t>(strong_blocks(chunks));
  for (uint32_t first = block / parts; first < chunks; first += 32 * step) {
    const uint32_t mine = first + threadIdx.x % 32 * step;
    bool strong = false;
    if (mine < chunks) {
      const Chunk chunk = find_chunk(p, mine);
      strong = chunk.length > 0 && !chunk.tail && !in_tier1(p, chunk);
    }
    // Every warp sees the same flags.
    uint32_t left = __ballot_sync(0xffffffffu, strong);
    for (; left != 0; left &= left - 1) {
      f(find_chunk(p, first + (__ffs(static_cast<int>(left)) - 1) * step),
        static_cast<int>(block % parts));
      __syncthreads();  // shared memory is read before the next chunk overwrites it
    }
  }
}

// for_strong_chunks for code that has no registers for the chunk: the chunk is in shared memory, a
// block does a whole chunk, and f has no arguments.
template <class F>
__device__ __forceinline__ void for_strong_chunks(const Problem& p, Chunk& shared, F&& f,
                                                  unsigned block = blockIdx.x) {
  const auto with_shared = [&](const Chunk& chunk, int) {
    if (threadIdx.x == 0) shared = chunk;
    __syncthreads();
    f();
  };
  for_strong_chunks(p, 1, with_shared, block);
}

// x of 16 tokens of one channel: from the gates if they are given, else as differences of b. Tokens
// from `length` on have x = 0.
struct GateColumn {
  float x[kSubChunk];

  GateColumn() = default;
  __device__ __forceinline__ GateColumn(const Problem& p, const Chunk& chunk, int first_token,
                                        int channel) {
    if (p.g.data == nullptr)
      from_b(p, chunk, first_token, channel);
    else if (p.g.dtype == DType::kBFloat16)
      from_gates<bf16>(p, chunk, first_token, channel);
    else if (p.g.dtype == DType::kHalf)
      from_gates<half>(p, chunk, first_token, channel);
    else
      from_gates<float>(p, chunk, first_token, channel);
  }

  template <class Gate>
  __device__ __forceinline__ void from_gates(const Problem& p, const Chunk& chunk, int first_token,
                                             int channel) {
    const bool inside = channel < p.K;
    const Gate* g = rows_at<const Gate>(p.g, chunk) + (inside ? channel : 0);
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) {
      const int token = first_token + i;
      const float y = to_float(g[token_offset(p.g, min(token, chunk.length - 1))]);
      x[i] = inside && token < chunk.length ? to_log2(y) : 0.f;
    }
  }

  __device__ __forceinline__ void from_b(const Problem& p, const Chunk& chunk, int first_token,
                                         int channel) {
    const float* b = rows_at<const float>(p.b, chunk) + channel;
    float before = channel < p.K && first_token > 0 && first_token <= chunk.length
                       ? b[token_offset(p.b, first_token - 1)]
                       : 0.f;
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) {
      const int token = first_token + i;
      const bool there = channel < p.K && token < chunk.length;
      const float now = there ? b[token_offset(p.b, token)] : 0.f;
      x[i] = there ? now - before : 0.f;
      before = now;
    }
  }

  __device__ __forceinline__ float sum() const {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) total += x[i];
    return total;
  }
};

// GateColumn for the fused path, which always has gates, in bf16 or fp32.
struct FusedGateColumn : GateColumn {
  __device__ __forceinline__ FusedGateColumn(const Problem& p, const Chunk& chunk, int first_token,
                                             int channel) {
    if (p.g.dtype == DType::kBFloat16)
      from_gates<bf16>(p, chunk, first_token, channel);
    else
      from_gates<float>(p, chunk, first_token, channel);
  }
};

// Replaces x_i by the sum of x from token i of a sub-chunk to the end of its chunk. A thread has
// one channel and one sub-chunk; all threads must call it.
template <int kColumns>
__device__ __forceinline__ void suffix_sum(float (&x)[kSubChunk], float (*s_sums)[kColumns],
                                           int sub, int column) {
  float sum = 0;
#pragma unroll
  for (int i = static_cast<int>(kSubChunk) - 1; i >= 0; --i) {
    sum += x[i];
    x[i] = sum;
  }
  if (sub < kSubChunks) s_sums[sub][column] = sum;
  __syncthreads();  // s_sums is written
  float behind = 0;
  for (int other = kSubChunks - 1; other > sub; --other) behind += s_sums[other][column];
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) x[i] += behind;
}

// 16 tokens of one channel of q or k, zero from `length` on. kInput: the kernel does not write the
// tensor. Past the last token it then loads another element of the chunk, which takes fewer
// registers than a predicate.
template <class In, bool kInput = true>
struct Column {
  float x[kSubChunk];

  __device__ __forceinline__ Column(const Rows& r, const Chunk& chunk, int first_token, int channel,
                                    int channels) {
    const bool inside = channel < channels;
    const In* base = rows_at<const In>(r, chunk) + (inside ? channel : 0);
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i) {
      const int token = first_token + i;
      if constexpr (kInput) {
        const float y = to_float(base[token_offset(r, min(token, chunk.length - 1))]);
        x[i] = inside && token < chunk.length ? y : 0.f;
      } else {
        x[i] = inside && token < chunk.length ? to_float(base[token_offset(r, token)]) : 0.f;
      }
    }
  }
};

// Loads tier 1's operands q^ = q 2^(b - r) and k^ = k 2^(r - b) of kColumns channels, starting at
// `first`. Past alone, r = 0.
template <Access kAccess, class Op, class In, int kColumns>
__device__ __forceinline__ void load_tier1_operands(Op* s_q, Op* s_k, const Problem& p,
                                                    const Chunk& chunk, int first,
                                                    bool past_alone = false) {
  const float* b = rows_at<const float>(p.b, chunk);
  TileRows<kAccess, In, kColumns> r_q, r_k;
  TileRows<kAccess, float, kColumns> r_b;
  Eight<float> b_last;
  r_q.load(rows_at<const In>(p.q, chunk), p.q, chunk.length, first, p.K);
  r_k.load(rows_at<const In>(p.k, chunk), p.k, chunk.length, first, p.K);
  r_b.load(b, p.b, chunk.length, first, p.K);
  for_eights<kTile, kColumns>([&](int pass, int, int column) {
    if (pass == 0)
      b_last = load_row<kAccess>(b, p.b, chunk.length - 1, chunk.length, first + column, p.K);
  });
  for_eights<kTile, kColumns>([&](int pass, int row, int column) {
    float q_hat[8], k_hat[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float r = past_alone ? 0.f : reference_of(b_last[i]);
      const float e = row < chunk.length ? r_b.x[pass][i] - r : 0.f;
      q_hat[i] = r_q.x[pass][i] * exp2_ftz(e);
      k_hat[i] = r_k.x[pass][i] * exp2_ftz(-e);
    }
    store8(s_q + row * kPitch<Op, kColumns> + column, to_operands<Op>(q_hat, takes_tf32<In>(p)));
    store8(s_k + row * kPitch<Op, kColumns> + column, to_operands<Op>(k_hat, takes_tf32<In>(p)));
  });
}

// Whether sums of the gates after a token are given: only fp32 inputs have them.
template <class In>
__device__ __forceinline__ bool has_suffix(const Problem& p) {
  return std::is_same_v<In, float> && p.b_suffix.data != nullptr;
}

// The chunk's sums of the gates after a token, or null.
template <class In>
__device__ __forceinline__ const float* suffix_at(const Problem& p, int64_t row, int64_t token,
                                                  int32_t head) {
  return has_suffix<In>(p) ? rows_at<const float>(p.b_suffix, row, token, head) : nullptr;
}

// The operand that multiplies the states: q scale 2^b (kFromStart), or k 2^(b_C - b) (kToEnd).
enum class Decay { kFromStart, kToEnd };

// Eight elements of such an operand, loaded ahead.
template <Access kAccess, class In, Decay kDecay>
struct StateOperand {
  Eight<In> x;
  Eight<float> e;

  // `base`, `b` and `suffix` (if not null) point to the chunk's first token.
  __device__ __forceinline__ void load(const Problem& p, const In* base, const Rows& r,
                                       const float* b, const float* suffix, int row, int length,
                                       int column) {
    x = load_row<kAccess>(base, r, row, length, column, p.K);
    const bool to_end = kDecay == Decay::kToEnd && suffix != nullptr;
    e = load_row<kAccess>(to_end ? suffix : b, to_end ? p.b_suffix : p.b, row, length, column, p.K);
  }

  template <class Op>
  __device__ __forceinline__ Eight<Op> operands(const Problem& p, const Eight<float>& b_last,
                                                bool with_suffix, bool inside) const {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kDecay == Decay::kFromStart)
        y[i] = x[i] * p.scale * exp2_ftz(e[i]);
      else
        y[i] = x[i] * exp2_ftz(with_suffix ? e[i] : b_last[i] - e[i]);
      y[i] = inside ? y[i] : 0.f;
    }
    return to_operands<Op>(y, takes_tf32<In>(p));
  }
};

}  // namespace gla_ext::cuda
