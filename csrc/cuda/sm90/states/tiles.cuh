// S~ and dS~ as states/prepared.cu or states/cluster.cu leaves them in the workspace: of a chunk
// and head, or a chunk pair (segments/chunk_pairs.cuh), tiles as warpgroup products read them: all
// key channels of the first 64 values, 64 a tile, then of the next. A tile is [64 of K][64 values],
// zero where there is no channel or value (NaN beside what is not finite). So one copy takes 64
// values of all channels.
#pragma once

#include "cuda/sm90/tiles/tiles.cuh"

namespace gla_ext::cuda::sm90 {

// A tile of matrix `index` of [B, chunks, H] in p.S or p.dS.
__device__ __forceinline__ Tile* state_tile_at(const Problem& p, void* states, int64_t index,
                                               int value_tile, int key_tile) {
  return reinterpret_cast<Tile*>(static_cast<unsigned char*>(states) +
                                 index * state_tile_bytes(p.K, p.V) +
                                 (value_tile * blocks_of(p.K, kTile) + key_tile) * kTileBytes);
}
// The same tile of the sequence's and head's next matrix.
__device__ __forceinline__ Tile* next_state_tile(const Problem& p, Tile* tile) {
  return reinterpret_cast<Tile*>(*tile + p.H * state_tile_bytes(p.K, p.V));
}

}  // namespace gla_ext::cuda::sm90
