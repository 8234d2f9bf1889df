// The kernels as the host side calls them: each launches on `stream` and returns at once. Problems
// without tokens, heads or sequences launch nothing.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/plan/kernels.h"
#include "params.h"

namespace gla_ext::cuda {

// cu_seqlens -> grid.sequences and, if given, grid.totals; packed only.
void launch_map_sequences(const Problem& p, cudaStream_t stream);
// grid.sequences -> grid.chunk_entries and, if given, grid.by_last_segment; packed only.
void launch_map_chunks(const Problem& p, cudaStream_t stream);

// g -> b, and b_suffix and tiers if given.
void launch_gate_cumsum(const Problem& p, cudaStream_t stream);
// b -> tiers, for steps that get only b.
void launch_chunk_tiers(const Problem& p, cudaStream_t stream);

// k v b (b_suffix) h0 -> S, and ht if given.
void launch_chunk_states(const Problem& p, cudaStream_t stream);
// q k b tiers -> A off the diagonal in tier 1; for whole scores, the diagonal too.
void launch_scores_off_diagonal(const Problem& p, cudaStream_t stream);
// q k b tiers (g) -> A off the diagonal of strong chunks.
void launch_strong_scores_off_diagonal(const Problem& p, cudaStream_t stream);
// q k b (g) -> A_diagonal
void launch_scores_diagonal(const Problem& p, cudaStream_t stream);
// q k b tiers (g) -> the diagonal blocks of A of strong chunks, for whole scores.
void launch_strong_scores_diagonal(const Problem& p, cudaStream_t stream);
// q v b A (A_diagonal) S -> o
void launch_output(const Problem& p, cudaStream_t stream);

// q do b dht -> dS, and dh0 if given.
void launch_state_grads(const Problem& p, cudaStream_t stream);
// chunk_states and state_grads side by side, in bf16.
void launch_states_and_state_grads(const Problem& p, cudaStream_t stream);

// What each segment adds by itself: k v b (b_suffix) -> segment_states, segment_decays.
void launch_chunk_states_summaries(const Problem& p, cudaStream_t stream);
// q do b -> segment_state_grads, segment_decays of the last segment
void launch_state_grads_summaries(const Problem& p, cudaStream_t stream);
// Both side by side, in bf16.
void launch_states_and_state_grads_summaries(const Problem& p, cudaStream_t stream);
// h0, dht, segment_decays -> segment_states and segment_state_grads, if given, in place.
void launch_segment_scan(const Problem& p, cudaStream_t stream);

// k do b (b_suffix) A (A_diagonal) dS -> dv
void launch_value_grads(const Problem& p, cudaStream_t stream);
// do v -> dA
void launch_score_grads(const Problem& p, cudaStream_t stream);
// q k b tiers dA -> dq_intra, dk_intra, and dg_intra if given, in tier 1
void launch_intra_grads(const Problem& p, cudaStream_t stream);
// launch_intra_grads for strong chunks; also reads g.
void launch_strong_intra_grads(const Problem& p, cudaStream_t stream);
// q k v do b (b_suffix, g) S dS and step 6's outputs -> dq, dk, and dg if given
void launch_merge_grads(const Problem& p, cudaStream_t stream);

// With gates on values a call has a second Problem, the value side. It has do in place of q, v in
// place of k, A in place of dA, and the gates on values. So its scores are dA, and its step 6 gives
// what reaches v and gv through A. v and do of `p` are then multiplied by their decays.
//
// value_side.k value_side.q bv (bv_suffix) -> p.v, and p.d_o if given
void launch_gate_values(const Problem& p, const Problem& value_side, cudaStream_t stream);
// k v b (b_suffix) bv h0 -> S, and ht if given
void launch_value_gated_states(const Problem& p, const Problem& value_side, cudaStream_t stream);
// q do b bv dht -> dS, and dh0 if given
void launch_value_gated_state_grads(const Problem& p, const Problem& value_side,
                                    cudaStream_t stream);
// q b A S, v gv -> o
void launch_value_gated_output(const Problem& p, const Problem& value_side, cudaStream_t stream);
// The inputs of merge_grads for both sides -> dq, dk, dg if given; and dv, dgv
void launch_merge_key_grads(const Problem& p, const Problem& value_side, cudaStream_t stream);
void launch_merge_value_grads(const Problem& p, const Problem& value_side, cudaStream_t stream);

// Launches any of these kernels or of the fused path's. p: the Problem of the kernel's side.
void launch(Kernel kernel, const Problem& p, const Problem& value_side, cudaStream_t stream);

}  // namespace gla_ext::cuda
