// What the parts of narrow_sweep.cu share: a block's shared memory, and its barriers.
#pragma once

#include "../operands.cuh"
#include "../products.cuh"
#include "../states/state.cuh"
#include "../states/sweeps.cuh"
#include "../triangle.cuh"
#include "../warp_rows.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

// Warpgroups of a block.
enum Role { kOperands, kGradients, kRoles };
constexpr int kSweepThreads = kRoles * kGroupThreads;
constexpr int kSweepStages = 2;  // chunks: one of each role

// A chunk. What is made of it takes the places of what it is made of.
struct Stage {
  unsigned char q[kTileBytes], k[kTileBytes];  // [token][K], then q^, k^, then dq, dk
  unsigned char g[kTileBytes];                 // gates [token][K], clamped, then dg
  unsigned char S[kTileBytes];                 // [K][V]; then the high half of what dg sums
  unsigned char v[kTileBytes];    // [token][V], behind S: one operand of 128 rows; then dv
  unsigned char d_o[kTileBytes];  // [token][V], then the low half
};

// Per channel, of a chunk.
struct Factors {
  float factors[kMiddle + 1][1][kTile];  // 2^from, and, of dS~, outside tier 1 2^b_C, else 1
  float sums[kTile];                     // rowsum(S~ dS~)
  float warp_sums[kGroupWarps][kTile];   // what dS~ owes to k in the rows of a warp

  __device__ __forceinline__ float* states(int) { return sums; }
  __device__ __forceinline__ float* inter(int, int warp) { return warp_sums[warp]; }
};

// Of the gradients' warpgroup alone.
struct Own {
  float gates[kParts][kTile], dg[kParts][kTile];  // sums of a part of the tokens
  // In place of the first ones: what dg owes to the states that enter and leave the chunk.
  __device__ __forceinline__ float* states() { return dg[0]; }
};

// A tensor's rows of the segment and head.
template <class T>
struct SegmentRows {
  T* first;
  int32_t stride;

  __device__ __forceinline__ void start(const Rows& r, const Segment& segment) {
    first = rows_at<T>(r, segment.row, segment.start, segment.head);
    stride = token_offset(r, 1);
  }
  __device__ __forceinline__ T* at(int token) const {
    return first + static_cast<int64_t>(token) * stride;
  }
};

struct alignas(1024) Shared {
  Stage stages[kSweepStages];
  unsigned char dS[kTileBytes];  // dS~ [K][V]
  Factors factors[kSweepStages];
  Own own;
  float b_last[kTile];  // natural units
  SegmentRows<const bf16> q, k, g, v, d_o;
  SegmentRows<bf16> dq, dk, dg, dv;
  Segment segment;
  // Of a chunk: its operands and dS~ are there; dS has taken q^ and do; its place is free.
  uint64_t ready[kSweepStages], summed[kSweepStages], empty[kSweepStages];
  uint64_t taken;  // dS~ is read
  int exact[kSweepStages];
};

// Makes the barriers and finds segment number `index`, by one thread.
__device__ __forceinline__ void start(Shared& s, const Problem& p, int64_t index) {
  const Segment segment = s.segment = find_segment(p, index);
  s.q.start(p.q, segment);
  s.k.start(p.k, segment);
  s.g.start(p.g, segment);
  s.v.start(p.v, segment);
  s.d_o.start(p.d_o, segment);
  s.dq.start(p.dq, segment);
  s.dk.start(p.dk, segment);
  s.dg.start(p.dg, segment);
  s.dv.start(p.dv, segment);
  for (int i = 0; i < kSweepStages; ++i) {
    init_barrier(&s.ready[i], kGroupThreads);
    init_barrier(&s.summed[i], kGroupWarps);
    init_barrier(&s.empty[i], kGroupThreads);
  }
  init_barrier(&s.taken, kGroupWarps);
}

}  // namespace
}  // namespace gla_ext::cuda::sm90
