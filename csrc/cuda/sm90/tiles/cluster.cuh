// Access to the shared memory and barriers of other blocks of the cluster.
#pragma once

#include "ptx.cuh"

namespace gla_ext::cuda::sm90 {

// Signals that this thread has finished the writes that other blocks of the cluster will read after
// `wait_for_cluster`.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Waits until all threads of the cluster have arrived. Their earlier writes to shared memory are
// then visible.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}
// Makes the barriers that this thread has initialized visible to the cluster. Call before
// `sync_cluster`.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The address, in block `rank` of the cluster, of the object that `p` points to in this block.
__device__ __forceinline__ uint32_t address_in(const void* p, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  return address;
}
// Stores to shared memory of any block of the cluster, which must have started.
__device__ __forceinline__ void store_in_cluster(uint32_t to, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}
// Stores four numbers; `to` must be a multiple of 16 bytes.
__device__ __forceinline__ void store_in_cluster(uint32_t to, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}
// Arrives at a barrier of any block of the cluster. The scope is the default one, as in CUTLASS:
// data between blocks moves by bulk copies, and release.cluster would wait for all stores to
// memory.
__device__ __forceinline__ void arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the barrier's phase also wait for `bytes`.
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Copies `bytes`, a multiple of 16, from this block's shared memory to that of any block of the
// cluster. Called by one thread. `barrier` is in the same block as `to` and counts the bytes.
__device__ __forceinline__ void bulk_send(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(shared_address(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace gla_ext::cuda::sm90
