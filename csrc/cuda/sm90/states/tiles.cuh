// S~ and dS~ in the workspace, as states/prepared.cu or states/cluster.cu stores them: for each
// chunk and head, or chunk pair (segments/chunk_pairs.cuh), tiles in the layout that warpgroup
// products read. First come the tiles of all key channels for the first 64 values, 64 channels a
// tile, then those of the next 64 values, so that one copy takes 64 values of all channels. A tile
// is [64 of K][64 values], zero where there is no channel or value (NaN if that row or column has
// values that are not finite).
#pragma once

#include "cuda/sm90/tiles/tiles.cuh"

namespace gla_ext::cuda::sm90 {

// The tile of matrix number `index` of [B, chunks, H] in p.S or p.dS.
__device__ __forceinline__ Tile* state_tile_at(const Problem& p, void* states, int64_t index,
                                               int value_tile, int key_tile) {
  return reinterpret_cast<Tile*>(static_cast<unsigned char*>(states) +
                                 index * state_tile_bytes(p.K, p.V) +
                                 (value_tile * blocks_of(p.K, kTile) + key_tile) * kTileBytes);
}
// The same tile of the next matrix of the sequence and head.
__device__ __forceinline__ Tile* next_state_tile(const Problem& p, Tile* tile) {
  return reinterpret_cast<Tile*>(*tile + p.H * state_tile_bytes(p.K, p.V));
}

}  // namespace gla_ext::cuda::sm90
