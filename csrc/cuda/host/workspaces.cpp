#include "workspaces.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <iterator>
#include <mutex>
#include <tuple>

namespace gla_ext::cuda {

void drop_workspaces(void* stream) {
  // This allocator cannot free what was allocated in a capture before the graph runs.
  if (c10::cuda::CUDACachingAllocator::name() == "cudaMallocAsync") return;
  for (auto* kept : {&at::cuda::cublas_handle_stream_to_workspace(),
                     &at::cuda::cublaslt_handle_stream_to_workspace()}) {
    const std::unique_lock lock(kept->mutex);
    for (auto item = kept->map.begin(); item != kept->map.end();) {
      item = std::get<1>(item->first) == stream ? kept->map.erase(item) : std::next(item);
    }
  }
}

}  // namespace gla_ext::cuda
