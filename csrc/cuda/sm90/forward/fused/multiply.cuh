// The consumers' products of a chunk in the forward sweeps: o^T of a warpgroup's values, and the
// new state, except for the factors that are applied when it leaves the chunk.
#pragma once

#include "state.cuh"

namespace gla_ext::cuda::sm90::forward {

constexpr int kPartKeys = 32;
using StateOperand = uint32_t[2][kPartKeys / 16][4];

// Computes o^T = S~^T (q^)^T, or adds it to `o` unless `first`. The state is multiplied by
// `factors` (an array in the order of `quad_index`, or a single factor that is applied after the
// operand is made; see `Leaving`) and converted to bf16 operands 32 key channels at a time: while
// the product of one part runs, the next part is converted. q: q^ [token][K]. operand: room for two
// parts of 32 channels.
template <int K, class Factors>
__device__ __forceinline__ void multiply_state(float (&o)[32], State<K>& state, Factors factors,
                                               const Tile* q, StateOperand& operand, bool first) {
  static_assert(K / kPartKeys % 2 == 0);
#pragma unroll
  for (int part = 0; part < K / kPartKeys; ++part) {
    // Waits for the product of two rounds ago, whose operand is overwritten now. The first of these
    // waits has nothing to wait for, but without it ptxas waits for every product (C7517).
    if (!first || part > 0) wait_for_products<1>();
    const int key = part * kPartKeys;
    auto& S = operand[part % 2];
    state.template pass<kPartKeys>(key, factors, S);
    begin_products();
#pragma unroll
    for (int i = 0; i < kPartKeys / 16; ++i)
      product(o, S[i], sixteen_columns(*q, key / 16 + i), !first || part + i > 0);
    commit_products();
  }
}

// v^T [64 values][64 tokens] of a consumer as an operand. It is in registers if several products
// read it and there are enough registers, else in shared memory.
template <bool kInRegisters>
class ValueOperand {
 public:
  __device__ __forceinline__ explicit ValueOperand(const Tile& v) : v_(v) {
    const int thread = static_cast<int>(threadIdx.x) % kGroupThreads, lane = thread % 32;
    const int token = lane % 8 + lane / 16 * 8, part = thread / 32 * 2 + lane / 8 % 2;
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kTile / 16; ++i)
        ldmatrix_transposed(words_[i],
                            &in_tile<bf16>(v, swizzled(token, part) + i * 16 * kRowBytes));
    }
  }
  // d += v^T B over tokens [16 i, 16 i + 16).
  template <Contiguous kB, int kN>
  __device__ __forceinline__ void multiply(float (&d)[kN], int i, uint64_t b) const {
    if constexpr (kInRegisters)
      product<kB>(d, words_[i], b);
    else
      product<Contiguous::kOther, kB>(d, sixteen_rows(v_, i), b);
  }

 private:
  const Tile& v_;
  uint32_t words_[kTile / 16][4];
};

// Issues the products of the state, S~ + k^T v. k: k^ [token][key channel].
template <class Values, int K>
__device__ __forceinline__ void multiply_keys(State<K>& state, const Values& v, const Tile* k) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v.template multiply<Contiguous::kOther>(state.x, i, sixteen_rows(*k, i));
}

struct MultipliedChunk {
  const Tile *q, *k;  // q^, k^ [token][K]
  const Tile &A, &v;  // [token][token], [token][64 values]
  const float* pass;  // see `Passage`
  const float* middle;
  bool strong;
};

// Issues the products of a chunk. On return they still run: the newest group is the state's, the
// earlier groups are o's.
template <bool kValuesInRegisters, int K>
__device__ __forceinline__ void multiply_chunk(float (&o)[32], State<K>& state,
                                               const MultipliedChunk& chunk) {
  StateOperand operand;
  multiply_state(o, state, chunk.pass, chunk.q, operand, true);
  const ValueOperand<kValuesInRegisters> v(chunk.v);
  begin_products();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v.template multiply<Contiguous::kSummed>(o, i, sixteen_columns(chunk.A, i));
  commit_products();
  if (chunk.strong) {
    wait_for_products<0>();
    state.scale(chunk.middle);
  }
  begin_products();
  multiply_keys(state, v, chunk.k);
  commit_products();
}

}  // namespace gla_ext::cuda::sm90::forward
