// The work of one worker in chunk_gla: the steps in order, over a sequence or one chunk.
#pragma once

#include "steps/chunk_states.h"
#include "steps/intra_grads.h"
#include "steps/merge_grads.h"
#include "steps/output.h"
#include "steps/score_grads.h"
#include "steps/scores.h"
#include "steps/state_grads.h"
#include "steps/value_gates.h"
#include "steps/value_grads.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
Tiles<T> tiles(const Problem<T>& p, T* workspace) {
  Tiles<T> t;
  t.carve(workspace, p.K, p.V, p.gv.data != nullptr);
  return t;
}

template <typename T>
void make_all_gates(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  make_gates(p, chunk, t.gates);
  if (t.value_gated) make_value_gates(p, chunk, t.gates, t.values.gates);
}

// Steps 3, 4 and 5 of a chunk. Its gates, queries, keys and values are loaded, and t.S is the state
// that enters it.
template <typename T>
void forward_loaded(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  scores(p, t);
  entering_state(p, t);
  if (t.value_gated)
    gated_output(p, t);
  else
    output(p, t);
  store_rows(p.o, chunk, p.V, t.o, t.Vp);
}

template <typename T>
void load_forward(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  make_all_gates(p, chunk, t);
  load_queries(p, chunk, t);
  load_keys(p, chunk, t);
  load_values(p, chunk, t);
}

// Copies a [K, V] tile from or to the matrix of (sequence, head) in one of h0, ht, dht, dh0, which
// may be absent.
template <typename T>
void load_boundary(const Problem<T>& p, const T* states, int64_t n, int64_t head, const Tiles<T>& t,
                   T* tile) {
  const T* matrix = states == nullptr ? nullptr : states + (n * p.H + head) * p.K * p.V;
  load_state(tile, t.Vp, matrix, kAccumulated<T>, p.state_v_first, p.K, p.V, t.row_scale);
}

template <typename T>
void store_boundary(const Problem<T>& p, T* states, int64_t n, int64_t head, const Tiles<T>& t,
                    const T* tile) {
  if (states == nullptr) return;
  store_state(states + (n * p.H + head) * p.K * p.V, kAccumulated<T>, p.state_v_first, p.K, p.V,
              tile, t.Vp, t.row_scale);
}

// Stores a checkpoint after chunk number n, if one is made there.
template <typename T>
void store_checkpoint(const Problem<T>& p, const Sequence& sequence, int64_t n, int64_t head,
                      const Tiles<T>& t) {
  if (p.checkpoint_chunks == 0 || (n + 1) % p.checkpoint_chunks != 0) return;
  if ((n + 1) * kChunk > sequence.length) return;
  const int64_t number = p.first_checkpoint[sequence.n] + (n + 1) / p.checkpoint_chunks - 1;
  store_boundary(p, p.checkpoints, number, head, t, t.S);
}

template <typename T>
void forward_sweep(const Problem<T>& p, T* workspace, const Sequence& sequence, int64_t head) {
  Tiles<T> t = tiles(p, workspace);
  load_boundary(p, p.h0, sequence.n, head, t, t.S);
  for (int64_t n = 0; n < sequence.chunks(); ++n) {
    const Chunk chunk = p.chunk(sequence, n, head);
    load_forward(p, chunk, t);
    forward_loaded(p, chunk, t);
    chunk_states(t);
    store_checkpoint(p, sequence, n, head, t);
  }
  store_boundary(p, p.ht, sequence.n, head, t, t.S);
}

template <typename T>
void state_pass(const Problem<T>& p, T* workspace, const Sequence& sequence, int64_t head) {
  Tiles<T> t = tiles(p, workspace);
  load_boundary(p, p.h0, sequence.n, head, t, t.S);
  for (int64_t n = 0; n < sequence.chunks(); ++n) {
    const Chunk chunk = p.chunk(sequence, n, head);
    store_chunk_state(p, chunk.state, t);
    make_all_gates(p, chunk, t);
    load_keys(p, chunk, t);
    load_values(p, chunk, t);
    chunk_states(t);
    store_checkpoint(p, sequence, n, head, t);
  }
  store_boundary(p, p.ht, sequence.n, head, t, t.S);
}

template <typename T>
void forward_chunk(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  load_chunk_state(p, chunk.state, t);
  load_forward(p, chunk, t);
  forward_loaded(p, chunk, t);
}

template <typename T>
void store_key_grads(const Problem<T>& p, const Chunk& chunk, const Tiles<T>& t) {
  store_rows(p.dq, chunk, p.K, t.dq, t.Kp);
  store_rows(p.dk, chunk, p.K, t.dk, t.Kp);
  if (!t.gates.absent) store_rows(p.dg, chunk, p.K, t.dg, t.Kp);
}

// Steps 4 to 7 of a chunk that is loaded. t.S is the state that enters it, t.dS the gradient of the
// state that leaves it. A is computed by forward steps 3 and 4.
template <typename T>
void backward_loaded(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  entering_state(p, t);
  leaving_state_grad(p, t);
  scores(p, t);
  if (t.value_gated) {
    gated_score_grads(p, t);
    gated_value_grads(p, t);
    store_rows(p.dgv, chunk, p.V, t.values.dgv, t.Vp);
  } else {
    value_grads(t);
    score_grads(p, t);
  }
  store_rows(p.dv, chunk, p.V, t.o, t.Vp);
  intra_grads(p, t);
  merge_grads(p, t);
  store_key_grads(p, chunk, t);
}

template <typename T>
void load_backward(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  load_forward(p, chunk, t);
  load_output_grads(p, chunk, t);
  load_chunk_state(p, chunk.state, t);
}

// Stores the states, behind the tiles, then sweeps backward.
template <typename T>
void backward_sweep(const Problem<T>& problem, T* workspace, const Sequence& sequence,
                    int64_t head) {
  Problem<T> p = problem;
  Tiles<T> t;
  T* behind = workspace + t.carve(workspace, p.K, p.V, p.gv.data != nullptr);
  p.S = behind;
  p.S_is_local = true;
  state_pass(p, workspace, sequence, head);
  load_boundary(p, p.dht, sequence.n, head, t, t.dS);
  for (int64_t n = sequence.chunks() - 1; n >= 0; --n) {
    const Chunk chunk = p.chunk(sequence, n, head);
    load_backward(p, chunk, t);
    backward_loaded(p, chunk, t);
    state_grads(p, t);
  }
  store_boundary(p, p.dh0, sequence.n, head, t, t.dS);
}

template <typename T>
void state_grad_pass(const Problem<T>& p, T* workspace, const Sequence& sequence, int64_t head) {
  Tiles<T> t = tiles(p, workspace);
  load_boundary(p, p.dht, sequence.n, head, t, t.dS);
  for (int64_t n = sequence.chunks() - 1; n >= 0; --n) {
    const Chunk chunk = p.chunk(sequence, n, head);
    store_chunk_state_grad(p, chunk.state, t);
    make_all_gates(p, chunk, t);
    load_queries(p, chunk, t);
    load_output_grads(p, chunk, t);
    state_grads(p, t);
  }
  store_boundary(p, p.dh0, sequence.n, head, t, t.dS);
}

template <typename T>
void backward_chunk(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  load_chunk_state_grad(p, chunk.state, t);
  load_backward(p, chunk, t);
  backward_loaded(p, chunk, t);
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
