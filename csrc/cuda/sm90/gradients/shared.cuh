// What the parts of gradients.cu share: a block's shared memory, swizzled tiles, places of threads.
#pragma once

#include "../../device/gates.cuh"
#include "../tiles.cuh"

namespace gla_ext::cuda::sm90 {

constexpr int kParts = kSubChunks;  // of a chunk's tokens, where a thread has a part

// Blocks of a multiprocessor, as shared memory allows.
template <int kGroups>
constexpr int kBlocks = kGroups == 1 ? 3 : 4 / kGroups;

// A chunk's first values and its states.
struct Bases {
  const bf16 *d_o, *v, *S, *dS;
  bf16* dv;
};

// kGroups warpgroups, each with 64 of the key channels, and with 64 / kGroups columns of A, dA
// and of a tile of dv.
template <int kGroups>
struct Shared {
  static constexpr int kChannels = kGroups * kTile;
  struct Operands {
    unsigned char k_out[kGroups][kTileBytes];                       // [token][K]
    unsigned char S[kGroups][kTileBytes], dS[kGroups][kTileBytes];  // [K][64 values]
    unsigned char d_o[kTileBytes], v[kTileBytes];                   // [token][64 values]
  };
  struct Sums {
    float gates[kParts][kChannels], dg[kParts][kChannels];  // of a part of the tokens
    // Of what the state that leaves the chunk owes to k, of a warp's tokens; outside tier 1, of a
    // part of them.
    float inter[kParts][kChannels];
    float states[kChannels];  // rowsum(S dS')
  };
  unsigned char q[kGroups][kTileBytes], k[kGroups][kTileBytes];  // q^ and k^, [token][K]
  union {
    Operands operands;
    float gradients[2][kGroups][kTile * kTile];  // x and y, [token][K]
  };
  union {
    unsigned char A[kTileBytes];  // [token][token]
    Sums sums;
  };
  unsigned char dv[kTileBytes];  // [token][64 values]
  float b_last[kChannels];
  Chunk chunk;  // here and no longer in registers, which accumulators take
  Bases bases;
};

// threadIdx.x, read anew: what follows from it takes no registers while products run.
__device__ __forceinline__ int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Of an fp32 tile: pairs of eight rows lie in different banks.
__device__ __forceinline__ int swizzled_float(int row, int column) {
  return row * kTile + (column ^ ((row & 3) << 3));
}

__device__ __forceinline__ float2 unpack(float2 pair) { return pair; }
__device__ __forceinline__ uint32_t& word(unsigned char* tile, int offset) {
  return *reinterpret_cast<uint32_t*>(tile + offset);
}

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

// Exponents of a channel's operands: q^ = q 2^(b - from), k^ = k 2^(to - b).
struct References {
  float from, to;
  __device__ __forceinline__ References(float b_last, bool exact)
      : from(exact ? 0.f : reference_of(b_last)), to(exact ? b_last : from) {}
};

// A warpgroup and a lane's place in the 64 rows of its products.
struct Place {
  int thread, group, row, t;  // t: of the pair of neighbours in eight columns
  __device__ __forceinline__ Place()
      : thread(thread_index()),
        // One value a warp, so that the compiler knows products are not in diverging branches.
        group(__shfl_sync(0xffffffffu, thread / kGroupThreads, 0)),
        row(thread % kGroupThreads / 32 * 16 + thread % 32 / 4),
        t(thread % 4) {}
};

}  // namespace gla_ext::cuda::sm90
