// Sums down the tokens of a chunk by tensor cores, from the first token or from the last.
// cumsum.cuh does the same with the triangle of ones in shared memory; here the ones are in
// registers, because the gradient sweeps have no shared memory left for them and sum in both
// directions.
#pragma once

#include "tiles.cuh"

namespace gla_ext::cuda::sm90 {

// The triangle: ones on the diagonal and on one side of it, [64 tokens][64 tokens], the A operand
// of a warpgroup's products.
enum class Ones { kUpTo, kFrom };  // ones where column <= row, where column >= row

template <Ones kOnes>
class Triangle {
 public:
  __device__ __forceinline__ explicit Triangle(int thread) : warp_(thread % kGroupThreads / 32) {
    const int row = thread % 32 / 4, column = thread % 4 * 2;
    const auto one = [&](int c) { return kOnes == Ones::kUpTo ? c <= row : c >= row; };
    corner_ = (one(column) ? kOne : 0) | (one(column + 1) ? kOne << 16 : 0);
  }

  // d [64 tokens][2 kN columns] = the sums of a tile's rows, for columns starting at `first`, or d
  // += if `add`.
  template <int kN>
  __device__ __forceinline__ void sum(float (&d)[kN], const Tile& tile, bool add,
                                      int first = 0) const {
    const uint64_t rows = descriptor(Operand(tile).from_column(first).address, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool whole = kOnes == Ones::kUpTo ? i < warp_ : i > warp_;
      const uint32_t beside = whole ? kOnePair : 0;
      const bool diagonal = i == warp_;
      const uint32_t corner = diagonal ? corner_ : beside;
      const uint32_t below = diagonal && kOnes == Ones::kUpTo ? kOnePair : beside;
      const uint32_t above = diagonal && kOnes == Ones::kFrom ? kOnePair : beside;
      product<Contiguous::kOther>(d, {corner, below, above, corner},
                                  rows + i * (16 * kRowBytes >> 4), add || i > 0);
    }
  }

 private:
  static constexpr uint32_t kOne = 0x3f80, kOnePair = kOne << 16 | kOne;  // bf16
  int warp_;
  uint32_t corner_;  // the ones of an 8 x 8 block on the diagonal
};

}  // namespace gla_ext::cuda::sm90
