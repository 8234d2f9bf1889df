// The producer of the sweeps of sweep.cuh: copies rows and the sums of gates, and makes A.
#pragma once

#include "cuda/sm90/forward/fused/barriers.cuh"
#include "cuda/sm90/tiles/scores.cuh"
#include "cuda/sm90/tiles/sweep.cuh"
#include "dots.cuh"
#include "operands.cuh"

namespace gla_ext::cuda::sm90::head_gates {

// Multiplies scores, [tokens][tokens from `first` on], by scale 2^(b_row - b_column). Elements
// above the diagonal get arbitrary values.
template <int kColumns>
__device__ __forceinline__ void mask_scores(float (&A)[kColumns / 2], const HeadGates& gates,
                                            float scale, int first, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4, column = first + thread % 4 * 2;
  const auto b = [&](int token) { return *reinterpret_cast<const float2*>(gates.b[token]); };
  const float2 rows[2] = {b(row), b(row + 8)};
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float4 columns = *reinterpret_cast<const float4*>(gates.b[8 * j + column]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      A[4 * j + 2 * e] *= scale * exp2_ftz((rows[e].x - columns.x) + (rows[e].y - columns.y));
      A[4 * j + 2 * e + 1] *= scale * exp2_ftz((rows[e].x - columns.z) + (rows[e].y - columns.w));
    }
  }
}

// Puts A of the sweep's i-th chunk into its place. Runs on the producer, after its own copies have
// arrived.
template <class BlockOfKernel>
__device__ __forceinline__ void make_scores(BlockOfKernel& s, const Problem& p, int i, int thread) {
  const int before = i - s.kPlaces;
  if (before >= 0) wait(&s.empty[before % s.kStages], s.parity(before));  // had this place
  fence_for_products();
  group_barrier<forward::kProducerBarrier>(0);  // the chunk's copies have arrived
  const auto& stage = s.stages[i % s.kStages];
  const bool forward_in_time = BlockOfKernel::kTime == Time::kForward;
  constexpr int kColumns = BlockOfKernel::kColumns;
#pragma unroll 1
  for (int first = 0; first < kTile; first += kColumns) {
    float A[kColumns / 2];
    begin_scores<kTile * BlockOfKernel::kTiles, kColumns>(
        A, forward_in_time ? stage.q : stage.k, forward_in_time ? stage.k : stage.q, first);
    wait_for_products<0>();
    mask_scores<kColumns>(A, s.gates[i % s.kStages], p.scale, first, thread);
    place_scores<kColumns>(s.A[i % s.kPlaces], A, kTile, first, thread);
  }
}

// Copies a chunk's rows of q and k, of which A is made together with the gates.
template <class BlockOfKernel>
__device__ __forceinline__ void copy_keys(const BlockOfKernel& s, const Problem& p, int number,
                                          int chunk, int thread) {
  const auto& stage = s.stages[number];
  copy_operand<BlockOfKernel::kTiles>(stage.q, p.q, s.segment, chunk, thread, p.K);
  copy_operand<BlockOfKernel::kTiles>(stage.k, p.k, s.segment, chunk, thread, p.K);
}
// Copies a chunk's rows of the block's values.
template <class BlockOfKernel>
__device__ __forceinline__ void copy_values(const BlockOfKernel& s, const Problem& p, int block_v,
                                            int number, int chunk, int thread) {
  const auto& stage = s.stages[number];
  copy_rows<BlockOfKernel::kConsumers, kGroupThreads>(stage.v, p.v, s.segment, chunk, thread,
                                                      block_v, p.V);
  if constexpr (BlockOfKernel::kMakesDots)
    copy_rows<BlockOfKernel::kConsumers, kGroupThreads>(stage.w, p.d_o, s.segment, chunk, thread,
                                                        block_v, p.V);
}

// Used with dots and two stages. The next chunk's q and k are copied as soon as the consumers have
// multiplied those of the previous chunk. If they have done so already, A is made during the
// copies, otherwise before them.
template <class BlockOfKernel>
__device__ __forceinline__ void produce_keys_first(BlockOfKernel& s, const Problem& p,
                                                   int block_v) {
  const auto copy_keys = [&](int i) {
    if (i >= s.segment.chunks) return;
    const int thread = thread_index(), chunk = chunk_of<BlockOfKernel::kTime>(s.segment, i);
    head_gates::copy_keys(s, p, i % 2, chunk, thread);
    copy_gates(s.gates[i % 2], p, s.segment, chunk, thread);
  };
  const auto copy_values = [&](int i) {
    if (i >= s.segment.chunks) return;
    const int thread = thread_index(), chunk = chunk_of<BlockOfKernel::kTime>(s.segment, i);
    head_gates::copy_values(s, p, block_v, i % 2, chunk, thread);
  };
  copy_keys(0);
  commit_copies();
  copy_values(0);
  commit_copies();
  for (int i = 0; i < s.segment.chunks; ++i) {
    const int before = i - 1, other = (i + 1) % 2;  // the stage of the previous and the next chunk
    wait_for_copies<1>();                           // for the chunk's keys
    const bool early =
        before < 0 || !__any_sync(0xffffffffu, !has_passed(&s.multiplied[other], s.parity(before)));
    if (early) copy_keys(i + 1);
    commit_copies();
    make_scores(s, p, i, thread_index());
    wait_for_copies<1>();  // for the chunk's values
    fence_for_products();
    arrive(&s.full[i % 2]);
    if (!early) {
      wait(&s.multiplied[other], s.parity(before));
      copy_keys(i + 1);
    }
    commit_copies();
    if (before >= 0) wait(&s.empty[other], s.parity(before));
    copy_values(i + 1);
    commit_copies();
    if constexpr (BlockOfKernel::kMakesPairs) sum_pairs(s, p, i, block_v, thread_index());
  }
}

// Copies the rows and sums of the sweep's i-th chunk once its stage is free.
template <class BlockOfKernel>
__device__ __forceinline__ void copy_chunk(BlockOfKernel& s, const Problem& p, int block_v, int i) {
  const Segment& segment = s.segment;
  if (i < segment.chunks) {
    const int number = i % s.kStages, thread = thread_index();
    const int chunk = chunk_of<BlockOfKernel::kTime>(segment, i);
    if (i >= s.kStages) wait(&s.empty[number], s.parity(i - s.kStages));
    copy_keys(s, p, number, chunk, thread);
    copy_values(s, p, block_v, number, chunk, thread);
    copy_gates(s.gates[number], p, segment, chunk, thread);
  }
  commit_copies();
}

// Copies the chunk that takes the next free stage, and sums the pairs of the i-th chunk between the
// two halves of the copies. Copies are issued only as fast as earlier ones arrive: if A and the
// pairs were made without copies in between, the earlier copies would arrive long before they are
// done.
template <class BlockOfKernel>
__device__ __forceinline__ void copy_around_pairs(BlockOfKernel& s, const Problem& p, int block_v,
                                                  int i) {
  const Segment& segment = s.segment;
  const int next = i + s.kStages - 1, number = next % s.kStages;
  const int chunk = chunk_of<BlockOfKernel::kTime>(segment, next);
  const bool there = next < segment.chunks;
  if (there) {
    if (next >= s.kStages) wait(&s.empty[number], s.parity(next - s.kStages));
    copy_keys(s, p, number, chunk, thread_index());
  }
  sum_pairs(s, p, i, block_v, thread_index());
  if (there) {
    copy_values(s, p, block_v, number, chunk, thread_index());
    copy_gates(s.gates[number], p, segment, chunk, thread_index());
  }
  commit_copies();
}

// With two stages the next chunk is copied before A is made: no other copy is in flight meanwhile,
// and the consumers have long released the previous chunk. With more stages A comes first, since
// the consumers wait for it.
template <class BlockOfKernel>
__device__ __forceinline__ void produce_chunks(BlockOfKernel& s, const Problem& p, int block_v) {
  constexpr int kAhead = BlockOfKernel::kStages - 1;
  static_assert(kAhead > 1 || !BlockOfKernel::kMakesPairs);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) copy_chunk(s, p, block_v, i);
  for (int i = 0; i < s.segment.chunks; ++i) {
    wait_for_copies<kAhead - 1>();
    if (kAhead == 1) copy_chunk(s, p, block_v, i + kAhead);
    make_scores(s, p, i, thread_index());
    fence_for_products();
    arrive(&s.full[i % s.kStages]);
    if constexpr (BlockOfKernel::kMakesPairs)
      copy_around_pairs(s, p, block_v, i);
    else if (kAhead > 1)
      copy_chunk(s, p, block_v, i + kAhead);
  }
}

template <class BlockOfKernel>
__device__ __forceinline__ void produce(BlockOfKernel& s, const Problem& p, int block_v) {
  if constexpr (BlockOfKernel::kKeysFirst)
    produce_keys_first(s, p, block_v);
  else
    produce_chunks(s, p, block_v);
}

}  // namespace gla_ext::cuda::sm90::head_gates
