// The sweeps of sweep.cuh from the first chunk to the last: o, and the gradient of q.
#include "head_gates.h"
#include "sweep.cuh"

namespace gla_ext::cuda::sm90 {

void launch_head_gate_forward(const Problem& p, cudaStream_t stream) {
  head_gates::launch_sweep<head_gates::Time::kForward>(p, /*transposed=*/false, stream);
}

// The state is that of forward, transposed.
void launch_head_gate_query_grads(const Problem& p, cudaStream_t stream) {
  Problem roles = p;
  roles.q = p.d_o;
  roles.k = p.v;
  roles.v = p.k;
  roles.o = p.dq;
  roles.K = p.V;
  roles.V = p.K;
  roles.state_v_first = !p.state_v_first;
  roles.ht = nullptr;
  head_gates::launch_sweep<head_gates::Time::kForward>(roles, /*transposed=*/true, stream);
}

}  // namespace gla_ext::cuda::sm90
