// The kernels as the host side calls them: each launches on `stream` and returns at once. Problems
// without tokens, heads or sequences launch nothing.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace gla_ext::cuda {

// cu_seqlens -> grid.sequences, grid.chunk_slots; packed only.
void chunk_map(const Problem& p, cudaStream_t stream);

// g -> b, and b_suffix and tiers where they are there.
void gate_cumsum(const Problem& p, cudaStream_t stream);
// b -> tiers, for steps that are given b alone.
void chunk_tiers(const Problem& p, cudaStream_t stream);

// k v b (b_suffix) h0 -> S, and ht where it is there.
void chunk_states(const Problem& p, cudaStream_t stream);
// q k b tiers (g) -> A off the diagonal; of whole scores, tier 1's diagonal too.
void scores_off_diagonal(const Problem& p, cudaStream_t stream);
// q k b (tiers, g) -> A_diagonal; of whole scores, the diagonal blocks of A outside tier 1.
void scores_diagonal(const Problem& p, cudaStream_t stream);
// q v b A (A_diagonal) S -> o
void output(const Problem& p, cudaStream_t stream);

// q do b dht -> dS, and dh0 where it is there.
void state_grads(const Problem& p, cudaStream_t stream);
// chunk_states and state_grads side by side.
void states_and_state_grads(const Problem& p, cudaStream_t stream);
// k do b (b_suffix) A (A_diagonal) dS -> dv
void value_grads(const Problem& p, cudaStream_t stream);
// do v -> dA
void score_grads(const Problem& p, cudaStream_t stream);
// q k b tiers (g) dA -> dq_intra, dk_intra, dg_intra
void intra_grads(const Problem& p, cudaStream_t stream);
// q k v do b (b_suffix, g) S dS and step 6's outputs -> dq, dk, dg
void merge_grads(const Problem& p, cudaStream_t stream);

}  // namespace gla_ext::cuda
