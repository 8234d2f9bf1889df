// Backward step 6 of strong chunks, in fp32. A thread has one channel and one sub-chunk of 16
// tokens. Pairs of tokens in different sub-chunks are summed from operands that are decayed to the
// borders of the sub-chunks. Inside a sub-chunk a running product of decays goes down the tokens; a
// reset makes it 0.
#pragma once

#include "cuda/device/gates.cuh"

namespace gla_ext::cuda {

// Key channels of a block. fp32 tiles have fewer columns, so that three of them fit into 48 KiB.
template <class Op>
constexpr int kColumns = sizeof(Op) == 2 ? 64 : 32;

template <class Op>
struct StrongTiles {
  float q[kTile][kColumns<Op>];           // q decayed from its sub-chunk's start
  float k[kTile][kColumns<Op>];           // k decayed to its sub-chunk's end
  float decay[kSubChunks][kColumns<Op>];  // of a whole sub-chunk
  float sums[kSubChunks][kColumns<Op>];
};

// Stores 16 tokens of one channel of an fp32 output.
__device__ __forceinline__ void store_column(const Rows& out, const float (&x)[kSubChunk],
                                             const Problem& p, const Chunk& chunk, int sub,
                                             int channel) {
  float* base = rows_at<float>(out, chunk) + channel;
#pragma unroll
  for (int i = 0; i < kSubChunk; ++i) {
    const int token = sub * static_cast<int>(kSubChunk) + i;
    if (token < chunk.length && channel < p.K) base[token_offset(out, token)] = x[i];
  }
}

// Loads dA of one row and the 16 columns of a sub-chunk.
template <class Op>
__device__ __forceinline__ void row_of_dA(float (&x)[kSubChunk], const Op* s_dA, int row,
                                          int column) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Eight<Op> eight = load8_aligned(s_dA + row * kPitch<Op, kTile> + column + 8 * half);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[8 * half + i] = eight[i];
  }
}

// Adds the pairs inside a sub-chunk, one by one, to the contributions of other sub-chunks. Writes
// dq and dk; returns db.
template <class Op, class In, class Gates>
__device__ __forceinline__ void pairs(StrongTiles<Op>& s, float (&dq)[kSubChunk],
                                      float (&dk)[kSubChunk], float (&db)[kSubChunk],
                                      const Op* s_dA, const Problem& p, const Chunk& chunk, int sub,
                                      int column, int channel) {
  constexpr int kC = static_cast<int>(kSubChunk);
  const int token = sub * kC;
  Gates gates(p, chunk, token, channel);
  float prefix = 0, suffix = 0;
#pragma unroll
  for (int i = 0; i < kC; ++i) {
    prefix += gates.x[i];
    db[i] = s.q[token + i][column] * dq[i];
    dq[i] *= exp2_ftz(prefix);
  }
#pragma unroll
  for (int i = kC - 1; i >= 0; --i) {
    db[i] -= s.k[token + i][column] * dk[i];
    s.k[token + i][column] = dk[i] * exp2_ftz(suffix);
    suffix += gates.x[i];
  }

  {
    const Column<In> k(p.k, chunk, token, channel, p.K);
#pragma unroll
    for (int i = 0; i < kC; ++i) s.q[token + i][column] = k.x[i];
  }

  // The pairs of this sub-chunk. A token's pair with itself has no gate in between and adds nothing
  // to db.
  const Column<In> q(p.q, chunk, token, channel, p.K);
  const auto inside = [&](int i) {  // for either type, the order that does not spill
    if constexpr (sizeof(Op) == 4) return i < chunk.length - token && channel < p.K;
    return channel < p.K && token + i < chunk.length;
  };
  const auto store = [&](const Rows& out, int i, float x) {
    if (inside(i)) rows_at<float>(out, chunk)[token_offset(out, token + i) + channel] = x;
  };
  const auto dA = [&](int i, int j) {
    return to_float(s_dA[(token + i) * kPitch<Op, kTile> + token + j]);
  };
  float (&decay)[kC] = gates.x;
#pragma unroll
  for (int i = 0; i < kC; ++i) decay[i] = exp2_ftz(gates.x[i]);
#pragma unroll
  for (int j = 0; j < kC; ++j) {
    const float k_j = s.q[token + j][column];
    float from_j = 1;  // decay from j to i
    float dk_j = 0;
#pragma unroll
    for (int i = j + 1; i < kC; ++i) {
      from_j *= decay[i];
      const float x = from_j * dA(i, j);
      dq[i] += x * k_j;
      dk_j += x * q.x[i];
      db[i] += x * q.x[i] * k_j;
    }
    db[j] -= dk_j * k_j;
    store(p.dk_intra, j, s.k[token + j][column] + dk_j + dA(j, j) * q.x[j]);
    store(p.dq_intra, j, dq[j] + dA(j, j) * k_j);  // complete: later pairs are below row j
  }
}

// Gates: GateColumn or FusedGateColumn.
template <class Op, class In, class Gates = GateColumn>
__device__ __forceinline__ void strong(StrongTiles<Op>& s, const Op* s_dA, const Problem& p,
                                       const Chunk& chunk, int first) {
  constexpr int kC = static_cast<int>(kSubChunk);
  const int column = static_cast<int>(threadIdx.x) % kColumns<Op>, channel = first + column;
  const int sub = static_cast<int>(threadIdx.x) / kColumns<Op>, token = sub * kC;
  const bool works = sub < kSubChunks;  // tiles of fewer columns leave half of the threads idle
  if (works) {
    const Gates gates(p, chunk, token, channel);
    const Column<In> q(p.q, chunk, token, channel, p.K);
    const Column<In> k(p.k, chunk, token, channel, p.K);
    float prefix = 0, suffix = 0;
#pragma unroll
    for (int i = 0; i < kC; ++i) {
      prefix += gates.x[i];
      s.q[token + i][column] = q.x[i] * exp2_ftz(prefix);
    }
#pragma unroll
    for (int i = kC - 1; i >= 0; --i) {
      s.k[token + i][column] = k.x[i] * exp2_ftz(suffix);
      suffix += gates.x[i];
    }
    s.decay[sub][column] = exp2_ftz(suffix);
  }
  __syncthreads();  // the tiles are written

  float dq[kC] = {}, dk[kC] = {}, db[kC] = {};
  if (works) {
    // Pairs with other sub-chunks: dq from earlier ones, dk from later ones.
    float between = 1;
#pragma unroll 1
    for (int other = sub - 1; other >= 0; --other) {
      float k[kC];
#pragma unroll
      for (int j = 0; j < kC; ++j) k[j] = between * s.k[other * kC + j][column];
#pragma unroll
      for (int i = 0; i < kC; ++i) {
        float dA[kC];
        row_of_dA(dA, s_dA, token + i, other * kC);
#pragma unroll
        for (int j = 0; j < kC; ++j) dq[i] += dA[j] * k[j];
      }
      between *= s.decay[other][column];
    }
    between = 1;
#pragma unroll 1
    for (int other = sub + 1; other < kSubChunks; ++other) {
#pragma unroll
      for (int i = 0; i < kC; ++i) {
        const float q = between * s.q[other * kC + i][column];
        float dA[kC];
        row_of_dA(dA, s_dA, other * kC + i, token);
#pragma unroll
        for (int j = 0; j < kC; ++j) dk[j] += dA[j] * q;
      }
      between *= s.decay[other][column];
    }
  }
  __syncthreads();  // the tiles are read: a thread may now keep k and dk in its elements
  if (works) pairs<Op, In, Gates>(s, dq, dk, db, s_dA, p, chunk, sub, column, channel);
  suffix_sum(db, s.sums, sub, column);
  store_column(p.dg_intra, db, p, chunk, sub, channel);
}

}  // namespace gla_ext::cuda
