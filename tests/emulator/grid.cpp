// Grids, and the global memory that they work on.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <numeric>

#include "machine.h"

namespace emulator {

const char* environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

namespace {

// Adds to a file, by the environment, what a launch has run: a line for all of it, or one for every
// instruction, the most frequent first.
void report(const Cluster& cluster, const Launch& launch) {
  const uint64_t blocks = launch.grid.count();
  const auto a_block = [&](uint64_t count) { return static_cast<double>(count) / blocks; };
  const char* name = environment("GLA_EMULATOR_REPORT", "");
  if (*name != 0)
    std::ofstream(name, std::ios::app)
        << launch.kernel->name << ": " << blocks << " blocks of " << launch.block.count()
        << " threads, " << a_block(cluster.instructions) << " instructions of warps a block\n";
  name = environment("GLA_EMULATOR_PROFILE", "");
  if (*name == 0) return;
  std::ofstream file(name, std::ios::app);
  file << launch.kernel->name << "\n";
  std::vector<size_t> order(cluster.runs_of.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return cluster.runs_of[a] > cluster.runs_of[b]; });
  for (const size_t n : order) {
    const Instruction& i = launch.kernel->code[n];
    if (cluster.runs_of[n] > 0)
      file << a_block(cluster.runs_of[n]) << " a block, line " << i.line << ": " << i.text << "\n";
  }
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
  report(cluster, launch);
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
