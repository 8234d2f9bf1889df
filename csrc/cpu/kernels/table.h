// The table of one capability; see ../kernels.h.
#pragma once

#include "cpu/kernels.h"
#include "recurrent_gla.h"
#include "steps/tasks.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

template <typename T>
int64_t workspace_size(int64_t K, int64_t V, bool value_gated) {
  return Tiles<T>{}.carve(nullptr, K, V, value_gated);
}

template <typename T>
constexpr Kernels<T> make_kernels() {
  return {workspace_size<T>,
          forward_sweep<T>,
          backward_sweep<T>,
          state_pass<T>,
          state_grad_pass<T>,
          forward_chunk<T>,
          backward_chunk<T>,
          gate_cumsum_step<T>,
          scores_off_diagonal_step<T>,
          scores_diagonal_step<T>,
          output_step<T>,
          value_grads_step<T>,
          score_grads_step<T>,
          intra_grads_step<T>,
          merge_grads_step<T>,
          recurrent_workspace<T>,
          recurrent_forward<T>,
          recurrent_backward<T>};
}

}  // namespace CPU_CAPABILITY
}  // namespace gla_ext::cpu
