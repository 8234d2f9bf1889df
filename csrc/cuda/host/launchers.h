// The kernels as the host side calls them: each launches on `stream` and returns at once. Problems
// without tokens, heads or sequences launch nothing.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace gla_ext::cuda {

// cu_seqlens -> grid.sequences and, where it is there, grid.totals; packed only.
void map_sequences(const Problem& p, cudaStream_t stream);
// grid.sequences -> grid.chunk_slots and, where it is there, grid.by_last_segment; packed only.
void map_chunks(const Problem& p, cudaStream_t stream);

// g -> b, and b_suffix and tiers where they are there.
void gate_cumsum(const Problem& p, cudaStream_t stream);
// b -> tiers, for steps that are given b alone.
void chunk_tiers(const Problem& p, cudaStream_t stream);

// k v b (b_suffix) h0 -> S, and ht where it is there.
void chunk_states(const Problem& p, cudaStream_t stream);
// q k b tiers -> A off the diagonal in tier 1; of whole scores, the diagonal too.
void scores_off_diagonal(const Problem& p, cudaStream_t stream);
// q k b tiers (g) -> A off the diagonal outside tier 1.
void strong_scores_off_diagonal(const Problem& p, cudaStream_t stream);
// q k b (g) -> A_diagonal
void scores_diagonal(const Problem& p, cudaStream_t stream);
// q k b tiers (g) -> the diagonal blocks of A outside tier 1, of whole scores.
void strong_scores_diagonal(const Problem& p, cudaStream_t stream);
// q v b A (A_diagonal) S -> o
void output(const Problem& p, cudaStream_t stream);

// q do b dht -> dS, and dh0 where it is there.
void state_grads(const Problem& p, cudaStream_t stream);
// chunk_states and state_grads side by side, in bf16.
void states_and_state_grads(const Problem& p, cudaStream_t stream);
// k do b (b_suffix) A (A_diagonal) dS -> dv
void value_grads(const Problem& p, cudaStream_t stream);
// do v -> dA
void score_grads(const Problem& p, cudaStream_t stream);
// q k b tiers dA -> dq_intra, dk_intra, and dg_intra where it is there, in tier 1
void intra_grads(const Problem& p, cudaStream_t stream);
// The same outside tier 1, with g.
void strong_intra_grads(const Problem& p, cudaStream_t stream);
// q k v do b (b_suffix, g) S dS and step 6's outputs -> dq, dk, and dg where it is there
void merge_grads(const Problem& p, cudaStream_t stream);

// With gates on values a call has a second Problem, the chunk seen from its values: do for q, v for
// k, A for dA and the values' gates, so that scores are dA and step 6 gives what passes through A
// to v and gv. The v and do of `p` are then as they face the states. values.k values.q bv
// (bv_suffix) -> p.v, and p.d_o where it is there
void value_operands(const Problem& p, const Problem& values, cudaStream_t stream);
// k v b (b_suffix) bv h0 -> S, and ht where it is there
void value_gated_states(const Problem& p, const Problem& values, cudaStream_t stream);
// q do b bv dht -> dS, and dh0 where it is there
void value_gated_state_grads(const Problem& p, const Problem& values, cudaStream_t stream);
// q b A S, v gv -> o
void value_gated_output(const Problem& p, const Problem& values, cudaStream_t stream);
// What merge_grads reads of both sides -> dq, dk, dg where it is there; and dv, dgv
void merge_key_grads(const Problem& p, const Problem& values, cudaStream_t stream);
void merge_value_grads(const Problem& p, const Problem& values, cudaStream_t stream);

}  // namespace gla_ext::cuda
