// The CPU kernels of chunk_gla and of its steps, as the host calls them.
#pragma once

#include <cstdint>

#include "host/params.h"
#include "kernel_tables.h"

namespace gla_ext::cpu {

// Every task has its own workspace of `workspace_size(K, V, value_gated)` elements, 64-byte
// aligned. For `backward_sweep` it is followed by room for the sequence's states: chunks * K * V
// elements.
template <typename T>
struct Kernels {
  using SequenceTask = void (*)(const Problem<T>&, T* workspace, const Sequence&, int64_t head);
  using ChunkTask = void (*)(const Problem<T>&, T* workspace, const Chunk&);

  int64_t (*workspace_size)(int64_t K, int64_t V, bool value_gated);

  // The two modes: one sweep per (sequence, head), or first all states and then each chunk on its
  // own. g and gv may be absent; then there is no dg or dgv.
  SequenceTask forward_sweep;    // q k v g gv h0 -> o ht
  SequenceTask backward_sweep;   // do dht q k v g gv h0 -> dq dk dv dg dgv dh0
  SequenceTask state_pass;       // k v g|b gv h0 -> S ht
  SequenceTask state_grad_pass;  // q do g|b gv dht -> dS dh0
  ChunkTask forward_chunk;       // q k v g gv S -> o
  ChunkTask backward_chunk;      // do q k v g gv S dS -> dq dk dv dg dgv

  // The other steps, each on its own.
  ChunkTask gate_cumsum;          // g -> b
  ChunkTask scores_off_diagonal;  // q k b -> A
  ChunkTask scores_diagonal;      // q k b -> A_diagonal
  ChunkTask output;               // q v b A A_diagonal S -> o
  ChunkTask value_grads;          // k do b A A_diagonal dS -> dv
  ChunkTask score_grads;          // do v -> dA
  ChunkTask intra_grads;          // q k b dA -> dq dk dg
  ChunkTask merge_grads;          // q k v do b S dS dq_intra dk_intra dg_intra -> dq dk dg
};

// The table for this processor.
template <typename T>
const Kernels<T>& kernels() {
  return KernelTables<Kernels<T>>::in_use();
}

}  // namespace gla_ext::cpu
