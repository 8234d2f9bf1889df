// The CUDA runtime's memory, which is the host's, filled with NaN so that nothing that was never
// written goes unseen.
#include <cuda_runtime_api.h>
#include <malloc.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "machine.h"

namespace {

// Freed memory, kept to be given out again at the same size: fresh pages cost more than all else.
class Memory {
 public:
  void* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    const size_t size = rounded(bytes);
    if (const auto at = unused_.find(size); at != unused_.end()) {
      void* p = at->second;
      unused_.erase(at);
      unused_bytes_ -= size;
      return p;
    }
    return std::aligned_alloc(kAlignment, size);
  }
  void give(void* p, size_t bytes) {
    const std::lock_guard lock(mutex_);
    const size_t size = rounded(bytes);
    if (unused_bytes_ + size > kMostUnused) return std::free(p);
    unused_.emplace(size, p);
    unused_bytes_ += size;
  }

 private:
  static constexpr size_t kAlignment = 512, kMostUnused = size_t{1} << 29;
  static size_t rounded(size_t bytes) { return (bytes / kAlignment + 1) * kAlignment; }

  std::mutex mutex_;
  std::multimap<size_t, void*> unused_;
  size_t unused_bytes_ = 0;
};
Memory memory;

// The same of what blocks of threads take and leave.
const bool keeps_pages = [] {
  mallopt(M_MMAP_THRESHOLD, 16 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  return true;
}();

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = memory.take(bytes);
  if (*p == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*p, 0xff, bytes);
  emulator::add_allocation(*p, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (p == nullptr) return cudaSuccess;
  const size_t bytes = emulator::allocation_bytes(p);
  if (!emulator::remove_allocation(p)) return cudaErrorInvalidValue;
  memory.give(p, bytes);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  *p = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* p) {
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  *unused = *total = size_t{16} << 30;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  std::memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(p, value, bytes);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  *attributes = {};
  attributes->type =
      emulator::allocation_bytes(p) > 0 ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(p);
  return cudaSuccess;
}

}  // extern "C"
