// Grids, and the global memory that they work on.
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>

#include "machine.h"

namespace emulator {

namespace {

const char* environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

}  // namespace

void run(const Launch& launch) {
  static std::atomic<uint64_t> launches{0};
  const uint64_t number = launches++;
  const bool hazards = std::string_view(environment("GLA_EMULATOR_HAZARDS", "1")) != "0";
  const uint64_t seed = std::strtoull(environment("GLA_EMULATOR_SEED", "0"), nullptr, 10);
  const uint64_t blocks = launch.grid.count();
  if (blocks % launch.cluster != 0)
    throw Fault(launch.kernel->name + ": the grid is no multiple of the cluster");
  Cluster cluster(launch, {seed * 1000003 + number, hazards});
  for (uint64_t first = 0; first < blocks; first += launch.cluster) cluster.run(first);
  if (const char* report = std::getenv("GLA_EMULATOR_REPORT"); report != nullptr)
    std::ofstream(report, std::ios::app)
        << launch.kernel->name << ": " << blocks << " blocks of " << launch.block.count()
        << " threads, " << cluster.instructions / static_cast<double>(blocks)
        << " instructions of warps a block\n";
}

namespace {

std::mutex allocations_mutex;
std::map<uintptr_t, size_t> allocations;  // where each starts, and its bytes

}  // namespace

void add_allocation(void* p, size_t bytes) {
  const std::lock_guard lock(allocations_mutex);
  allocations[reinterpret_cast<uintptr_t>(p)] = bytes;
}
bool remove_allocation(void* p) {
  const std::lock_guard lock(allocations_mutex);
  return allocations.erase(reinterpret_cast<uintptr_t>(p)) > 0;
}
size_t allocation_bytes(const void* p) {
  const std::lock_guard lock(allocations_mutex);
  const auto at = allocations.find(reinterpret_cast<uintptr_t>(p));
  return at == allocations.end() ? 0 : at->second;
}

void check_global(const Warp& warp, const void* p, size_t bytes) {
  // Nothing is freed while a kernel runs, but between kernels it may be.
  static thread_local uintptr_t start = 0, end = 0;
  static thread_local const Warp* last = nullptr;
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (last == &warp && address >= start && address + bytes <= end) return;
  const std::lock_guard lock(allocations_mutex);
  auto at = allocations.upper_bound(address);
  if (at == allocations.begin() || address + bytes > (--at)->first + at->second)
    warp.fail("global memory at " + std::to_string(address) + " is nobody's");
  start = at->first;
  end = at->first + at->second;
  last = &warp;
}

}  // namespace emulator
