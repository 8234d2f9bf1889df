// The CPU kernels as the host side sees them: one table a capability (DEFAULT, AVX2, AVX512) and
// accumulation type.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/params.h"

namespace gla_ext::cpu {

// Every task works on its own workspace of `workspace_size(K, V, value_gated)` elements, 64-byte
// aligned. `backward_sweep` needs room for the sequence's states after it: chunks * K * V elements
// more.
template <typename T>
struct Kernels {
  using SequenceTask = void (*)(const Problem<T>&, T* workspace, const Sequence&, int64_t head);
  using RunTask = void (*)(const Problem<T>&, T* workspace, const Run<T>&);
  using ChunkTask = void (*)(const Problem<T>&, T* workspace, const Chunk&);

  int64_t (*workspace_size)(int64_t K, int64_t V, bool value_gated);

  // The two modes: one sweep a (sequence, head), or states first and then every chunk by itself.
  // g and gv may be absent, and then there is no dg or dgv.
  SequenceTask forward_sweep;    // q k v g gv h0 -> o ht
  SequenceTask backward_sweep;   // do dht q k v g gv h0 -> dq dk dv dg dgv dh0
  SequenceTask state_pass;       // k v g|b gv h0 -> S ht
  SequenceTask state_grad_pass;  // q do g|b gv dht -> dS dh0
  ChunkTask forward_chunk;       // q k v g gv S -> o
  ChunkTask backward_chunk;      // do q k v g gv S dS -> dq dk dv dg dgv

  // The other steps, alone.
  ChunkTask gate_cumsum;          // g -> b
  ChunkTask scores_off_diagonal;  // q k b -> A
  ChunkTask scores_diagonal;      // q k b -> A_diagonal
  ChunkTask output;               // q v b A A_diagonal S -> o
  ChunkTask value_grads;          // k do b A A_diagonal dS -> dv
  ChunkTask score_grads;          // do v -> dA
  ChunkTask intra_grads;          // q k b dA -> dq dk dg
  ChunkTask merge_grads;          // q k v do b S dS dq_intra dk_intra dg_intra -> dq dk dg

  // The recurrence, token by token, on a workspace of its own.
  int64_t (*recurrent_workspace)(int64_t K, int64_t V, int64_t tokens, bool backward);
  RunTask recurrent_forward;   // q k v g gv state_in -> o state_out
  RunTask recurrent_backward;  // do dstate_out q k v g gv state_in -> dq dk dv dg dgv dstate_in
};

// The table for the processor at hand; follows torch's own choice (ATEN_CPU_CAPABILITY).
template <typename T>
const Kernels<T>& kernels();

std::string capability_in_use();
std::vector<std::string> capabilities_built();

// An operator's tables, each of functions that are compiled for one capability: its
// cpu_kernels.cpp, which is compiled for each, has
//   template <>
//   const SwigluKernels<float> KernelTables<SwigluKernels<float>>::CPU_CAPABILITY = {…};
template <class Table>
struct KernelTables {
  static const Table DEFAULT;
#if defined(__x86_64__)
  static const Table AVX2, AVX512;
#endif

  // The one for the processor at hand.
  static const Table& in_use() {
#if defined(__x86_64__)
    static const std::string capability = capability_in_use();
    if (capability == "AVX512") return AVX512;
    if (capability == "AVX2") return AVX2;
#endif
    return DEFAULT;
  }
};

// One definition a capability, in kernels/float.cpp and kernels/double.cpp.
namespace DEFAULT {
extern const Kernels<float> float_kernels;
extern const Kernels<double> double_kernels;
}  // namespace DEFAULT
#if defined(__x86_64__)
namespace AVX2 {
extern const Kernels<float> float_kernels;
extern const Kernels<double> double_kernels;
}  // namespace AVX2
namespace AVX512 {
extern const Kernels<float> float_kernels;
extern const Kernels<double> double_kernels;
}  // namespace AVX512
#endif

}  // namespace gla_ext::cpu
