// The structs that the host passes to the CUDA kernels: plain, no torch header.
#pragma once

#include <cstdint>

#include "common/chunk.h"
#include "indices.h"

namespace gla_ext::cuda {

constexpr int kSubChunks = kChunk / kSubChunk;
constexpr int kMaxHeadDim = 1024;  // K and V
constexpr int kTierBlock = 64;     // channels that share a byte of `tiers`
constexpr int kMaxTierBlocks = kMaxHeadDim / kTierBlock;
constexpr int kFusedKeys = 256;    // the largest K of the fused path
constexpr int kGroupKeys = 128;    // channels of q^ and k^ that lie in memory together
constexpr int kFusedValues = 128;  // values of a state that a block of a fused sweep holds
constexpr int kMostItems = 4;      // the most that a block, or a cluster of two, takes one by one

// Bytes of q^, k^, the factors of a state and A for one chunk and head, see
// sm90/prepare/prepared.cuh.
constexpr int64_t prepared_bytes(int64_t K) {
  constexpr int64_t kOfKeys = (2 * kChunk * 2 + 4 * 4) * kGroupKeys;
  return (K + kGroupKeys - 1) / kGroupKeys * kOfKeys + kChunk * kChunk * 2 + 128;
}

// The number of blocks along K in a sweep of states/prepared.cu: a block has 128 key channels, or
// all of up to 192.
constexpr int64_t prepared_key_blocks(int64_t K) {
  constexpr int64_t kMostOfOne = 192;
  return K <= kMostOfOne ? 1 : (K + kGroupKeys - 1) / kGroupKeys;
}

// Bytes of S~ or dS~ for one chunk and head in the workspace, see sm90/states/tiles.cuh.
constexpr int64_t state_tile_bytes(int64_t K, int64_t V) {
  constexpr int64_t kTile = 64;
  return (K + kTile - 1) / kTile * ((V + kTile - 1) / kTile) * (kTile * kTile * 2);
}

enum class DType : uint8_t { kBFloat16, kHalf, kFloat };

// The dtype of A, dA, S and dS in memory, to which products round anyway.
constexpr DType intermediate_dtype(DType inputs) {
  return inputs == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat;
}
// With gates on values fp16 tensors become fp32, because fp16 has too few exponents for values that
// gates have scaled. They are then multiplied in tf32, as fp16 tensors are.
constexpr bool becomes_fp32(DType inputs, bool value_gated) {
  return inputs == DType::kHalf && value_gated;
}
constexpr int64_t bytes_of(DType t) { return t == DType::kFloat ? 4 : 2; }

// A tensor [B, T, H, D] whose last dimension is contiguous. Strides are in elements; in a Problem
// stride_t is below 2^31 / kChunk. If `group` heads of the Problem share a head of the tensor, head
// h reads head h / group: one division per chunk, by the reciprocal.
struct Rows {
  void* data = nullptr;
  int64_t stride_b = 0, stride_t = 0, stride_h = 0;
  uint64_t group_reciprocal = uint64_t{1} << 32;  // ceil(2^32 / group)
  DType dtype = DType::kFloat;
  bool aligned = false;  // every row starts at a multiple of 16 bytes
};

// A sequence of a packed batch, made on the device. Sequence N stands for the tokens after the last
// one.
struct Sequence {
  int64_t start, length;  // tokens
  int64_t first_entry;    // of its chunks in ChunkEntry and the chunk dimension of S
  // The segments of all sequences before, at least one each, and their summaries in segment_states.
  // A sequence of one segment has no summary.
  int64_t first_segment, first_state;
};

// A chunk of a packed batch, made on the device.
struct ChunkEntry {
  int64_t start;     // first token
  int32_t length;    // 1 .. kChunk; 0 in entries that no sequence needs
  int32_t sequence;  // N: tokens after the last sequence, or of one without a row in the pool,
                     // whose results are zero
};

// The most summaries of a segment of packed sequences; and the fewest chunks per summary, if there
// are several.
constexpr int64_t kMostSummaries = 8, kLeastSummaryChunks = 4;

// Totals of a packed batch, made on the device.
struct PackedTotals {
  int64_t followed;        // segments that another of their sequence follows
  int64_t states;          // in segment_states
  int64_t summary_chunks;  // chunks of a summary; segment_chunks is a multiple of it
  int64_t cut;             // sequences of several segments
  int64_t visited;         // entries of by_last_segment: sequences after these have no work
};

// How sweeps cut sequences; all 0 if they do not.
struct Segments {
  int64_t segments = 0;        // of one batch row that sweeps visit
  int64_t segment_chunks = 0;  // chunks of a segment
  int64_t segment_states = 0;  // of one batch row
  int64_t summaries_at_once =
      0;                   // packed only: own parts, each of all heads, that there is room for
  bool replays = false;    // the second of two segments replays the first, to sum its state
  bool with_last = false;  // the last segment has a summary too, to be passed on
};

// The most segments of N packed sequences that are followed by another of their sequence. Each of
// them is full of tokens. No more sequences have several segments.
constexpr int64_t most_followed(const Segments& cut, int64_t N) {
  return cut.segments > 0 ? cut.segments - N - 1 : 0;
}

// How the tokens are cut into chunks, and these into segments.
struct ChunkGrid : Segments {
  int64_t B = 0, T = 0;  // batch rows and tokens of one
  int64_t N = 0;         // sequences
  int64_t chunks = 0;    // chunk dimension of S, of one batch row
  int64_t entries = 0;   // chunks of one batch row that kernels visit: packed, chunks + 1
  bool packed = false;
  bool offsets_are_int64 = false;
  const void* cu_seqlens = nullptr;     // [N + 1], packed only
  Sequence* sequences = nullptr;        // [N + 1], packed only
  ChunkEntry* chunk_entries = nullptr;  // [entries], packed only
  // If sweeps visit packed sequences: [N + 1], the sequences by the number of chunks of their last
  // segments, most first. They are sorted some thousands at a time.
  int32_t* by_last_segment = nullptr;
  PackedTotals* totals = nullptr;  // if sweeps visit packed sequences
};

// A pool of states. The matrix of a row and head, [K, V] or [V, K], starts at element row *
// stride_n + head * stride_h.
struct StatePool {
  void* data = nullptr;
  DType dtype = DType::kFloat;
  int64_t rows = 0, stride_n = 0, stride_h = 0;
};

// The states of forward on a pool (chunk_gla_), in place of h0 and ht.
struct PoolRows {
  StatePool states;
  Indices slots;        // [N]: a sequence's row, default n; outside the pool its results are 0
  Indices write_slots;  // [N]: the row for its last state, default that of `slots`
  const bool* has_initial = nullptr;  // [N]: whether it starts from its row, else from 0; or all do
  // Checkpoints are the states of a sequence after every checkpoint_chunks chunks (0: none).
  int32_t checkpoint_chunks = 0;
  StatePool checkpoints;
  int64_t checkpoint_count = 0;  // of checkpoint_slots
  Indices checkpoint_slots;      // [count]: a checkpoint's row, default its number
  Indices checkpoint_starts;  // [N + 1]: numbers of a sequence's checkpoints, or as many for each
};

// Packed sequences of a call on a pool that have so few tokens that the recurrence (recurrent_gla/)
// takes them. For all other kernels they have no tokens and no row.
struct ShortSequences {
  int64_t most_tokens = -1;   // the most tokens of such a sequence
  Indices slots;              // [N]: the caller's, in place of PoolRows::slots
  int64_t* others = nullptr;  // [N]: the new PoolRows::slots, made from `slots`
};

// Everything a step may read or write. Absent tensors have data == nullptr.
struct Problem {
  ChunkGrid grid;
  int32_t H = 0, K = 0, V = 0;
  float scale = 1;
  int32_t processors = 1;       // multiprocessors of the GPU
  DType dtype = DType::kFloat;  // of q, k, v, do, o, dq, dk, dv
  bool tf32 = false;            // fp32 inputs: products in tf32, as torch's switch allows
  bool state_v_first = false;   // of h0, ht, dht, dh0 and the pool: [V, K] instead of [K, V]
  bool past_alone = false;      // forward: a token's bits depend on its past alone

  Rows q, k, v, d_o;  // [B, T, H, K | V]; k, v and g may have HK heads
  Rows g;             // natural-log gates [B, T, H, K], or absent and then b alone is read
  Rows b;             // gate cumsum in chunks, log2 units [B, T, H, K] fp32; without gates one row
                      // of zeros, its strides 0
  Rows b_suffix;      // sum of the gates after a token in its chunk [B, T, H, K] fp32, or absent
  Rows o, dq, dk, dv, dg;  // outputs
  // Scores [B, T, H, C], their diagonal blocks [B, T, H, c] and dA [B, T, H, C]: fp32, or bf16 for
  // bf16 inputs.
  Rows A, A_diagonal, dA;
  bool whole_scores = false;          // A holds the diagonal blocks too, A_diagonal is absent
  Rows dq_intra, dk_intra, dg_intra;  // [B, T, H, K] fp32, from step 6 to step 7

  const float* h0 = nullptr;   // [N, H, K, V]
  const float* dht = nullptr;  // [N, H, K, V]
  float* ht = nullptr;         // [N, H, K, V]
  float* dh0 = nullptr;        // [N, H, K, V]
  PoolRows pool;               // in place of h0 and ht, of forward alone
  // Sweeps over prepared chunks scale S and dS and store them as tiles, [B, chunks, H] of
  // state_tile_bytes(K, V); with chunk_pairs, one of each for two chunks.
  void* S = nullptr;   // [B, chunks, H, K, V], the state that enters each chunk
  void* dS = nullptr;  // [B, chunks, H, K, V], the gradient of the state that leaves it
  DType S_dtype = DType::kFloat, dS_dtype = DType::kFloat;  // fp32, or bf16 for bf16 inputs

  // If sequences are cut into segments. [B, segment_states, H, K, V]: the state that enters each
  // segment, or the gradient of the state that leaves it; before the scan, what the segment alone
  // adds to it. segment_decays: the sums of its gates in log2 units [B, segment_states, H, K].
  // Packed sequences have these for each summary, of which a segment may have several.
  float* segment_states = nullptr;
  float* segment_state_grads = nullptr;
  float* segment_decays = nullptr;

  // If a pass is cut at the scan (context parallel): the inputs of the scan, if it does not work in
  // place. folded: what all segments of a sequence add to the state, or to its gradient, [N, H, K,
  // V]. folded_decays: the sum of their gates, natural log [N, H, K].
  float* summaries = nullptr;
  float* summary_grads = nullptr;
  float* folded = nullptr;
  float* folded_decays = nullptr;

  // Fused path: how many work items a block, or a cluster of two, takes one by one.
  int32_t items_each = 1;

  // Fused path: [B, entries, H] of prepared_bytes(K), or absent.
  unsigned char* prepared = nullptr;

  // Set by a launcher for its kernel.
  bool summarizes = false;  // steps: sweeps make the summaries of segments
  bool with_A = false;      // prepare: makes A of chunks in tier 1 too
  bool chunk_pairs =
      false;           // of two chunks the first's S and the second's dS: segments/chunk_pairs.cuh
  bool has_A = false;  // strong gradients: prepared chunks have A
  bool sums_decays = false;  // summaries of dS: makes segment_decays too

  // [B, entries, H, kMaxTierBlocks]: how many of the chunk's last rows are strong if some channel
  // of a block of kTierBlock is out of tier 1's range: all kChunk, or with past_alone those from
  // the first on that is out of range. The chunk is in tier 1 if all are 0. Sweeps of the fused
  // path set the first byte for all their blocks.
  uint8_t* tiers = nullptr;

  ShortSequences short_sequences;
  int32_t* cut_sequences = nullptr;  // packed: the sequences of several segments, for the scan
};

}  // namespace gla_ext::cuda
