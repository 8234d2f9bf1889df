// Grids, and the global memory that they work on.
#include <algorithm>
#include <atomic>
#include <bitset>
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

// Bytes of global memory.
class Bytes {
 public:
  void add(uintptr_t first, size_t bytes) {
    for_pages(first, bytes, [&](uintptr_t page, size_t from, size_t end) {
      auto& found = pages_[page];
      for (size_t i = from; i < end; ++i) found.set(i);
    });
  }
  void remove(uintptr_t first, size_t bytes) {
    if (pages_.empty()) return;
    for_pages(first, bytes, [&](uintptr_t page, size_t from, size_t end) {
      const auto found = pages_.find(page);
      for (size_t i = from; found != pages_.end() && i < end; ++i) found->second.reset(i);
    });
  }
  bool has_any(uintptr_t first, size_t bytes) const {
    bool has = false;
    for_pages(first, bytes, [&](uintptr_t page, size_t from, size_t end) {
      const auto found = pages_.find(page);
      for (size_t i = from; found != pages_.end() && i < end; ++i) has |= found->second[i];
    });
    return has;
  }
  void add(const Bytes& others) {
    for (const auto& [page, found] : others.pages_) pages_[page] |= found;
  }
  void clear() { pages_.clear(); }

 private:
  static constexpr size_t kPage = 4096;
  template <class F>
  static void for_pages(uintptr_t first, size_t bytes, F&& f) {
    for (const uintptr_t end = first + bytes; first < end; first = (first / kPage + 1) * kPage)
      f(first / kPage, first % kPage, std::min<size_t>(kPage, first % kPage + (end - first)));
  }
  std::unordered_map<uintptr_t, std::bitset<kPage>> pages_;
};

// Of a stream: what its last kernel has written, and what earlier ones have that may still run
// while a kernel does that overlaps. Before it waits that may not read it, nor write anything, as
// those kernels may read that. What others than kernels of gla_ext write is not seen.
struct Written {
  Bytes by_last, by_earlier;
  bool earlier_may_run = false;

  void begin(bool overlaps) {
    if (!overlaps || !earlier_may_run) by_earlier.clear();
    if (overlaps) by_earlier.add(by_last);
    by_last.clear();
  }
};
std::map<const void*, Written> streams;
Written* written = nullptr;  // of the launch that runs

std::mutex allocations_mutex;
std::map<uintptr_t, size_t> allocations;                 // where each starts, and its bytes
std::vector<std::pair<uintptr_t, size_t>> since_launch;  // those made since the last one

void begin_writing(const Launch& launch) {
  const std::lock_guard lock(allocations_mutex);
  for (auto& [stream, w] : streams)
    for (const auto& [first, bytes] : since_launch)
      w.by_last.remove(first, bytes), w.by_earlier.remove(first, bytes);
  since_launch.clear();
  written = &streams[launch.stream];
  written->begin(launch.overlaps);
}

}  // namespace

bool has_waited(Warp& warp) {
  const auto& waits = warp.cluster().waits;
  return std::any_of(waits.begin(), waits.end(),
                     [&](const Epoch& wait) { return wait.before(warp.clocks); });
}

void run(const Launch& launch) {
  static std::atomic<uint64_t> launches{0};
  const uint64_t number = launches++;
  const bool hazards = std::string_view(environment("GLA_EMULATOR_HAZARDS", "1")) != "0";
  const uint64_t seed = std::strtoull(environment("GLA_EMULATOR_SEED", "0"), nullptr, 10);
  const uint64_t blocks = launch.grid.count();
  if (blocks % launch.cluster != 0)
    throw Fault(launch.kernel->name + ": the grid is no multiple of the cluster");
  Cluster cluster(launch, {seed * 1000003 + number, hazards});
  begin_writing(launch);
  for (uint64_t first = 0; first < blocks; first += launch.cluster) cluster.run(first);
  if (launch.overlaps && !cluster.any_waits)
    throw Fault(launch.kernel->name + ": no block waits for the kernel before");
  written->earlier_may_run = launch.overlaps && cluster.all_release_early;
  report(cluster, launch);
}

void add_allocation(void* p, size_t bytes) {
  const std::lock_guard lock(allocations_mutex);
  const auto address = reinterpret_cast<uintptr_t>(p);
  allocations[address] = bytes;
  since_launch.emplace_back(address, bytes);
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

void check_global(Warp& warp, const void* p, size_t bytes, bool writes) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (warp.block().launch().overlaps && !has_waited(warp)) {
    if (writes) warp.fail("global memory is written before the kernel before is waited for");
    if (written->by_earlier.has_any(address, bytes))
      warp.fail("global memory is read that a kernel before writes, which is not waited for");
  }
  if (writes) written->by_last.add(address, bytes);
  // Nothing is freed while a kernel runs, but between kernels it may be.
  static thread_local uintptr_t start = 0, end = 0;
  static thread_local const Warp* last = nullptr;
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
