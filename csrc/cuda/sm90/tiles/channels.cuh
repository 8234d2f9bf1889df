// A chunk's rows in registers, and the sums of their gates. A thread holds a channel pair (two
// neighbouring key channels) in one sub-chunk of the tokens. cumsum.cuh and triangle.cuh compute
// the same sums by tensor cores from shared memory; here the gates are in registers, of any dtype,
// and are added one by one.
#pragma once

#include "cuda/device/gates.cuh"
#include "tiles.cuh"

namespace gla_ext::cuda::sm90 {

// threadIdx.x, read again at each call, so that values derived from it take no registers while
// products run.
__device__ __forceinline__ int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  __builtin_assume(thread >= 0 && thread < 1024);  // so that divisions compile to shifts
  return thread;
}

__device__ __forceinline__ float2 unpack(float2 pair) { return pair; }

__device__ __forceinline__ float2 operator+(float2 a, float2 b) {
  return make_float2(a.x + b.x, a.y + b.y);
}
__device__ __forceinline__ float2 operator-(float2 a, float2 b) {
  return make_float2(a.x - b.x, a.y - b.y);
}
__device__ __forceinline__ float2 operator*(float2 a, float2 b) {
  return make_float2(a.x * b.x, a.y * b.y);
}
__device__ __forceinline__ float2& pair_at(float* row, int channel) {
  return *reinterpret_cast<float2*>(row + channel);
}
__device__ __forceinline__ float2 pair_at(const float* row, int channel) {
  return *reinterpret_cast<const float2*>(row + channel);
}

// Multiplies accumulators of 64 columns by one factor per column. `by` points to the factors of the
// thread's first column pair.
__device__ __forceinline__ void scale_columns(float (&d)[32], const float* by) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 pair = pair_at(by, 8 * j);
#pragma unroll
    for (int e = 0; e < 4; ++e) d[4 * j + e] *= e % 2 == 0 ? pair.x : pair.y;
  }
}

// Index into an fp32 tile, swizzled so that the pairs of eight rows lie in different banks.
__device__ __forceinline__ int swizzled_float(int row, int column) {
  return row * kTile + (column ^ ((row & 3) << 3));
}

// Exponents of a channel's operands: q^ = q 2^(b - from), k^ = k 2^(to - b).
struct References {
  float from, to;
  __device__ __forceinline__ References(float b_last, bool strong)
      : from(strong ? 0.f : reference_of(b_last)), to(strong ? b_last : from) {}
};

// The channel pair and the sub-chunk of a thread.
template <int kGroups>
struct ChannelPair {
  int channel, first;  // key channel, token
  int sub_chunk;

  __device__ __forceinline__ ChannelPair() : ChannelPair(thread_index()) {}
  __device__ __forceinline__ explicit ChannelPair(int thread)
      : channel(2 * (thread % (kGroups * kTile / 2))),
        first(thread / (kGroups * kTile / 2) * static_cast<int>(kSubChunk)),
        sub_chunk(thread / (kGroups * kTile / 2)) {}
  // Byte offset in the tiles of q^, k^ and k_out.
  __device__ __forceinline__ int offset(int token) const {
    return channel / kTile * kTileBytes + swizzled(token, channel % kTile / 8) + channel % 8 * 2;
  }
};

// The channel pair's elements in the rows of a sub-chunk, still in the format of memory: the loads
// may be in flight.
template <class T>
struct ChannelPairColumn {
  using Word = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;
  Word x[kSubChunk];

  ChannelPairColumn() = default;

  __device__ __forceinline__ ChannelPairColumn(const Rows& r, const Problem& p, const Chunk& chunk,
                                               int first, int channel) {
    const T* at = rows_at<const T>(r, chunk) + token_offset(r, first) + channel;
#pragma unroll
    for (int i = 0; i < kSubChunk; ++i, at += r.stride_t)
      x[i] =
          channel < p.K && first + i < chunk.length ? *reinterpret_cast<const Word*>(at) : Word{};
  }
  __device__ __forceinline__ float2 operator[](int i) const { return unpack(x[i]); }
};

__device__ __forceinline__ float2 to_log2(float2 g) {
  return make_float2(cuda::to_log2(g.x), cuda::to_log2(g.y));
}
// b of the channel pair before its sub-chunk, and at the end of the chunk.
struct Cumsum {
  float2 b = make_float2(0.f, 0.f), last = b;
};
template <class Gate, int kGroups>
__device__ __forceinline__ void sum_gates(float (&sums)[kSubChunks][kGroups * kTile],
                                          const ChannelPairColumn<Gate>& gates,
                                          const ChannelPair<kGroups>& pair) {
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) sum = sum + to_log2(gates[i]);
  pair_at(sums[pair.sub_chunk], pair.channel) = sum;
}
template <int kGroups>
__device__ __forceinline__ Cumsum cumsum(const float (&sums)[kSubChunks][kGroups * kTile],
                                         const ChannelPair<kGroups>& pair) {
  Cumsum c;
#pragma unroll
  for (int sub = 0; sub < kSubChunks; ++sub) {
    const float2 x = pair_at(sums[sub], pair.channel);
    if (sub < pair.sub_chunk) c.b = c.b + x;
    c.last = c.last + x;
  }
  return c;
}

}  // namespace gla_ext::cuda::sm90
