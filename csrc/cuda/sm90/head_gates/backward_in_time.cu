// The sweeps of sweep.cuh that go from the last chunk to the first: the gradients of k, v and the
// initial state.
#include "head_gates.h"
#include "sweep.cuh"

namespace gla_ext::cuda::sm90 {
namespace head_gates {

// Here the sweep's state is dS transposed.
template <bool kMakesDots>
void launch_key_grads(const Problem& p, cudaStream_t stream) {
  Problem roles = p;
  roles.q = p.v;
  roles.k = p.d_o;
  roles.v = p.q;
  roles.o = p.dk;
  roles.d_o = p.k;  // w of sweep.cuh
  roles.K = p.V;
  roles.V = p.K;
  roles.state_v_first = !p.state_v_first;
  roles.h0 = p.dht;
  roles.ht = nullptr;
  roles.segment_states = p.segment_state_grads;
  launch_sweep<Time::kBackward, kMakesDots>(roles, /*transposed=*/true, stream);
}

}  // namespace head_gates

void launch_head_gate_key_grads(const Problem& p, cudaStream_t stream) {
  head_gates::launch_key_grads<false>(p, stream);
}

void launch_head_gate_key_grads_and_dots(const Problem& p, cudaStream_t stream) {
  head_gates::launch_key_grads<true>(p, stream);
}

void launch_head_gate_value_grads(const Problem& p, cudaStream_t stream) {
  Problem roles = p;
  roles.q = p.k;
  roles.k = p.q;
  roles.v = p.d_o;
  roles.o = p.dv;
  roles.h0 = p.dht;
  roles.ht = p.dh0;
  roles.segment_states = p.segment_state_grads;
  head_gates::launch_sweep<head_gates::Time::kBackward, false>(roles, /*transposed=*/false, stream);
}

}  // namespace gla_ext::cuda::sm90
