// The fused path for sm_90a as the host side calls it: bf16 q, k and v; bf16 or fp32 g; K of at
// most kFusedKeys; K and V multiples of 8; rows that start at multiples of 16 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace gla_ext::cuda::sm90 {

// Whether the kernels are there for the current device.
bool available();

// Sweeps that gate: bf16 g, for K of at most 64 fp32 too.
// q k v g h0 (segment_states) -> o, ht, tiers: all but what chunks outside tier 1 owe to their own
// A; with operands, but for A outside tier 1, if they are there (K above 64, V of at most 128). K
// of at most 128.
void forward(const Problem& p, cudaStream_t stream);
// The same of heads of at most 64 keys and 64 values with bf16 g, which `forward` leaves to it.
void narrow_forward(const Problem& p, cudaStream_t stream);
// The same by pairs of blocks, where the plan says so (cluster_pieces); with operands, but for A
// outside tier 1, if they are there.
void paired_forward(const Problem& p, cudaStream_t stream);

// k v g h0 (segment_states) -> S and tiers, and unless gradients are swept q g do dht
// (segment_state_grads) -> dS and dh0. K of at most 64.
void chunk_states(const Problem& p, cudaStream_t stream);

// The same sweeps -> segment_states or segment_state_grads and segment_decays: what each segment
// adds by itself. K of at most 64.
void segment_parts(const Problem& p, cudaStream_t stream);
// segment_decays h0 dht -> segment_states, segment_state_grads: what enters a segment.
void segment_scan(const Problem& p, cudaStream_t stream);
// Behind `paired_segment_parts` in forward, beside the scan of their states: q k g tiers -> A of
// operands, of chunks outside tier 1.
void scan_and_exact_scores(const Problem& p, cudaStream_t stream);

// q k g, and in backward v do -> operands, tiers, and outside tier 1 in backward dq_intra dk_intra
// dg_intra.
void operands(const Problem& p, cudaStream_t stream);
// The sweeps above over operands in place of q, k and g; K above 64. `linear_states`
// writes S and, unless gradients are swept, dS, scaled, S~ and dS~, for the gradients alone; of
// pairs of chunks (paired_chunks) one of each.
void linear_forward(const Problem& p, cudaStream_t stream);
void linear_states(const Problem& p, cudaStream_t stream);
void linear_segment_parts(const Problem& p, cudaStream_t stream);
// Of the gradients' sweep alone; segment_decays where nobody else makes them (grads_sum_decays).
void linear_segment_grad_parts(const Problem& p, cudaStream_t stream);
// q k v g h0 -> operands, tiers, S, scaled: operands and linear_states at once, by pairs of blocks,
// where the plan says so (paired_states). bf16 g; neither segments nor packed sequences; K of 65 to
// 128, V of 193 to 256.
void paired_states(const Problem& p, cudaStream_t stream);
// The same sweeps -> operands (A of tier 1 if `scores`), tiers, segment_states and segment_decays:
// what each segment adds by itself.
void paired_segment_parts(const Problem& p, cudaStream_t stream);
// k v g -> segment_states and segment_decays of packed sequences, by the same sweeps. bf16 g, K of
// 65 to 128.
void packed_segment_parts(const Problem& p, cudaStream_t stream);

// q k v g tiers -> o += A v, of chunks outside tier 1, behind the forward sweeps that gate; and A
// of operands if these are there.
void exact_output(const Problem& p, cudaStream_t stream);

// q k v g do tiers -> A dq_intra dk_intra dg_intra, of chunks outside tier 1. K of at most 64, or
// behind the paired sweeps, of whose operands A is then a part, or of kept operands, which have A.
void exact_gradients(const Problem& p, cudaStream_t stream);
// q k v g do S dS tiers, for K above 64 operands, and outside tier 1 dq_intra dk_intra dg_intra
// and, for K of at most 64, A -> dq dk dv dg
void gradients(const Problem& p, cudaStream_t stream);
// The same by pairs of chunks, which have one S and one dS (paired_chunks), over operands with A.
// K above 128.
void paired_gradients(const Problem& p, cudaStream_t stream);

// The same from the last chunk to the first, dS on chip: q k v g do S dht (segment_state_grads)
// operands, and outside tier 1 dq_intra dk_intra dg_intra -> dq dk dv dg dh0. K of 65 to 128, V of
// at most 256.
void gradient_sweep(const Problem& p, cudaStream_t stream);
// The same without operands, outside tier 1 with A: bf16 g, K and V of at most 64.
void narrow_gradient_sweep(const Problem& p, cudaStream_t stream);

}  // namespace gla_ext::cuda::sm90
