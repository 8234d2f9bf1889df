// gradients/chunk: copies of rows and states into shared memory, and of rows out of it.
#pragma once

#include "cuda/sm90/states/tiles.cuh"
#include "cuda/sm90/tiles/mover.cuh"
#include "shared.cuh"

namespace gla_ext::cuda::sm90::gradients::chunk {

// Writes zeros to a chunk's rows of an output. The code is kept small, since all other chunks jump
// over it.
template <class T, int kTiles>
__device__ __forceinline__ void clear_rows(const Rows& r, const Chunk& chunk, int columns) {
  using OfBlock = Mover<kGroupsFor<kTiles>>;
  const OfBlock mover;
#pragma unroll 1
  for (int row = mover.row; row < chunk.length; row += OfBlock::kStep)
#pragma unroll 1
    for (int column = mover.column; column < columns; column += kTile)
      store8(own_rows_at<T>(r, chunk) + token_offset(r, row) + column, Eight<T>{});
}

// Copies the value channels first to first + 63 of do and v, for every token of the chunk.
template <int kTiles>
__device__ __forceinline__ void copy_values(Shared<kTiles>& s, const Problem& p, const Bases& bases,
                                            int length, int first) {
  const Mover<kGroupsFor<kTiles>> mover;
  const int column = first + mover.column;
  const bool inside = column < p.V;
  auto& values = s.values(first);
  mover.template copy<kTile>(&values.d_o, bases.d_o + token_offset(p.d_o, mover.row) + column,
                             token_offset(p.d_o, 1), length, inside);
  mover.template copy<kTile>(&values.v, bases.v + token_offset(p.v, mover.row) + column,
                             token_offset(p.v, 1), length, inside);
}

// Copies the same columns of the states: as rows, or as tiles by one thread. index: of the matrix.
template <int kTiles>
__device__ __forceinline__ void copy_states(Shared<kTiles>& s, const Problem& p, const Bases& bases,
                                            int64_t index, int first) {
  auto& states = s.states(first);
  const auto copy_rows = [&](Tile(&to)[kTiles], const bf16* from) {
    const Mover<kGroupsFor<kTiles>> mover;
    const int column = first + mover.column;
    mover.template copy<kTiles * kTile>(to, from + mover.row * p.V + column, p.V, p.K,
                                        column < p.V);
  };
  const auto copy_tiles = [&](Tile(&to)[kTiles], void* from) {
    if (threadIdx.x == 0)
      bulk_copy(to, state_tile_at(p, from, index, first / kTile, 0), sizeof(to), &s.full(first));
  };
  if constexpr (kReady<kTiles>) {
    copy_tiles(states.S, p.S);
    copy_tiles(states.dS, p.dS);
  } else {
    copy_rows(states.S, bases.S);
    copy_rows(states.dS, bases.dS);
  }
}

// Writes 64 value channels of dv from shared memory to memory.
template <int kTiles>
__device__ __forceinline__ void write_values(const Shared<kTiles>& s, const Problem& p, int first) {
  const Mover<kGroupsFor<kTiles>> mover;
  const int column = first + mover.column;
  mover.store(s.bases.dv + token_offset(p.dv, mover.row) + column, s.dv, token_offset(p.dv, 1),
              s.chunk.length, column < p.V);
}

}  // namespace gla_ext::cuda::sm90::gradients::chunk
