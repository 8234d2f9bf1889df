// The kernels for one gate a head, or none, as the host calls them: bf16 q, k and v with K and V
// multiples of 8 and rows that start at multiples of 16 bytes; g [B, T, H] of any dtype and
// strides, as rows of one column.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/host/params.h"

namespace gla_ext::cuda::sm90 {

// g -> HeadGates of every chunk and head.
void launch_head_gate_sums(const Problem& p, cudaStream_t stream);

// Summaries, for the scan. K of at most 256.
// k v HeadGates -> segment_states, segment_decays
void launch_head_gate_summaries(const Problem& p, cudaStream_t stream);
// q do HeadGates -> segment_state_grads, segment_decays
void launch_head_gate_summaries_of_grads(const Problem& p, cudaStream_t stream);

// q k v h0 (segment_states) HeadGates -> o, ht. K of at most 256.
void launch_head_gate_forward(const Problem& p, cudaStream_t stream);
// do v k h0 (segment_states) HeadGates -> dq. V of at most 256.
void launch_head_gate_query_grads(const Problem& p, cudaStream_t stream);
// v do q dht (segment_state_grads) HeadGates -> dk. V of at most 256.
void launch_head_gate_key_grads(const Problem& p, cudaStream_t stream);
// query_grads and key_grads that also make the dots with q and with k, for the gradient of the
// gates.
void launch_head_gate_query_grads_and_dots(const Problem& p, cudaStream_t stream);
void launch_head_gate_key_grads_and_dots(const Problem& p, cudaStream_t stream);
// g HeadGates dots -> dg
void launch_head_gate_gate_grads(const Problem& p, cudaStream_t stream);
// k q do dht (segment_state_grads) HeadGates -> dv, dh0. K of at most 256.
void launch_head_gate_value_grads(const Problem& p, cudaStream_t stream);

}  // namespace gla_ext::cuda::sm90
