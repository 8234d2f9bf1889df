// The recurrence on CPU: the kernels' inputs besides a Problem, and how the host calls them.
#pragma once

#include <type_traits>

#include "cpu/host/params.h"

namespace gla_ext::cpu {

// A run of the recurrence for one head: `length` tokens of batch row `row` from token `start`, and
// the states before and after them. Absent states are null. Sums are accumulated in T; the states
// of a pool may be stored in a shorter dtype.
template <typename T>
struct Run {
  int64_t row, start, length, head;
  const void* state_in = nullptr;  // [K, V]
  void* state_out = nullptr;       // [K, V], may be state_in
  const T* dstate_out = nullptr;   // [K, V]
  T* dstate_in = nullptr;          // [K, V]
  DType state_dtype = std::is_same_v<T, double> ? DType::kDouble : DType::kFloat;
};

// A row's new tokens, which are the last of its slot's buffer, and all tokens of the buffer, with
// the state that they go on from.
template <typename T>
struct BufferedRun {
  Run<T> drafts, buffer;
};

template <typename T>
struct RecurrentKernels {
  using Task = void (*)(const Problem<T>&, T* workspace, const Run<T>&);
  int64_t (*workspace)(int64_t K, int64_t V, int64_t tokens, bool backward);  // elements
  Task forward;   // q k v g gv state_in -> o state_out
  Task backward;  // do dstate_out q k v g gv state_in -> dq dk dv dg dgv dstate_in
  int64_t (*buffered_workspace)(int64_t K, int64_t V, int64_t drafts, int64_t tokens);  // elements
  // q of the drafts, k v g of the buffer, state_in -> o of the drafts
  void (*buffered)(const Problem<T>&, T* workspace, const BufferedRun<T>&);
};

}  // namespace gla_ext::cpu
