// Programmatic dependent launch: a kernel's blocks become resident while the last ones of the
// kernel before still work, and wait there until all of it is done.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gla_ext::cuda::sm90 {

// Lets blocks of the next kernel become resident.
__device__ __forceinline__ void release_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the kernel before is done and what it has written can be read.
__device__ __forceinline__ void await_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What every block of a kernel that `launch_dependent` launches does first, even a block without
// work: if all ended without it, the next kernel could start before the previous one is done.
__device__ __forceinline__ void wait_for_previous_kernel() {
  release_next_kernel();
  await_previous_kernel();
}
// The same in the scan of segments, in the other order: blocks of the next kernel start when
// everything before the scan is done, and may read that at once. Whoever reads what the scan writes
// waits for it (await_previous_kernel).
__device__ __forceinline__ void wait_before_next_kernel() {
  await_previous_kernel();
  release_next_kernel();
}
// In a sweep, which follows the scan if segments have summaries. A block that has only tokens after
// the last sequence may then end without waiting for the scan: other blocks of the grid wait, at
// least those of first segments.
__device__ __forceinline__ void wait_for_all_but_scan(bool scanned) {
  if (scanned)
    release_next_kernel();
  else
    wait_for_previous_kernel();
}

// kCluster: blocks of a cluster, of which `blocks` is a multiple. overlaps: whether the kernel may
// start before the one before is done.
template <int kCluster, class... Parameters, class... Arguments>
void launch_clusters_of(bool overlaps, void (*kernel)(Parameters...), int64_t blocks, int threads,
                        size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = overlaps ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kCluster > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}
template <int kCluster = 1, class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), int64_t blocks, int threads,
                      size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  launch_clusters_of<kCluster>(/*overlaps=*/true, kernel, blocks, threads, shared_bytes, stream,
                               arguments...);
}

}  // namespace gla_ext::cuda::sm90
