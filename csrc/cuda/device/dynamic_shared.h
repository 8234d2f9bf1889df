// The limits of a multiprocessor, and shared memory beyond 48 KiB, which must be enabled for a
// kernel on each device.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace gla_ext::cuda {

// Bytes that a block may have on every GPU since 8.0; 8.0 itself has 163 KiB, 9.0 and 10.0 227.
constexpr size_t kSharedOfEveryGpu = 99 << 10;

// Whether a multiprocessor can hold `blocks` blocks with `bytes` of shared memory each.
constexpr bool fits_multiprocessor(size_t blocks, size_t bytes) {
  constexpr size_t kSharedMemory = 228 << 10, kReserved = 1 << 10;  // kReserved: of each block
  return blocks * (bytes + kReserved) <= kSharedMemory;
}
// Registers that a thread starts with if `threads` threads share those of a multiprocessor.
constexpr int launch_registers(int threads) { return 65536 / threads / 8 * 8; }

class DynamicShared {
 public:
  template <class Kernel>
  DynamicShared(Kernel kernel, size_t bytes)
      : kernel_(reinterpret_cast<const void*>(kernel)), bytes_(static_cast<int>(bytes)) {}

  // Enables the shared memory on the current device. An error is left to the following launch.
  void allow() const {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return;
    std::atomic<bool>& allowed = allowed_[static_cast<size_t>(device) % allowed_.size()];
    if (allowed.load(std::memory_order_relaxed)) return;
    if (cudaFuncSetAttribute(kernel_, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes_) ==
        cudaSuccess)
      allowed.store(true, std::memory_order_relaxed);
  }

 private:
  const void* kernel_;
  int bytes_;
  mutable std::array<std::atomic<bool>, 64> allowed_{};
};

}  // namespace gla_ext::cuda
