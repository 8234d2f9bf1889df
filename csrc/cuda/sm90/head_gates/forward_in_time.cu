// The sweeps of sweep.cuh that go from the first chunk to the last: o, and the gradient of q.
#include "head_gates.h"
#include "sweep.cuh"

namespace gla_ext::cuda::sm90 {
namespace head_gates {

// Here the sweep's state is that of forward, transposed.
template <bool kMakesDots>
void launch_query_grads(const Problem& p, cudaStream_t stream) {
  Problem roles = p;
  roles.q = p.d_o;
  roles.k = p.v;
  roles.v = p.k;
  roles.o = p.dq;
  roles.d_o = p.q;  // w of sweep.cuh
  roles.K = p.V;
  roles.V = p.K;
  roles.state_v_first = !p.state_v_first;
  roles.ht = nullptr;
  launch_sweep<Time::kForward, kMakesDots>(roles, /*transposed=*/true, stream);
}

}  // namespace head_gates

void launch_head_gate_forward(const Problem& p, cudaStream_t stream) {
  head_gates::launch_sweep<head_gates::Time::kForward, false>(p, /*transposed=*/false, stream);
}

void launch_head_gate_query_grads(const Problem& p, cudaStream_t stream) {
  head_gates::launch_query_grads<false>(p, stream);
}

void launch_head_gate_query_grads_and_dots(const Problem& p, cudaStream_t stream) {
  head_gates::launch_query_grads<true>(p, stream);
}

}  // namespace gla_ext::cuda::sm90
