// The steps that chunk_gla never runs alone, as separate operators. They read their inputs from
// memory and write the intermediate result to memory. (Steps 2 and backward 3 are chunk_gla's own
// passes over the states.)
#pragma once

#include "cpu/kernels.h"
#include "cpu/kernels/tasks.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
void gate_cumsum_step(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  load_gates(p, chunk, t.gates);
  cumsum(t.gates, range_limit(p));
  store_rows(p.b, chunk, p.K, t.gates.b, t.Kp);
}

template <typename T>
void load_scores(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  make_gates(p, chunk, t.gates);
  load_queries(p, chunk, t);
  load_keys(p, chunk, t);
  begin_scores(p, t);
}

template <typename T>
void scores_off_diagonal_step(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  load_scores(p, chunk, t);
  scores_off_diagonal(p, t);
  store_rows(p.A, chunk, kChunk, t.A, kChunk);
}

template <typename T>
void scores_diagonal_step(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  load_scores(p, chunk, t);
  scores_diagonal(p, t);
  for (int64_t i = 0; i < chunk.length; ++i)  // the diagonal block's columns move to the front
    std::memmove(t.A + i * kChunk, t.A + i * kChunk + i / kSubChunk * kSubChunk,
                 kSubChunk * sizeof(T));
  store_rows(p.A_diagonal, chunk, kSubChunk, t.A, kChunk);
}

// t.A <- A + A_diagonal, as an operand.
template <typename T>
void load_all_scores(const Problem<T>& p, const Chunk& chunk, Tiles<T>& t) {
  load_rows(t.A, kChunk, p.A, chunk, kChunk);
  load_rows(t.dA, kSubChunk, p.A_diagonal, chunk, kSubChunk);
  for (int64_t i = 0; i < chunk.length; ++i)
    std::memcpy(t.A + i * kChunk + i / kSubChunk * kSubChunk, t.dA + i * kSubChunk,
                kSubChunk * sizeof(T));
  if (p.round_operands) round_to_bf16(t.A, chunk.length * kChunk);
}

template <typename T>
void output_step(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  make_gates(p, chunk, t.gates);
  load_queries(p, chunk, t);
  load_rows(t.v, t.Vp, p.v, chunk, p.V);
  load_all_scores(p, chunk, t);
  load_chunk_state(p, chunk.state, t);
  entering_state(p, t);
  output(p, t);
  store_rows(p.o, chunk, p.V, t.o, t.Vp);
}

template <typename T>
void value_grads_step(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  make_gates(p, chunk, t.gates);
  load_keys(p, chunk, t);
  load_rows(t.d_o, t.Vp, p.d_o, chunk, p.V);
  load_all_scores(p, chunk, t);
  load_chunk_state_grad(p, chunk.state, t);
  leaving_state_grad(p, t);
  value_grads(t);
  store_rows(p.dv, chunk, p.V, t.o, t.Vp);
}

template <typename T>
void score_grads_step(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  t.gates.length = chunk.length;
  load_rows(t.v, t.Vp, p.v, chunk, p.V);
  load_rows(t.d_o, t.Vp, p.d_o, chunk, p.V);
  score_grads(p, t);
  store_rows(p.dA, chunk, kChunk, t.dA, kChunk);
}

template <typename T>
void intra_grads_step(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  make_gates(p, chunk, t.gates);
  load_queries(p, chunk, t);
  load_keys(p, chunk, t);
  load_rows(t.dA, kChunk, p.dA, chunk, kChunk);
  intra_grads(p, t);
  fill(t.total, t.Kp, T(0));
  fill(t.R, t.gates.size(), T(0));
  gate_grads(t);
  store_key_grads(p, chunk, t);
}

template <typename T>
void merge_grads_step(const Problem<T>& p, T* workspace, const Chunk& chunk) {
  Tiles<T> t = tiles(p, workspace);
  load_chunk_state_grad(p, chunk.state, t);
  load_backward(p, chunk, t);
  entering_state(p, t);
  leaving_state_grad(p, t);
  load_rows(t.dq, t.Kp, p.dq_intra, chunk, p.K);
  load_rows(t.dk, t.Kp, p.dk_intra, chunk, p.K);
  fill(t.dg, t.gates.size(), T(0));
  merge_grads(p, t);
  load_rows(t.P, t.Kp, p.dg_intra, chunk, p.K);
  map<T>(t.gates.size(), [](Vec<T> x, Vec<T> y) { return x + y; }, t.dg, t.dg, t.P);
  store_key_grads(p, chunk, t);
}

// The table of one capability; see cpu/kernels.h.
template <typename T>
int64_t workspace_size(int64_t K, int64_t V, bool value_gated) {
  return Tiles<T>{}.carve(nullptr, K, V, value_gated);
}

template <typename T>
constexpr Kernels<T> make_kernels() {
  return {workspace_size<T>,       forward_sweep<T>,    backward_sweep<T>,
          state_pass<T>,           state_grad_pass<T>,  forward_chunk<T>,
          backward_chunk<T>,       gate_cumsum_step<T>, scores_off_diagonal_step<T>,
          scores_diagonal_step<T>, output_step<T>,      value_grads_step<T>,
          score_grads_step<T>,     intra_grads_step<T>, merge_grads_step<T>};
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
