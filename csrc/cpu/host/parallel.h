// Tasks over at::parallel_for's workers. Results do not depend on which worker takes which task.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gla_ext::cpu {

// Strong gates make thousands of decays below 2^-126, and denormal operands cost a hundred cycles
// each on x86-64. There they are flushed to 0 within a task.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// Calls body(workspace, task) for every task. Workers take the next task when they are done, so
// uneven tasks balance.
template <typename T, typename Body>
void for_each_task(int64_t tasks, int64_t workspace_elements, const Body& body) {
  const int64_t workers = std::min<int64_t>(tasks, at::get_num_threads());
  std::atomic<int64_t> next{0};
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    const FlushDenormals flush;
    const at::DataPtr memory = c10::GetCPUAllocator()->allocate(workspace_elements * sizeof(T));
    T* workspace = static_cast<T*>(memory.get());
    for (int64_t task = next++; task < tasks; task = next++) body(workspace, task);
  });
}

}  // namespace gla_ext::cpu
