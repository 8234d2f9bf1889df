// The fused path for sm_90a as the host side calls it: bf16 q, k and v; bf16 or fp32 g; K of at
// most kFusedKeys; K and V multiples of 8; rows that start at multiples of 16 bytes. Each function
// launches one kernel; plan/kernels.h names them, the plan says which a call needs.
//
// Strong chunks, those outside tier 1, are explained in device/gates.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/params.h"

namespace gla_ext::cuda::sm90 {

// Whether the kernels are there for the current device.
bool available();

// q k g, and in backward v do -> prepared chunks (q^ k^ A and factors), tiers, and of strong chunks
// in backward dq_intra dk_intra dg_intra. K above 64.
void launch_prepare(const Problem& p, cudaStream_t stream);
// The same with A of strong chunks alone.
void launch_prepare_without_A(const Problem& p, cudaStream_t stream);

// Summaries: segment_states or segment_state_grads, what each segment adds by itself, and
// segment_decays, the sums of its gates.
// k v g, and q do -> both. K of at most 64.
void launch_summaries_fused(const Problem& p, cudaStream_t stream);
void launch_summaries_fused_both(const Problem& p, cudaStream_t stream);
// The same over prepared chunks. K above 64.
void launch_summaries_prepared(const Problem& p, cudaStream_t stream);
void launch_summaries_prepared_both(const Problem& p, cudaStream_t stream);
void launch_summaries_prepared_grads(const Problem& p, cudaStream_t stream);
void launch_summaries_prepared_grads_and_decays(const Problem& p, cudaStream_t stream);
// q k v g -> prepared chunks, tiers and summaries of the state in one kernel, by clusters of two
// blocks. bf16 g, K of 65 to 128, V of 193 to 256; not packed.
void launch_summaries_cluster(const Problem& p, cudaStream_t stream);
void launch_summaries_cluster_without_A(const Problem& p, cudaStream_t stream);
// k v g -> summaries of the state of packed sequences alone. bf16 g, K of 65 to 128.
void launch_summaries_packed(const Problem& p, cudaStream_t stream);

// Summaries, segment_decays h0 dht -> segment_states, segment_state_grads: what enters a segment.
void launch_scan(const Problem& p, cudaStream_t stream);
void launch_scan_both(const Problem& p, cudaStream_t stream);
void launch_scan_grads(const Problem& p, cudaStream_t stream);
// launch_scan, and after summaries_cluster beside it: q k g tiers -> A of strong chunks.
void launch_scan_and_strong_A(const Problem& p, cudaStream_t stream);
// Summaries, decays, h0 dht -> folded, folded_decays: the summary of a whole sequence, for other
// ranks.
void launch_fold(const Problem& p, cudaStream_t stream);
void launch_fold_grads(const Problem& p, cudaStream_t stream);
// The same, and after summaries_cluster beside it: q k g tiers -> A of strong chunks.
void launch_fold_and_strong_A(const Problem& p, cudaStream_t stream);
void launch_fold_grads_and_strong_A(const Problem& p, cudaStream_t stream);

// q k v g h0 (segment_states) -> o, ht, tiers: everything except A v of strong chunks, which
// strong_output adds. bf16 g, for K of at most 64 fp32 too; K of at most 128.
void launch_forward_fused(const Problem& p, cudaStream_t stream);
// And prepared chunks, except A of strong ones, for backward. K above 64, V of at most 128.
void launch_forward_fused_for_backward(const Problem& p, cudaStream_t stream);
// The same of heads of at most 64 keys and 64 values with bf16 g.
void launch_forward_small(const Problem& p, cudaStream_t stream);
// The same by clusters of two blocks that share the gating.
void launch_forward_cluster(const Problem& p, cudaStream_t stream);
void launch_forward_cluster_for_backward(const Problem& p, cudaStream_t stream);
// prepared chunks v h0 (segment_states) -> o, ht. K above 64.
void launch_forward_prepared(const Problem& p, cudaStream_t stream);
// The same, which makes A of chunks in tier 1 itself. After scan_and_strong_A.
void launch_forward_prepared_makes_A(const Problem& p, cudaStream_t stream);
// q k v g tiers -> o += A v of strong chunks.
void launch_strong_output(const Problem& p, cudaStream_t stream);
// And their A -> prepared chunks.
void launch_strong_output_for_backward(const Problem& p, cudaStream_t stream);

// k v g h0 (segment_states) -> S and tiers, and q g do dht (segment_state_grads) -> dS and dh0. K
// of at most 64.
void launch_states_fused(const Problem& p, cudaStream_t stream);
void launch_states_fused_without_grads(const Problem& p, cudaStream_t stream);
// The same over prepared chunks: scaled, S~ and dS~, for the gradients alone. K above 64.
void launch_states_prepared(const Problem& p, cudaStream_t stream);
void launch_states_prepared_without_grads(const Problem& p, cudaStream_t stream);
// Of chunk pairs the first's S~ and the second's dS~.
void launch_states_prepared_chunk_pairs(const Problem& p, cudaStream_t stream);
// q k v g h0 -> prepared chunks, tiers and S~ in one kernel, by clusters of two blocks. bf16 g, K
// of 65 to 128, V of 193 to 256; neither segments nor packed sequences.
void launch_states_cluster(const Problem& p, cudaStream_t stream);

// q k v g do tiers -> A dq_intra dk_intra dg_intra of strong chunks, where prepare has not made
// them.
void launch_strong_gradients(const Problem& p, cudaStream_t stream);
// The same where forward has left A.
void launch_strong_gradients_without_A(const Problem& p, cudaStream_t stream);
// q k v g do S dS tiers, for K above 64 prepared chunks, and of strong chunks dq_intra dk_intra
// dg_intra and, for K of at most 64, A -> dq dk dv dg
void launch_gradients_chunk(const Problem& p, cudaStream_t stream);
// The same by chunk pairs, over prepared chunks with A. K above 128.
void launch_gradients_chunk_pair(const Problem& p, cudaStream_t stream);
// The same from the last chunk to the first, dS on chip: q k v g do S dht (segment_state_grads)
// prepared chunks, and of strong chunks dq_intra dk_intra dg_intra -> dq dk dv dg dh0. K of 65 to
// 128, V of at most 256.
void launch_gradients_sweep(const Problem& p, cudaStream_t stream);
// The same without prepared chunks, of strong chunks with A: bf16 g, K and V of at most 64.
void launch_gradients_small_sweep(const Problem& p, cudaStream_t stream);

}  // namespace gla_ext::cuda::sm90
