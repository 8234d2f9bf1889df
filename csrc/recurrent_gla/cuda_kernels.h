// The recurrent kernels as the host calls them: plain structs, no torch header. Each launches on
// `stream` and returns at once. Without heads or sequences nothing is launched; without tokens,
// states still pass through.
#pragma once

#include <cuda_runtime_api.h>

#include <limits>

#include "cuda/host/indices.h"
#include "cuda/host/params.h"

namespace gla_ext::cuda {

// A recurrence over B rows of T tokens: N sequences (the rows, or packed in one), whose states may
// be in a pool. Absent tensors have data == nullptr.
struct Recurrence {
  int64_t B = 0, T = 0, N = 0;
  int32_t H = 0, K = 0, V = 0;
  float scale = 1;
  bool reverse = false;        // the last token comes first
  bool state_v_first = false;  // [V, K] instead of [K, V]
  // Whether every four numbers of a row of a state's matrix start at a multiple of their bytes.
  bool state_aligned = false;

  Rows q, k, v, gk, gv;  // [B, T, H, K | V]; all but q may have HK heads
  int32_t gk_step = 1;   // from a key channel's gate to the next; 0: one gate a head, gk [B, T, HK]
  Rows o;                // [B, T, H, V]
  Indices cu_seqlens;    // [N + 1], packed only

  // In both, matrix (n, head) starts at n * state_stride_n + head * state_stride_h.
  const void* state_in = nullptr;
  void* state_out = nullptr;  // may be state_in
  int64_t state_stride_n = 0, state_stride_h = 0;
  int64_t slots_in_pool = 0;  // P
  Indices slots;     // [N]: where a sequence's state is; without one in the pool its o is 0
  Indices accepted;  // [N]: how many tokens of a sequence count

  // Backward; all but do contiguous.
  Rows d_o;
  Rows dq, dk, dv, dgk, dgv;
  const float* dht = nullptr;
  float* dh0 = nullptr;
  float* kept = nullptr;      // tiles, see RecurrentBackwardPlan
  float* replayed = nullptr;  // tiles
  float* partials = nullptr;  // [3, value blocks, B, T, H, K], or null where there is one

  // A pool.
  DType state_dtype = DType::kFloat;
  Indices write_slots;       // [N]: where the state goes, if not back; outside the pool nowhere
  int64_t least_tokens = 0;  // forward leaves shorter sequences alone

  // Forward together with the kernels of chunk_gla_.
  int64_t most_tokens = std::numeric_limits<int64_t>::max();  // it leaves longer sequences alone
  const bool* has_initial = nullptr;  // [N]: whether a sequence starts from its state, else from 0
};

// q k v gk gv state_in -> o, state_out
void recurrent_forward(const Recurrence& p, cudaStream_t stream);
// recurrent_forward for a pool of states of one type; it calls these itself.
void recurrent_forward_bf16(const Recurrence& p, cudaStream_t stream);
void recurrent_forward_fp16(const Recurrence& p, cudaStream_t stream);

// The inputs of the gates of a token's step: gk = max(logsigmoid(W h + b) / normalizer, clamp).
constexpr int kMostLowRank = 256;
struct LowRankGate {
  const void* h = nullptr;  // [B, rank], rows at multiples of 16 bytes
  int64_t h_stride = 0;
  Rows weight, bias;  // of a head: [K, rank], the rank contiguous, and [K]; bias may be absent
  int32_t rank = 0;   // a multiple of 8
  float per_normalizer = 1, clamp_min = 0;
  bool overlaps = false;  // may start before the previous kernel has ended
};

// q k v state_in and the gate's inputs -> o, state_out, for one token per row. All have q's dtype.
void recurrent_low_rank_step(const Recurrence& p, const LowRankGate& gate, cudaStream_t stream);

// q k v gk gv state_in -> o, for rows whose states are in a pool. Drafts of 2 to 16 tokens (packed:
// 1 to 16) take the chunk form, others the recurrence.
void recurrent_verify(const Recurrence& p, int multiprocessors, cudaStream_t stream);
// The chunk form for a pool of states of one type; recurrent_verify calls these.
void recurrent_verify_bf16(const Recurrence& p, int multiprocessors, cudaStream_t stream);
void recurrent_verify_fp16(const Recurrence& p, int multiprocessors, cudaStream_t stream);

// The buffers of a pool's slots, of p's P slots and B rows, and what the two kernels of a step pass
// on, in floats.
struct Buffers {
  Rows k, v, g;   // [P, L, HK, K | V]
  Indices count;  // [P]
  int32_t HK = 0, L = 0;
  int32_t Kp = 0;            // K up to the next multiple of 8
  float* scores = nullptr;   // [B, H, T, kMostBuffered]
  float* queries = nullptr;  // [B, H, T, Kp], q decayed to the state
  // Of rows whose buffer is folded: its keys decayed to its end, and behind them their decay; and v
  // of the places that new tokens take.
  float* keys = nullptr;    // [B, HK, kFoldRows, Kp]
  float* values = nullptr;  // [B, HK, T, V]
};
constexpr int kMostBuffered = 16;
constexpr int kFoldRows = kMostBuffered + 1, kFoldPitch = kMostBuffered + 2;

// Heads of more keys need this much shared memory a block, which GPUs such as 8.9 and 12.0 lack.
constexpr int kMostBufferedKeys = 512, kManyKeysBytes = 140 << 10;

// q k v gk state_in and the buffers -> o, the buffers and, of rows whose buffer is full, state_out.
// overlaps: the second kernel may start while the first still runs.
void recurrent_buffered_step(const Recurrence& p, const Buffers& buffers, bool overlaps,
                             cudaStream_t stream);
// Its first kernel, and its second for a pool of states of one type; it calls these itself.
void recurrent_buffered_scores(const Recurrence& p, const Buffers& buffers, cudaStream_t stream);
void recurrent_buffered_outputs_bf16(const Recurrence& p, const Buffers& buffers, bool overlaps,
                                     cudaStream_t stream);
void recurrent_buffered_outputs_fp16(const Recurrence& p, const Buffers& buffers, bool overlaps,
                                     cudaStream_t stream);

// The memory that backward needs, in floats, and its grid. A tile is a block's part of a state.
struct RecurrentBackwardPlan {
  int64_t value_blocks;  // blocks of threads that share a state, each with some of its values
  int64_t blocks;        // of threads, each with some of the (sequence, head, value block)s
  int64_t kept, replayed, partials;
};
RecurrentBackwardPlan plan_recurrent_backward(const Recurrence& p, int multiprocessors);

// do dht q k v gk gv state_in -> dq dk dv dgk dgv, dh0
void recurrent_backward(const Recurrence& p, const RecurrentBackwardPlan& plan,
                        cudaStream_t stream);

}  // namespace gla_ext::cuda
