// How linear maps of 17 to 32 rows are spread over clusters of blocks; pure functions of the call.
#pragma once

#include "cuda/device/dynamic_shared.h"
#include "warps.h"

namespace gla_ext::cuda::decode {

constexpr int kClusterBlocks = 4;  // as many as there are lanes of a row
constexpr int kClusterThreads = 256;
constexpr int kRowTiles = 4;                         // of eight rows of x
constexpr int kChunkBytes = kChunkColumns * 16 * 2;  // of a tile's weights
constexpr int kUnitBytes = 32 * 16;                  // sixteen of every lane
constexpr size_t kMostClusterBytes = 220 << 10;      // of a block
constexpr size_t kHalfClusterBytes = 112 << 10;      // of two that share a multiprocessor

// Tiles of a warp: as many as have their sums in registers, beside rows that come from memory.
constexpr int most_tiles(Before before) { return before == Before::kNothing ? 2 : 3; }

// How a call is spread over a cluster.
struct ClusterPlan {
  int32_t parts = 0;   // of a sum
  int32_t each = 0;    // parts of a block
  int32_t groups = 0;  // warps that have the same part, each with other tiles
  int32_t turns = 0;   // chunks of a part
  int32_t tiles = 0;   // of a cluster; 0: the kernel does not take the call
};

// Where parts of a block's shared memory start, in bytes, after the weights: n(x); parts of the
// sums that this block adds; sums of squares; the norm's weight of its columns.
struct ClusterPlaces {
  int rows, sums, squares, norm_weight, end;

  __host__ __device__ ClusterPlaces(const DecodeLinear& p, const ClusterPlan& plan, Before before) {
    const bool has_norm = before != Before::kNothing;
    const int chunks = plan.each * plan.turns;
    const int all_chunks = (p.D + kChunkColumns - 1) / kChunkColumns;
    const int squares_of_row = before == Before::kNorm ? all_chunks : kSteps * all_chunks;
    rows = chunks * plan.tiles * kChunkBytes;
    sums = rows + (has_norm ? chunks * kSteps * kRowTiles * kUnitBytes : 0);
    const int units = (plan.tiles * kRowTiles + kClusterBlocks - 1) / kClusterBlocks;
    squares = sums + units * plan.parts * kUnitBytes;
    norm_weight = squares + (has_norm ? squares_of_row * kMostDecodeRows * 4 : 0);
    end = norm_weight + (has_norm ? chunks * kChunkColumns * 4 : 0);
  }
};

// What a cluster does besides reading: as many bytes as a multiprocessor reads in its latencies.
constexpr int64_t kLatencyBytes = 128 << 10;

// The tiles of a cluster that take the least time: so many waves, each the latencies and the bytes
// of the blocks that share a multiprocessor.
inline ClusterPlan plan_cluster(const DecodeLinear& p, Before before) {
  ClusterPlan plan;
  const int chunks = (p.D + kChunkColumns - 1) / kChunkColumns;
  plan.parts = warps_of(p.D, before != Before::kNothing);
  plan.each = (plan.parts + kClusterBlocks - 1) / kClusterBlocks;
  const int groups = kClusterThreads / 32 / plan.each;
  plan.groups = groups > 4 ? 4 : groups;
  plan.turns = (chunks + plan.parts - 1) / plan.parts;
  int best = 0;
  int64_t least = 0;
  for (plan.tiles = 1; plan.tiles <= most_tiles(before) * plan.groups; ++plan.tiles) {
    const int64_t bytes = ClusterPlaces(p, plan, before).end;
    const int clusters = (p.tiles + plan.tiles - 1) / plan.tiles;
    const bool two = clusters > p.clusters[0] && fits_multiprocessor(2, bytes);
    const int at_once = p.clusters[two ? 1 : 0];
    if (bytes > int64_t{kMostClusterBytes} || at_once == 0) break;
    const int waves = (clusters + at_once - 1) / at_once;
    const int64_t time = waves * (kLatencyBytes + (two ? 2 : 1) * bytes);
    if (best == 0 || time < least) best = plan.tiles, least = time;
  }
  plan.tiles = best;
  return plan;
}

}  // namespace gla_ext::cuda::decode
