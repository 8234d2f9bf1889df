// A block: its warps, its shared memory, and the barriers there.
#include <algorithm>

#include "machine.h"

namespace emulator {

Block::Block(Cluster* cluster, const Launch& launch, int rank)
    : cluster_(cluster), launch_(launch), rank_(rank) {
  memory_.resize(launch.shared_bytes());
}

void Block::start(Dim index) {
  index_ = index;
  std::fill(memory_.begin(), memory_.end(), 0xff);  // NaN in every type
  barriers_.clear();
  named = {};
  waits = releases_early = false;
  const int count = static_cast<int>(launch_.warps());
  warps.clear();
  for (int i = 0; i < count; ++i)
    warps.push_back(std::make_unique<Warp>(this, i, rank_ * count + i));
}

uint8_t* Block::shared(const Warp& warp, uint32_t address, uint32_t bytes) {
  if (address < kSharedBase || address - kSharedBase + bytes > memory_.size())
    warp.fail("shared memory of " + std::to_string(memory_.size()) + " bytes has no " +
              std::to_string(bytes) + " at " + std::to_string(int64_t{address} - kSharedBase));
  return memory_.data() + (address - kSharedBase);
}

uint32_t Block::live_threads() const {
  uint32_t count = 0;
  for (const auto& warp : warps)
    if (!warp->exited()) count += kLanes;
  return count;
}

void Block::init_barrier(const Warp& warp, uint32_t address, uint32_t arrivals) {
  shared(warp, address, 8);
  MemoryBarrier b;
  b.expected = b.pending = arrivals;
  b.agent = cluster_->take_agent();
  barriers_[address] = b;
}

MemoryBarrier& Block::barrier(const Warp* warp, uint32_t address) {
  const auto at = barriers_.find(address);
  if (at != barriers_.end()) return at->second;
  const std::string what =
      "no barrier was made at shared byte " + std::to_string(int64_t{address} - kSharedBase);
  if (warp != nullptr) warp->fail(what);
  throw Fault(launch_.kernel->name + ": " + what);
}

std::string Block::describe_barriers() const {
  std::string text;
  for (const auto& [address, b] : barriers_)
    text += "\n  block " + std::to_string(index_.x) + ", barrier at shared byte " +
            std::to_string(address - kSharedBase) + ": phase " + std::to_string(b.phase) +
            ", waits for " + std::to_string(b.pending) + " of " + std::to_string(b.expected) +
            " arrivals and " + std::to_string(b.bytes) + " bytes";
  return text;
}

void Block::advance(MemoryBarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.released[b.phase & 1] = b.arriving;
  ++b.phase;
  b.pending = b.expected;
}

void Block::arrive(MemoryBarrier& b, const Clocks& clocks, int64_t arrivals) {
  b.arriving.join(clocks);
  b.pending -= arrivals;
  if (b.pending < 0)
    throw Fault(launch_.kernel->name + ": more arrivals at a barrier in shared memory than the " +
                std::to_string(b.expected) + " of its phase");
  advance(b);
}

void Block::complete_bytes(MemoryBarrier& b, int64_t bytes) {
  b.bytes -= bytes;
  advance(b);
}

void NamedBarrier::release() {
  released = arriving;
  arriving = {};
  arrived = 0;
  result = any;
  any = false;
  ++phase;
}

}  // namespace emulator
