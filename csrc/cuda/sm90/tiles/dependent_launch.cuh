// Programmatic dependent launch: a kernel's blocks become resident while the last blocks of the
// previous kernel still work, and wait there until that kernel is done.
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
// Waits until the previous kernel is done and its writes can be read.
__device__ __forceinline__ void await_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The first call of every block of a kernel that `launch_dependent` launches, even of a block
// without work: if all blocks ended without it, the next kernel could start before the previous one
// is done.
__device__ __forceinline__ void wait_for_previous_kernel() {
  release_next_kernel();
  await_previous_kernel();
}
// Used in place of `wait_for_previous_kernel` by the scan of segments, with the order of the two
// calls reversed. Blocks of the next kernel then start when everything before the scan is done, and
// may read those results at once. A block that reads results of the scan itself must wait for the
// scan (await_previous_kernel).
__device__ __forceinline__ void wait_before_next_kernel() {
  await_previous_kernel();
  release_next_kernel();
}
// The first call of a sweep; `scanned`: the sweep follows the scan, because segments have
// summaries. A block that has only tokens after the last sequence may then end without waiting for
// the scan, since other blocks of the grid wait, at least those of first segments.
__device__ __forceinline__ void wait_for_all_but_scan(bool scanned) {
  if (scanned)
    release_next_kernel();
  else
    wait_for_previous_kernel();
}

// kCluster: blocks per cluster; `blocks` is a multiple of it. overlaps: whether the kernel may
// start before the previous one is done.
template <int kCluster, class... Parameters, class... Arguments>
void launch_clusters_of(bool overlaps, void (*kernel)(Parameters...), dim3 blocks, int threads,
                        size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = overlaps ? 1 : 0;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kCluster > 1 ? 2 : 1;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}
template <int kCluster = 1, class... Parameters, class... Arguments>
void launch_dependent(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared_bytes,
                      cudaStream_t stream, Arguments... arguments) {
  launch_clusters_of<kCluster>(/*overlaps=*/true, kernel, blocks, threads, shared_bytes, stream,
                               arguments...);
}

}  // namespace gla_ext::cuda::sm90
