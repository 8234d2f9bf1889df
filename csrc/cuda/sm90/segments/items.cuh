// Shared by the kernels that run in clusters. The two blocks of a cluster work on the same segment
// and head; each has 128 values, and each gates every other chunk for both. A cluster may take
// several work items in sequence; a work item is a segment, a head and 256 values.
#pragma once

#include "cuda/sm90/tiles/cluster.cuh"
#include "cuda/sm90/tiles/sweep.cuh"

namespace gla_ext::cuda::sm90 {

constexpr int kClusterBlocks = 2;         // blocks of a cluster
constexpr int kValues = kGroups * kTile;  // values of a block

// Clusters per segment and head; each has two blocks of 128 values.
__host__ __device__ constexpr int value_clusters(const Problem& p) {
  return static_cast<int>(blocks_of(p.V, kClusterBlocks * kValues));
}
inline int64_t count_items(const Problem& p) {
  return segment_heads(p.grid, p.H) * value_clusters(p);
}

// A block's cluster and its rank there.
struct Cluster {
  int64_t index = blockIdx.x / kClusterBlocks, count = gridDim.x / kClusterBlocks;
  int rank = static_cast<int>(blockIdx.x % kClusterBlocks);
};

// How many chunks of a segment a block gates: chunks rank, rank + 2, ... None for the tokens after
// the last sequence.
__device__ __forceinline__ int own_chunks(const Segment& segment, int rank) {
  return segment.tail ? 0 : (segment.chunks + 1 - rank) / kClusterBlocks;
}

// The work items of a cluster, at most kItems.
template <int kItems>
struct Items {
  int taken;  // set only if kItems > 1
  Segment segments[kItems];

  // Finds this cluster's share of `items`, which are dealt out to the clusters in turn. Called by
  // all threads, before a barrier.
  __device__ __forceinline__ void find(const Problem& p, int64_t items, const Cluster& cluster) {
    if (threadIdx.x < kItems) {
      const int64_t item = cluster.index + threadIdx.x * cluster.count;
      if (item < items) segments[threadIdx.x] = find_segment(p, item / value_clusters(p));
    }
    if (threadIdx.x == 0)
      taken = static_cast<int>((items - cluster.index + cluster.count - 1) / cluster.count);
  }
  __device__ __forceinline__ int count() const { return kItems == 1 ? 1 : taken; }

  // Calls f(segment, first value of the block, before); before: how many chunks each block has
  // gated in earlier items.
  template <class F>
  __device__ __forceinline__ void for_items(const Problem& p, const Cluster& cluster, F&& f) const {
    const int v_clusters = value_clusters(p);
    int before[kClusterBlocks] = {};
    for (int i = 0; i < count(); ++i) {
      const int part = static_cast<int>((cluster.index + i * cluster.count) % v_clusters);
      f(segments[i], (kClusterBlocks * part + cluster.rank) * kValues, before);
#pragma unroll
      for (int r = 0; r < kClusterBlocks; ++r) before[r] += own_chunks(segments[i], r);
    }
  }
};

// A chunk of a producer, which takes every other chunk that its block gates. These are numbered
// through all items.
template <int kItems>
class OwnChunk {
 public:
  int number;

  __device__ __forceinline__ OwnChunk(const Items<kItems>& items, int group, int rank)
      : number(group), items_(items), rank_(rank) {
    find();
  }
  __device__ __forceinline__ bool is_there() const { return item_ < items_.count(); }
  __device__ __forceinline__ void next() {
    number += kGroups;
    find();
  }
  __device__ __forceinline__ const Segment& segment() const { return items_.segments[item_]; }
  __device__ __forceinline__ int chunk() const {
    return kClusterBlocks * (number - before_) + rank_;
  }

 private:
  // Skips the items that end before this chunk.
  __device__ __forceinline__ void find() {
    for (; is_there(); ++item_) {
      const int chunks = own_chunks(segment(), rank_);
      if (number - before_ < chunks) return;
      before_ += chunks;
    }
  }
  const Items<kItems>& items_;
  const int rank_;
  int item_ = 0, before_ = 0;  // before_: chunks that this block gates in earlier items
};

// The position of a chunk for its consumers: the block that gates it, its number among the chunks
// of that block, and the producer.
struct Turn {
  int rank, number, producer;
  __device__ __forceinline__ Turn(int chunk, const int (&before)[kClusterBlocks])
      : rank(chunk % kClusterBlocks),
        number((rank == 0 ? before[0] : before[1]) + chunk / kClusterBlocks),
        producer(number % kGroups) {}
};

// Barriers of the stages where chunks are gated and where they are received; each producer has one
// stage of either kind.
struct Handover {
  // full: the chunk has arrived. empty: the consumers of both blocks have released a stage of this
  // block's own chunks.
  uint64_t own_full[kGroups], received_full[kGroups], empty[kGroups];

  // Called by one thread.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kGroups; ++i) {
      init_barrier(&own_full[i], kGroupThreads);
      init_barrier(&received_full[i], 1);
      // Arrivals: all threads of this block's consumers, and one thread per warp of the other
      // block's.
      init_barrier(&empty[i], kGroups * (kGroupThreads + kGroupThreads / 32));
    }
  }
  __device__ __forceinline__ static uint32_t parity_of(int number) {
    return static_cast<uint32_t>(number / kGroups) & 1;
  }
  // Waits until the stage of this producer's chunk is free.
  __device__ __forceinline__ void wait_for_place(int number) {
    if (number >= kGroups) wait(&empty[number % kGroups], parity_of(number - kGroups));
  }
  // Called by one thread before it sends `bytes` to the other block. Returns the barrier of that
  // block, which counts them.
  __device__ __forceinline__ uint32_t expect_in_other(int producer, int other, int bytes) {
    const uint32_t full = address_in(&received_full[producer], other);
    arrive_and_expect(full, bytes);
    return full;
  }
  __device__ __forceinline__ void wait_for_chunk(const Turn& turn, int rank) {
    wait(turn.rank == rank ? &own_full[turn.producer] : &received_full[turn.producer],
         parity_of(turn.number));
  }
  // Called by all threads of a consumer after they have read the chunk.
  __device__ __forceinline__ void leave(const Turn& turn, int rank) {
    if (turn.rank == rank) {
      arrive(&empty[turn.producer]);
    } else {
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive_in_cluster(address_in(&empty[turn.producer], turn.rank));
    }
  }
};

}  // namespace gla_ext::cuda::sm90
