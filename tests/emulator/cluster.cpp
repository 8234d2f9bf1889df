// The blocks of a cluster, whose warps run in an order of chance.
#include <algorithm>

#include "machine.h"

namespace emulator {

Cluster::Cluster(const Launch& launch, const Options& options)
    : runs_of(launch.kernel->code.size()),
      launch_(launch),
      options_(options),
      random_(options.seed) {
  if (launch.cluster * launch.warps() > Clocks::kWarps)
    throw Fault("the emulator has clocks for 64 warps of a cluster alone");
  for (uint32_t rank = 0; rank < launch.cluster; ++rank)
    blocks_.push_back(std::make_unique<Block>(this, launch, static_cast<int>(rank)));
}

Block& Cluster::block_of(Warp& warp, uint32_t& address) {
  const uint32_t rank = address >> 24;
  address &= 0xffffff;
  if (rank == 0) return warp.block();
  if (rank > blocks_.size()) warp.fail("no such block in the cluster");
  return *blocks_[rank - 1];
}

int Cluster::take_agent() {
  // Beyond that many, barriers share clocks, which only hides what is out of order.
  return Clocks::kWarps + agents_++ % (Clocks::kCount - Clocks::kWarps);
}

void Cluster::try_advance() {
  uint32_t live = 0;
  for (const auto& block : blocks_) {
    live += block->live_threads();
    for (NamedBarrier& b : block->named)
      if (b.waits_for_all && b.arrived > 0 && b.arrived == block->live_threads()) b.release();
  }
  if (arrived > 0 && arrived == live) {
    released = arriving;
    arriving = {};
    arrived = 0;
    ++phase;
  }
}

void Cluster::complete(const BulkCopy& copy) {
  static thread_local std::vector<uint8_t> bytes;
  Warp& warp =
      *blocks_[copy.warp / blocks_[0]->warps.size()]->warps[copy.warp % blocks_[0]->warps.size()];
  MemoryBarrier& b = copy.to->barrier(&warp, copy.barrier);
  const Epoch epoch = Epoch::of(b.agent, ++b.arriving[b.agent]);
  b.arriving.join(copy.issued);
  bytes.resize(copy.bytes);
  if (copy.global != nullptr) {
    std::memcpy(bytes.data(), copy.global, copy.bytes);
  } else {
    std::memcpy(bytes.data(), copy.from->shared(warp, copy.from_shared, copy.bytes), copy.bytes);
    if (options_.hazards)
      warp.check(copy.from->hazards.read_asynchronously(copy.from_shared, copy.bytes, copy.warp,
                                                        copy.issued, epoch),
                 "a bulk copy asked for before: ");
  }
  std::memcpy(copy.to->shared(warp, copy.to_shared, copy.bytes), bytes.data(), copy.bytes);
  if (options_.hazards) copy.to->hazards.end_copy(copy.to_shared, copy.bytes, epoch, -1);
  copy.to->complete_bytes(b, copy.bytes);
}

// Lets something that is on its way arrive, perhaps; whether anybody may wait for it.
bool Cluster::move_something() {
  bool arrived = !bulk_copies_.empty();
  if (arrived) {
    const size_t n = random_() % bulk_copies_.size();
    const BulkCopy copy = bulk_copies_[n];
    bulk_copies_.erase(bulk_copies_.begin() + static_cast<std::ptrdiff_t>(n));
    complete(copy);
  }
  for (const auto& block : blocks_)
    for (const auto& warp : block->warps) {
      if (random_() % 4 == 0) arrived |= arrive_behind_copies(*warp);
      if (random_() % 4 == 0)
        for (LaneCopies& c : warp->copies) perform(*warp, c);
      if (random_() % 4 == 0)
        for (BulkStore& s : warp->stores) perform(*warp, s);
    }
  return arrived;
}

// What must arrive for anybody to go on; false: nothing is on its way.
bool Cluster::force_something() {
  if (!bulk_copies_.empty()) return move_something();
  for (const auto& block : blocks_)
    for (const auto& warp : block->warps)
      if (arrive_behind_copies(*warp)) return true;
  return false;
}

void Cluster::report_deadlock() const {
  std::string text = launch_.kernel->name + ": all wait for ever";
  for (const auto& block : blocks_)
    for (const auto& warp : block->warps)
      if (!warp->exited()) text += "\n  " + warp->where();
  for (const auto& block : blocks_) text += block->describe_barriers();
  throw Fault(text);
}

void Cluster::run(uint64_t first) {
  agents_ = 0;
  fences = {};
  arrived = 0;
  phase = 0;
  arriving = released = {};
  waits.clear();
  bulk_copies_.clear();
  std::vector<Warp*> waiting;
  for (size_t rank = 0; rank < blocks_.size(); ++rank) {
    const uint64_t index = first + rank;
    const Dim& grid = launch_.grid;
    blocks_[rank]->start({static_cast<uint32_t>(index % grid.x),
                          static_cast<uint32_t>(index / grid.x % grid.y),
                          static_cast<uint32_t>(index / grid.x / grid.y)});
    if (options_.hazards) blocks_[rank]->hazards.reset(launch_.shared_bytes(), &fences);
    for (const auto& warp : blocks_[rank]->warps) waiting.push_back(warp.get());
  }
  while (!waiting.empty()) {
    bool ran = false;
    // Some warps run far ahead of others, in another order every time.
    std::shuffle(waiting.begin(), waiting.end(), random_);
    for (Warp* warp : waiting) {
      ran |= warp->run(1 + static_cast<int>(random_() % 256));
      if (random_() % 8 == 0) ran |= move_something();
    }
    std::erase_if(waiting, [](const Warp* w) { return w->exited(); });
    if (!ran && !waiting.empty() && !force_something()) report_deadlock();
  }
  finish();
}

// What must be done when a block ends.
void Cluster::finish() {
  if (!bulk_copies_.empty())
    throw Fault(launch_.kernel->name + ": a block ends while bulk copies are on their way to it");
  for (const auto& block : blocks_) {
    all_release_early &= block->releases_early || !block->waits;
    any_waits |= block->waits;
    for (const auto& warp : block->warps) {
      if (!warp->products.empty())
        throw Fault(launch_.kernel->name + ": a warp ends without waiting for its products");
      if (!warp->stores.empty())
        throw Fault(launch_.kernel->name +
                    ": a warp ends without waiting for its bulk stores to read shared memory");
    }
  }
}

}  // namespace emulator
