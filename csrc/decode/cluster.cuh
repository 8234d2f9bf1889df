// The maps of linear.cuh for 17 to 32 rows, by clusters of four blocks that share the columns.
//
// grid    a cluster has up to 12 tiles of 16 rows of the weights; a block has a quarter of their
//         columns; a warp has 128 of these columns, or a multiple of 128, of one to three tiles
// A result is the sum of the same parts as those of linear.cuh's warps, in the same order, so that
// a row has the same bits in both kernels. Part j consists of chunks j, j + parts, ...; a block has
// some neighbouring parts. All weights of a block are being copied to shared memory before the
// previous kernel ends. A block norms its own columns of all rows: it sends their sums of squares
// to the other blocks and keeps n(x) in shared memory, 16 bytes per lane, in the layout of
// products' operands. Parts of sums are sent to the block of the cluster that adds them.
#pragma once

#include "cuda/sm90/tiles/cluster.cuh"
#include "linear.cuh"

namespace gla_ext::cuda::decode {

constexpr int kClusterBlocks = 4;  // as many as there are lanes of a row
constexpr int kClusterThreads = 256;
constexpr int kRowTiles = 4;                         // tiles of eight rows of x
constexpr int kChunkBytes = kChunkColumns * 16 * 2;  // of a tile's weights, in a chunk
constexpr int kUnitBytes = 32 * 16;                  // 16 bytes for every lane
constexpr size_t kMostClusterBytes = 220 << 10;      // shared memory of a block

// blocks_of_processor: blocks that share a multiprocessor; few_bytes: their shared memory. With one
// block there is room for blocks of the next kernel, but an H200 runs only 30 such clusters at
// once, and 62 with two blocks. SwiGLU has more tiles than 30 clusters take in one wave.
constexpr int blocks_of_processor(After after) { return after == After::kSwiglu ? 2 : 1; }
constexpr size_t few_bytes(After after) {
  return size_t{after == After::kSwiglu ? 112u : 156u} << 10;
}

// Most tiles of a warp: their sums must fit in registers, together with rows that come from memory.
constexpr int most_tiles(Before before) { return before == Before::kNothing ? 2 : 3; }

// How a call is distributed over a cluster.
struct ClusterPlan {
  int32_t parts = 0;   // number of parts of a sum
  int32_t each = 0;    // parts of a block
  int32_t groups = 0;  // warps that share a part, with different tiles
  int32_t turns = 0;   // chunks of a part
  int32_t tiles = 0;   // of a cluster; 0: the kernel does not support the call
};

// Offsets in bytes in a block's shared memory, after the weights: n(x); the parts of sums that this
// block adds; sums of squares; the norm's weight for its columns.
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

inline ClusterPlan plan_cluster(const DecodeLinear& p, Before before, After after) {
  ClusterPlan plan;
  const int chunks = (p.D + kChunkColumns - 1) / kChunkColumns;
  plan.parts = warps_of(p.D, before != Before::kNothing);
  plan.each = (plan.parts + kClusterBlocks - 1) / kClusterBlocks;
  const int groups = kClusterThreads / 32 / plan.each;
  plan.groups = groups > 4 ? 4 : groups;
  plan.turns = (chunks + plan.parts - 1) / plan.parts;
  const auto bytes = [&](int tiles) {
    plan.tiles = tiles;
    return static_cast<size_t>(ClusterPlaces(p, plan, before).end);
  };
  int most = most_tiles(before) * plan.groups;
  while (most > 1 && bytes(most) > few_bytes(after)) --most;
  if (bytes(most) > kMostClusterBytes) most = 0;
  // Uses no more waves of clusters than this many tiles need, and as few tiles per cluster as that
  // number of waves allows.
  const int blocks = blocks_of_processor(after) * p.processors;
  const int at_once = blocks < kClusterBlocks ? 1 : blocks / kClusterBlocks;
  const int waves = most == 0 ? 1 : (p.tiles + at_once * most - 1) / (at_once * most);
  const int even = (p.tiles + at_once * waves - 1) / (at_once * waves);
  plan.tiles = even < most ? even : most;
  return plan;
}

// A thread's position in its cluster.
struct Place {
  int rank, first_tile, tiles;  // rank of the block, tiles of the cluster
  int part, group;              // of the warp: its part in the block, its first tile
  bool works;                   // whether that part exists
  int column;                   // first column of the part

  __device__ __forceinline__ Place(const DecodeLinear& p, const ClusterPlan& plan) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    rank = static_cast<int>(blockIdx.x) % kClusterBlocks;
    first_tile = static_cast<int>(blockIdx.x) / kClusterBlocks * plan.tiles;
    tiles = p.tiles - first_tile < plan.tiles ? p.tiles - first_tile : plan.tiles;
    part = warp / plan.groups, group = warp % plan.groups;
    works = rank * plan.each + part < plan.parts;
    column = (rank * plan.each + part) * kChunkColumns;
  }
};

__device__ __forceinline__ int lane_bytes() { return static_cast<int>(threadIdx.x) % 32 * 16; }

// Copies this warp's weights, with zeros after the last column. A lane copies what it multiplies.
template <class T, Before kBefore, After kAfter>
__device__ __forceinline__ void copy_weights(const DecodeLinear& p, const ClusterPlan& plan,
                                             const Place& place, uint32_t shared) {
#pragma unroll
  for (int j = 0; j < most_tiles(kBefore); ++j) {
    const int own = place.group + j * plan.groups;
    if (own >= place.tiles) break;
    const WeightTile<T, kAfter> tile(p, place.first_tile + own);
    for (int turn = 0; turn < plan.turns; ++turn) {
      const int chunk = (place.part * plan.tiles + own) * plan.turns + turn;
      const uint32_t to = shared + chunk * kChunkBytes + lane_bytes();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int column = place.column + turn * plan.parts * kChunkColumns + i * kDecodeStep;
        const bool there = column < p.D;
        const int from = there ? column : 0;
        sm90::copy16(to + 2 * i * kUnitBytes, tile.upper + from, there);
        sm90::copy16(to + (2 * i + 1) * kUnitBytes, tile.lower + from, there);
      }
    }
  }
  sm90::commit_copies();
}

// Puts n(x) of this block's columns in shared memory. Warp `group` of a part does rows 8 group + g.
// On return all of n(x) is written.
template <class T, Before kBefore>
__device__ __forceinline__ void norm_rows(const DecodeLinear& p, const ClusterPlan& plan,
                                          const ClusterPlaces& at, const Place& place, uint8_t* s) {
  const int n = place.group, stride = plan.parts * kChunkColumns;
  const bool works = place.works && n < kRowTiles;
  float* squares = reinterpret_cast<float*>(s + at.squares);
  RowChunk<T, kBefore> rows;
  const auto load = [&](int turn) { rows.load(p, n, place.column + turn * stride); };
  if (works) load(0);
  sm90::wait_for_cluster();  // all blocks have started
  if (works) {
    // Each lane of a row sends to one block.
    const uint32_t to = sm90::address_in(squares, warp::lane_pair());
    for (int turn = 0; turn < plan.turns; ++turn) {
      const int column = place.column + turn * stride;
      if (column >= p.D) break;
      if (turn > 0) load(turn);
      float sums[kSums<kBefore>];
      sum_squares(rows, sums);
#pragma unroll
      for (int i = 0; i < kSums<kBefore>; ++i) {
        const int row = column / kChunkColumns * kSums<kBefore> + i;
        sm90::store_in_cluster(to + 4 * (row * kMostDecodeRows + 8 * n + warp::lane_row()),
                               sum_of_row(sums[i]));
      }
    }
    if (plan.turns > 1) load(0);
  }
  sm90::sync_cluster();  // sums of squares and the norm's weight are written
  if (works) {
    int group = -1;
    float rstd = 0;
    if constexpr (kBefore == Before::kNorm)
      rstd = rstd_of(p, squares, n, 0, (p.D + kChunkColumns - 1) / kChunkColumns);
    for (int turn = 0; turn < plan.turns; ++turn) {
      if (turn > 0) load(turn);
      const int chunk = place.part * plan.turns + turn;
      const auto* w = reinterpret_cast<const float*>(s + at.norm_weight) + chunk * kChunkColumns;
      uint8_t* to = s + at.rows + chunk * kSteps * kRowTiles * kUnitBytes + lane_bytes();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int first = place.column + turn * stride + i * kDecodeStep;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (first < p.D) {
          if constexpr (kBefore == Before::kGatedNorm)
            take_group(p, squares, n, first, group, rstd);
          x = operand<T, kBefore>(rows.x[i], rows.gates[rows.kHasGate ? i : 0], rstd,
                                  w + i * kDecodeStep + 8 * warp::lane_pair());
        }
        *reinterpret_cast<uint4*>(to + (i * kRowTiles + n) * kUnitBytes) = x;
      }
    }
  }
  __syncthreads();  // n(x) is written
}

// Computes this warp's parts of the sums of its tiles.
template <class T, Before kBefore>
__device__ __forceinline__ void multiply_tiles(const DecodeLinear& p, const ClusterPlan& plan,
                                               const ClusterPlaces& at, const Place& place,
                                               const uint8_t* s,
                                               float (&sums)[most_tiles(kBefore)][kRowTiles][4]) {
  constexpr bool kHasNorm = kBefore != Before::kNothing;
  const auto unit = [&](int offset) {
    return *reinterpret_cast<const uint4*>(s + offset + lane_bytes());
  };
  for (int turn = 0; turn < plan.turns; ++turn) {
    const int column = place.column + turn * plan.parts * kChunkColumns;
    // Rows that come from memory are all loaded at once.
    uint4 all[kHasNorm ? 1 : kSteps][kRowTiles];
    if constexpr (!kHasNorm) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          const Eight<T> x = load_row<T>(p, p.x, p.x_stride, n, column + i * kDecodeStep);
          all[i][n] = *reinterpret_cast<const uint4*>(x.words);
        }
    }
    if (turn == 0) sm90::wait_for_copies<0>();  // each lane reads what it has copied
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint4 x[kRowTiles];
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const int chunk = place.part * plan.turns + turn;
        if constexpr (kHasNorm)
          x[n] = unit(at.rows + ((chunk * kSteps + i) * kRowTiles + n) * kUnitBytes);
        else
          x[n] = all[i][n];
      }
#pragma unroll
      for (int j = 0; j < most_tiles(kBefore); ++j) {
        const int own = place.group + j * plan.groups;
        if (own >= place.tiles) break;
        const int chunk = (place.part * plan.tiles + own) * plan.turns + turn;
        const uint4 u = unit(chunk * kChunkBytes + 2 * i * kUnitBytes);
        const uint4 l = unit(chunk * kChunkBytes + (2 * i + 1) * kUnitBytes);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          warp::multiply<T>(sums[j][n], {u.x, l.x, u.y, l.y}, x[n].x, x[n].y);
          warp::multiply<T>(sums[j][n], {u.z, l.z, u.w, l.w}, x[n].z, x[n].w);
        }
      }
    }
  }
}

// Sends the parts of sums to the blocks that add them. Rows 8 n + g of a tile form a unit; unit u
// is added by block u % 4 of the cluster.
template <int kMost>
__device__ __forceinline__ void hand_over(const ClusterPlan& plan, const Place& place,
                                          const uint8_t* to,
                                          const float (&sums)[kMost][kRowTiles][4]) {
  const int part = place.rank * plan.each + place.part;
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    const int own = place.group + j * plan.groups;
    if (own >= place.tiles) break;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int u = own * kRowTiles + n, place_of_unit = u / kClusterBlocks * plan.parts + part;
      sm90::store_in_cluster(
          sm90::address_in(to + place_of_unit * kUnitBytes + lane_bytes(), u % kClusterBlocks),
          make_float4(sums[j][n][0], sums[j][n][1], sums[j][n][2], sums[j][n][3]));
    }
  }
}

template <class T, Before kBefore, After kAfter>
__global__ void __launch_bounds__(kClusterThreads, kBefore == Before::kNothing ? 1 : 2)
    cluster_kernel(const __grid_constant__ DecodeLinear p,
                   const __grid_constant__ ClusterPlan plan) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ float4 shared[];
  auto* s = reinterpret_cast<uint8_t*>(shared);
  constexpr bool kHasNorm = kBefore != Before::kNothing;
  const ClusterPlaces at(p, plan, kBefore);
  const Place place(p, plan);
  sm90::arrive_at_cluster();
  sm90::release_next_kernel();

  // The previous kernel writes none of this.
  if (place.works) copy_weights<T, kBefore, kAfter>(p, plan, place, sm90::shared_address(s));
  if constexpr (kHasNorm) {
    const int count = plan.each * plan.turns * kChunkColumns;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x)) {
      const int chunk = i / kChunkColumns, turn = chunk % plan.turns;
      const int part = place.rank * plan.each + chunk / plan.turns;
      const int column = (part + turn * plan.parts) * kChunkColumns + i % kChunkColumns;
      const bool there = p.norm_weight != nullptr && column < p.D;
      reinterpret_cast<float*>(s + at.norm_weight)[i] =
          there ? load_any(p.norm_weight, p.norm_dtype, column % p.group) : 1.f;
    }
  }
  sm90::await_previous_kernel();

  // Of its block's units, this warp adds every `warps`-th.
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  const auto tile_of = [&](int unit) {
    return WeightTile<T, kAfter>(p, place.first_tile + unit / kRowTiles);
  };
  const int first_unit = warp * kClusterBlocks + place.rank, units = place.tiles * kRowTiles;
  uint32_t added[2]{};  // loaded early
  if (kAfter == After::kAddResidual && first_unit < units)
    load_residual<T>(p, p.maps[0], tile_of(first_unit).first, first_unit % kRowTiles, added);
  if constexpr (kHasNorm) norm_rows<T, kBefore>(p, plan, at, place, s);
  float sums[most_tiles(kBefore)][kRowTiles][4]{};
  if (place.works) multiply_tiles<T, kBefore>(p, plan, at, place, s, sums);
  if constexpr (!kHasNorm) sm90::wait_for_cluster();  // all blocks have started
  if (place.works) hand_over(plan, place, s + at.sums, sums);
  sm90::sync_cluster();  // all parts have arrived

  for (int unit = first_unit; unit < units; unit += warps * kClusterBlocks) {
    const WeightTile<T, kAfter> tile = tile_of(unit);
    if (kAfter == After::kAddResidual && unit != first_unit) {
      added[0] = added[1] = 0;
      load_residual<T>(p, p.maps[0], tile.first, unit % kRowTiles, added);
    }
    float y[4]{};
#pragma unroll 4
    for (int i = 0; i < plan.parts; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(
          s + at.sums + (unit / kClusterBlocks * plan.parts + i) * kUnitBytes + lane_bytes());
      y[0] += x.x, y[1] += x.y, y[2] += x.z, y[3] += x.w;
    }
    store_results<T, kAfter>(p, p.maps[tile.map], tile.first, unit % kRowTiles, y, added);
  }
#endif
}

template <class T, Before kBefore, After kAfter>
bool launch_cluster(const DecodeLinear& p, cudaStream_t stream) {
  if (!p.clusters) return false;
  const ClusterPlan plan = plan_cluster(p, kBefore, kAfter);
  if (plan.tiles == 0) return false;
  const auto kernel = cluster_kernel<T, kBefore, kAfter>;
  static const DynamicShared shared(kernel, kMostClusterBytes);
  shared.allow();
  const int clusters = (p.tiles + plan.tiles - 1) / plan.tiles;
  sm90::launch_clusters_of<kClusterBlocks>(
      p.overlaps, kernel, kClusterBlocks * clusters, 32 * plan.each * plan.groups,
      static_cast<size_t>(ClusterPlaces(p, plan, kBefore).end), stream, p, plan);
  return true;
}

// Clusters bring nothing for up to 16 rows. More rows use them if the GPU has clusters.
template <Before kBefore, After kAfter>
void launch(const DecodeLinear& p, cudaStream_t stream) {
  const auto with = [&](auto type) {
    using T = typename decltype(type)::type;
    if (p.rows <= 8) return launch_linear<T, 1, kBefore, kAfter>(p, stream);
    if (p.rows <= 16) return launch_linear<T, 2, kBefore, kAfter>(p, stream);
    if (!launch_cluster<T, kBefore, kAfter>(p, stream))
      launch_linear<T, 4, kBefore, kAfter>(p, stream);
  };
  if (p.dtype == DType::kBFloat16) return with(Type<bf16>{});
  with(Type<half>{});
}

}  // namespace gla_ext::cuda::decode
