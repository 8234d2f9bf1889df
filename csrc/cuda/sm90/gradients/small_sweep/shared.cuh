// The shared memory of a block of gradients/small_sweep, and its barriers.
#pragma once

#include "cuda/sm90/gradients/common/warps.cuh"
#include "cuda/sm90/prepare/prepared.cuh"
#include "cuda/sm90/states/fused/state.cuh"
#include "cuda/sm90/states/fused/sweeps.cuh"
#include "cuda/sm90/tiles/products.cuh"
#include "cuda/sm90/tiles/triangle.cuh"

namespace gla_ext::cuda::sm90::gradients::small_sweep {

using states::Fields, states::load_entering, states::State;

// Warpgroups of a block.
enum Role { kOperands, kGradients, kRoles };
constexpr int kSweepThreads = kRoles * kGroupThreads;
constexpr int kSweepStages = 2;  // chunks; each role works on one

// A chunk. Results overwrite their inputs. In strong chunks A overwrites S; then fp32 terms of dq
// overwrite S and do, and those of dk overwrite q and k.
struct Stage {
  Tile q, k;  // [token][K], replaced by q^, k^, then by dq, dk
  Tile g;     // gates [token][K] (clamped in strong chunks), replaced by dg
  Tile S;     // [K][V], replaced by the high half of dg's terms
  Tile v;     // [token][V], after S: one operand of 128 rows; replaced by dv
  Tile d_o;   // [token][V], replaced by the low half
};

// Factors of a chunk, per channel.
struct Factors {
  float factors[kMiddle + 1][1][kTile];  // 2^from; for dS~ 2^b_C in strong chunks, else 1
  float from[kTile];
  // The contribution to dg of the states that enter and leave the chunk; in strong chunks only of
  // those that enter.
  float sums[kTile];
  float parts[kSubChunks][kTile];  // strong chunks: part of dg from k through dS~, by sub-chunk

  __device__ __forceinline__ float* states(int = 0) { return sums; }
  __device__ __forceinline__ float* inter(int, int part) { return parts[part]; }
};

// Sums over each sub-chunk of a strong chunk, used by the warpgroup of the gradients.
struct Own {
  float gates[kSubChunks][kTile], dg[kSubChunks][kTile];
};

// The rows of a tensor that belong to the segment and head.
struct SegmentRows {
  const bf16* first;
  int32_t stride;

  __device__ __forceinline__ void start(const Rows& r, const Segment& segment) {
    first = rows_at<const bf16>(r, segment.row, segment.start, segment.head);
    stride = token_offset(r, 1);
  }
  __device__ __forceinline__ const bf16* at(int token) const {
    return first + static_cast<int64_t>(token) * stride;
  }
};

// Rows of several outputs with equal strides.
template <int kTensors>
struct OutputRows {
  bf16* first[kTensors];
  int32_t stride;
};

struct alignas(1024) Shared {
  Stage stages[kSweepStages];
  Tile dS;  // dS~ [K][V]
  Factors factors[kSweepStages];
  Own own;
  float b_last[kTile];  // natural units
  SegmentRows q, k, g, v, d_o;
  OutputRows<3> key_grads;  // dq, dk, dg, each a fresh [B, T, H, K]
  OutputRows<1> dv;
  Segment segment;
  // ready: q^, k^ and dS~ of a chunk are written. summed: q^ and do have been added to dS. empty:
  // the chunk's stage is free.
  uint64_t ready[kSweepStages], summed[kSweepStages], empty[kSweepStages];
  uint64_t taken;  // dS~ is read
  int strong[kSweepStages];
};

// Sets up the barriers and finds segment number `index`. Called by one thread.
__device__ __forceinline__ void start(Shared& s, const Problem& p, int64_t index) {
  const Segment segment = s.segment = find_segment<false>(p, index);
  s.q.start(p.q, segment);
  s.k.start(p.k, segment);
  s.g.start(p.g, segment);
  s.v.start(p.v, segment);
  s.d_o.start(p.d_o, segment);
  const auto output = [&](const Rows& r) {
    return rows_at<bf16>(r, segment.row, segment.start, segment.head);
  };
  s.key_grads = {{output(p.dq), output(p.dk), output(p.dg)}, token_offset(p.dq, 1)};
  s.dv = {{output(p.dv)}, token_offset(p.dv, 1)};
  for (int i = 0; i < kSweepStages; ++i) {
    init_barrier(&s.ready[i], kGroupThreads);
    init_barrier(&s.summed[i], kGroupWarps);
    init_barrier(&s.empty[i], kGroupThreads);
  }
  init_barrier(&s.taken, kGroupWarps);
}

}  // namespace gla_ext::cuda::sm90::gradients::small_sweep
