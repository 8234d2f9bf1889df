// What kernels of paired blocks share: a cluster of two blocks has the same segment and head and
// 128 values each, and each block gates every other chunk for both. A cluster may go on to further
// pieces, of one segment, head and 256 values each.
#pragma once

#include "../cluster.cuh"
#include "../sweep.cuh"

namespace gla_ext::cuda::sm90 {
namespace {

constexpr int kPair = 2;                  // blocks of a cluster
constexpr int kValues = kGroups * kTile;  // of a block

// Pairs of blocks of 128 values.
__host__ __device__ constexpr int value_pairs(const Problem& p) {
  return static_cast<int>(blocks_of(p.V, kPair * kValues));
}
inline int64_t count_pieces(const Problem& p) {
  return segment_heads(p.grid, p.H) * value_pairs(p);
}

// A block's cluster and its number there.
struct Cluster {
  int64_t index = blockIdx.x / kPair, count = gridDim.x / kPair;
  int rank = static_cast<int>(blockIdx.x % kPair);
};

// Chunks of a segment that a block gates: rank, rank + 2, ... None of the tokens behind packed
// sequences.
__device__ __forceinline__ int own_chunks(const Segment& segment, int rank) {
  return segment.tail ? 0 : (segment.chunks + 1 - rank) / kPair;
}

// The pieces of a cluster, kPieces at most.
template <int kPieces>
struct Pieces {
  int taken;  // if there may be several
  Segment segments[kPieces];

  // Of `pieces`, which the clusters take in turn. By all threads, before a barrier.
  __device__ __forceinline__ void find(const Problem& p, int64_t pieces, const Cluster& cluster) {
    if (threadIdx.x < kPieces) {
      const int64_t piece = cluster.index + threadIdx.x * cluster.count;
      if (piece < pieces) segments[threadIdx.x] = find_segment(p, piece / value_pairs(p));
    }
    if (threadIdx.x == 0)
      taken = static_cast<int>((pieces - cluster.index + cluster.count - 1) / cluster.count);
  }
  __device__ __forceinline__ int count() const { return kPieces == 1 ? 1 : taken; }

  // f(segment, first value of the block, chunks of either block in the pieces before)
  template <class F>
  __device__ __forceinline__ void for_pieces(const Problem& p, const Cluster& cluster,
                                             F&& f) const {
    const int v_pairs = value_pairs(p);
    int before[kPair] = {};
    for (int i = 0; i < count(); ++i) {
      const int pair = static_cast<int>((cluster.index + i * cluster.count) % v_pairs);
      f(segments[i], (kPair * pair + cluster.rank) * kValues, before);
#pragma unroll
      for (int r = 0; r < kPair; ++r) before[r] += own_chunks(segments[i], r);
    }
  }
};

// A chunk of a producer, which takes every other one of its block's. These are numbered through all
// pieces.
template <int kPieces>
class OwnChunk {
 public:
  int number;

  __device__ __forceinline__ OwnChunk(const Pieces<kPieces>& pieces, int group, int rank)
      : number(group), pieces_(pieces), rank_(rank) {
    find();
  }
  __device__ __forceinline__ bool is_there() const { return piece_ < pieces_.count(); }
  __device__ __forceinline__ void next() {
    number += kGroups;
    find();
  }
  __device__ __forceinline__ const Segment& segment() const { return pieces_.segments[piece_]; }
  __device__ __forceinline__ int chunk() const { return kPair * (number - before_) + rank_; }

 private:
  // Leaves the pieces that end before it.
  __device__ __forceinline__ void find() {
    for (; is_there(); ++piece_) {
      const int chunks = own_chunks(segment(), rank_);
      if (number - before_ < chunks) return;
      before_ += chunks;
    }
  }
  const Pieces<kPieces>& pieces_;
  const int rank_;
  int piece_ = 0, before_ = 0;  // own chunks of the pieces before
};

// A chunk as its consumers meet it: the block that gates it, its number among that block's, and the
// producer.
struct Turn {
  int rank, number, producer;
  __device__ __forceinline__ Turn(int chunk, const int (&before)[kPair])
      : rank(chunk % kPair),
        number((rank == 0 ? before[0] : before[1]) + chunk / kPair),
        producer(number % kGroups) {}
};

// Barriers of the places where chunks are gated and where they are received, one of each a
// producer.
struct Handover {
  // full: a chunk is there. empty: the consumers of both blocks have left one of this block's own.
  uint64_t own_full[kGroups], received_full[kGroups], empty[kGroups];

  // By one thread.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kGroups; ++i) {
      init_barrier(&own_full[i], kGroupThreads);
      init_barrier(&received_full[i], 1);
      // All threads of this block's consumers, and the warps of the other's.
      init_barrier(&empty[i], kGroups * (kGroupThreads + kGroupThreads / 32));
    }
  }
  __device__ __forceinline__ static uint32_t parity_of(int number) {
    return static_cast<uint32_t>(number / kGroups) & 1;
  }
  // The place of a producer's own chunk is free.
  __device__ __forceinline__ void wait_for_place(int number) {
    if (number >= kGroups) wait(&empty[number % kGroups], parity_of(number - kGroups));
  }
  // By one thread, before it sends `bytes` to the other block: the barrier there, which counts
  // them.
  __device__ __forceinline__ uint32_t expect_in_other(int producer, int other, int bytes) {
    const uint32_t full = address_in(&received_full[producer], other);
    arrive_and_expect(full, bytes);
    return full;
  }
  __device__ __forceinline__ void wait_for_chunk(const Turn& turn, int rank) {
    wait(turn.rank == rank ? &own_full[turn.producer] : &received_full[turn.producer],
         parity_of(turn.number));
  }
  // By all threads of a consumer, which have read the chunk.
  __device__ __forceinline__ void leave(const Turn& turn, int rank) {
    if (turn.rank == rank) {
      arrive(&empty[turn.producer]);
    } else {
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive_in_cluster(address_in(&empty[turn.producer], turn.rank));
    }
  }
};

}  // namespace
}  // namespace gla_ext::cuda::sm90
