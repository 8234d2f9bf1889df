// The fused path for sm_90a, as the host calls it. Inputs: bf16 q, k and v; bf16 or fp32 g; K of at
// most kFusedKeys; K and V multiples of 8; rows that start at multiples of 16 bytes. Each function
// launches one kernel. plan/kernels.h names the kernels; the plan decides which a call needs.
//
// Terms: strong chunks, those outside tier 1, are explained in device/gates.cuh; prepared chunks in
// prepare/prepared.cuh; summaries and segments in segments/README.md.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/params.h"

namespace gla_ext::cuda::sm90 {

// Whether this build has the kernels for the current device.
bool available();
// Whether kernels wait for the one before it, so that `launch_dependent` may launch them.
bool dependent_launch_available();

// q k g, and in backward v do -> prepared chunks (q^ k^ A and factors), tiers; in backward also
// dq_intra dk_intra dg_intra of strong chunks. K above 64.
void launch_prepare(const Problem& p, cudaStream_t stream);
// Like launch_prepare, but stores A of strong chunks only.
void launch_prepare_without_A(const Problem& p, cudaStream_t stream);

// Summaries: what each segment adds to the state (segment_states) or to its gradient
// (segment_state_grads) by itself, and segment_decays, the sums of the segment's gates.
// k v g -> summaries of the state; `both`: also q do -> those of its gradient. K of at most 64.
void launch_summaries_fused(const Problem& p, cudaStream_t stream);
void launch_summaries_fused_both(const Problem& p, cudaStream_t stream);
// Summaries computed from prepared chunks. K above 64.
void launch_summaries_prepared(const Problem& p, cudaStream_t stream);
void launch_summaries_prepared_both(const Problem& p, cudaStream_t stream);
void launch_summaries_prepared_grads(const Problem& p, cudaStream_t stream);
void launch_summaries_prepared_grads_and_decays(const Problem& p, cudaStream_t stream);
// q k v g -> prepared chunks, tiers and summaries of the state in one kernel, by clusters of two
// blocks. bf16 g, K of 65 to 128, V of 193 to 256; not packed.
void launch_summaries_cluster(const Problem& p, cudaStream_t stream);
void launch_summaries_cluster_without_A(const Problem& p, cudaStream_t stream);
// k v g -> only summaries of the state, for packed sequences. bf16 g, K of 65 to 128.
void launch_summaries_packed(const Problem& p, cudaStream_t stream);

// Summaries, segment_decays, h0, dht -> the state or gradient that enters each segment, written
// over the summaries in segment_states and segment_state_grads.
void launch_scan(const Problem& p, cudaStream_t stream);
void launch_scan_both(const Problem& p, cudaStream_t stream);
void launch_scan_grads(const Problem& p, cudaStream_t stream);
// launch_scan, and in further blocks q k g tiers -> A of strong chunks. Follows summaries_cluster.
void launch_scan_and_strong_A(const Problem& p, cudaStream_t stream);
// Summaries, decays, h0, dht -> folded, folded_decays: the summary of a whole sequence, for other
// ranks.
void launch_fold(const Problem& p, cudaStream_t stream);
void launch_fold_grads(const Problem& p, cudaStream_t stream);
// The fold, and in further blocks q k g tiers -> A of strong chunks. Follows summaries_cluster.
void launch_fold_and_strong_A(const Problem& p, cudaStream_t stream);
void launch_fold_grads_and_strong_A(const Problem& p, cudaStream_t stream);

// q k v g h0 (segment_states) -> o, ht, tiers: everything except A v of strong chunks, which
// strong_output adds. bf16 g, or fp32 g for K of at most 64; K of at most 128.
void launch_forward_fused(const Problem& p, cudaStream_t stream);
// Also stores prepared chunks for backward, except A of strong ones. K above 64, V of at most 128.
void launch_forward_fused_for_backward(const Problem& p, cudaStream_t stream);
// launch_forward_fused for heads with K and V of at most 64 and bf16 g.
void launch_forward_small(const Problem& p, cudaStream_t stream);
// launch_forward_fused by clusters of two blocks that share the gating.
void launch_forward_cluster(const Problem& p, cudaStream_t stream);
void launch_forward_cluster_for_backward(const Problem& p, cudaStream_t stream);
// prepared chunks v h0 (segment_states) -> o, ht. K above 64.
void launch_forward_prepared(const Problem& p, cudaStream_t stream);
// launch_forward_prepared that computes A of tier-1 chunks itself. Follows scan_and_strong_A.
void launch_forward_prepared_makes_A(const Problem& p, cudaStream_t stream);
// q k v g tiers -> o += A v of strong chunks.
void launch_strong_output(const Problem& p, cudaStream_t stream);
// Also stores A of strong chunks in the prepared chunks.
void launch_strong_output_for_backward(const Problem& p, cudaStream_t stream);

// k v g h0 (segment_states) -> S and tiers, and q g do dht (segment_state_grads) -> dS and dh0. K
// of at most 64.
void launch_states_fused(const Problem& p, cudaStream_t stream);
void launch_states_fused_without_grads(const Problem& p, cudaStream_t stream);
// States from prepared chunks, scaled: S~ and dS~, which only the gradients read. K above 64.
void launch_states_prepared(const Problem& p, cudaStream_t stream);
void launch_states_prepared_without_grads(const Problem& p, cudaStream_t stream);
// Of each chunk pair, stores S~ of the first chunk and dS~ of the second.
void launch_states_prepared_chunk_pairs(const Problem& p, cudaStream_t stream);
// q k v g h0 -> prepared chunks, tiers and S~ in one kernel, by clusters of two blocks. bf16 g, K
// of 65 to 128, V of 193 to 256; for batches with neither segments nor packed sequences.
void launch_states_cluster(const Problem& p, cudaStream_t stream);

// q k v g do tiers -> A dq_intra dk_intra dg_intra of strong chunks. For plans where prepare has
// not made them.
void launch_strong_gradients(const Problem& p, cudaStream_t stream);
// launch_strong_gradients without A, which forward has stored.
void launch_strong_gradients_without_A(const Problem& p, cudaStream_t stream);
// q k v g do S dS tiers, prepared chunks (K above 64), and of strong chunks dq_intra dk_intra
// dg_intra and A (A only for K of at most 64) -> dq dk dv dg
void launch_gradients_chunk(const Problem& p, cudaStream_t stream);
// launch_gradients_chunk by chunk pairs, over prepared chunks with A. K above 128.
void launch_gradients_chunk_pair(const Problem& p, cudaStream_t stream);
// The gradients from the last chunk to the first, with dS on chip: q k v g do S dht
// (segment_state_grads), prepared chunks, and of strong chunks dq_intra dk_intra dg_intra -> dq dk
// dv dg dh0. K of 65 to 128, V of at most 256.
void launch_gradients_sweep(const Problem& p, cudaStream_t stream);
// launch_gradients_sweep without prepared chunks; reads A of strong chunks. bf16 g, K and V of at
// most 64.
void launch_gradients_small_sweep(const Problem& p, cudaStream_t stream);

}  // namespace gla_ext::cuda::sm90
