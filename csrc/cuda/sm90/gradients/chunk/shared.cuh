// The shared memory of a block of gradients/chunk.
#pragma once

#include "cuda/sm90/tiles/channels.cuh"
#include "cuda/sm90/tiles/products.cuh"

namespace gla_ext::cuda::sm90::gradients::chunk {

// Warpgroups of a block, given the number of tiles of 64 key channels.
template <int kTiles>
constexpr int kGroupsFor = kTiles == 3 ? 4 : kTiles;
// Whether some of a block's threads have no tile.
template <int kTiles>
constexpr bool kHasAbsent = kTiles < kGroupsFor<kTiles>;
// Blocks a multiprocessor: as many as shared memory allows.
template <int kTiles>
constexpr int kBlocks = kTiles == 1 ? 3 : 4 / kGroupsFor<kTiles>;

// The addresses of a chunk's first values and of its states.
struct Bases {
  const bf16 *d_o, *v, *S, *dS;
  bf16* dv;
};

// Whether chunks are prepared, and S and dS' are tiles from states/prepared.cu.
template <int kTiles>
constexpr bool kReady = kTiles > 1;

// Additional memory of blocks that make q^ and k^ themselves.
template <bool kReady>
struct OwnOperands {};
template <>
struct OwnOperands<false> {
  Tile k_out;  // [token][K]
  float b_last[kTile];
};

// A warpgroup has 64 / kWarpgroups columns of A and dA. kChannels: channels of all threads' channel
// pairs, including threads without a tile.
template <int kTilesOfKeys>
struct Shared {
  static constexpr int kTiles = kTilesOfKeys, kWarpgroups = kGroupsFor<kTiles>;
  static constexpr int kChannels = kWarpgroups * kTile;
  // A block that is alone on its multiprocessor copies the next values, and the states' columns for
  // them, while it multiplies. If shared memory is full, these values overwrite the last two tiles
  // of q^, which are copied again later.
  static constexpr bool kAhead = kWarpgroups == 4, kInPlace = kTiles == 4;
  static constexpr int kBuffers = kAhead ? 2 : 1;
  struct States {
    Tile S[kTiles], dS[kTiles];  // [K][64 values]
  };
  struct Values {
    Tile d_o, v;  // [token][64 values]
  };
  struct Operands {
    States states[kBuffers];
    Values values[kInPlace ? 1 : kBuffers];
  };
  struct Sums {
    float gates[kSubChunks][kChannels], dg[kSubChunks][kChannels];  // sums over each sub-chunk
    // The contribution to dg of k through the state that leaves the chunk, summed over each warp's
    // tokens; in strong chunks over each sub-chunk.
    float inter[kSubChunks][kChannels];
    float states[kChannels];  // rowsum(S dS')
  };
  Tile q[kTiles], k[kTiles];                                         // q^ and k^, [token][K]
  static constexpr int kKeptTiles = kInPlace ? kTiles - 2 : kTiles;  // of q^, not overwritten
  using Gradients = float[2][kTiles][kTile * kTile];                 // x and y, [token][K]
  // The sums take the place of A, or follow x and y if they are larger than A.
  static constexpr bool kBehind = sizeof(Sums) > kTileBytes;
  struct GradientsAndSums {
    Gradients gradients;
    Sums sums;
  };
  struct Nothing {};
  union {
    Operands operands;
    Gradients gradients;
    std::conditional_t<kBehind, GradientsAndSums, Nothing> behind;
  };
  union {
    Tile A;  // [token][token]
    std::conditional_t<kBehind, Nothing, Sums> in_place;
  };
  // All warpgroups make dv of 64 values, 64 / kWarpgroups columns each, and store it by way of
  // shared memory. Of four warpgroups, two make it in alternate rounds, so that k^ and dS' are read
  // half as often.
  static constexpr bool kInTurn = kWarpgroups == 4;
  std::conditional_t<kInTurn, Nothing, Tile> dv;  // [token][64 values]
  OwnOperands<kReady<kTiles>> own;
  uint64_t states_full[kBuffers];  // tiles of the states have arrived
  Chunk chunk;                     // here, because accumulators need the registers
  Bases bases;

  // The buffers for the value channels first to first + 63: of do and v (`values`), and of these
  // columns of the states (`states`).
  __device__ __forceinline__ Values& values(int first) {
    if constexpr (kInPlace) {
      if (first / kTile % 2 != 0) return *reinterpret_cast<Values*>(&q[kKeptTiles]);
      return operands.values[0];
    } else {
      return operands.values[first / kTile % kBuffers];
    }
  }
  __device__ __forceinline__ States& states(int first) {
    return operands.states[first / kTile % kBuffers];
  }

  __device__ __forceinline__ uint64_t& full(int first) {
    return states_full[first / kTile % kBuffers];
  }
  // Called if both states are in memory as tiles, which one thread copies.
  __device__ __forceinline__ void init_barriers() {
    for (uint64_t& barrier : states_full) init_barrier(&barrier, 2);
    fence_for_products();  // also for bulk copies
  }
  __device__ __forceinline__ void wait_for_states(int first) {
    wait(&full(first), first / kTile / kBuffers & 1);
  }

  __device__ __forceinline__ Sums& sums() {
    if constexpr (kBehind)
      return behind.sums;
    else
      return in_place;
  }
};

}  // namespace gla_ext::cuda::sm90::gradients::chunk
