// Barriers, fences, and what lanes of a warp tell each other.
#include "lanes.h"

namespace emulator {
namespace {

// --- of some threads of a block, by number

constexpr uint32_t kReduces = 1;

Outcome sync_threads(Warp& w, const Instruction& i, uint32_t lanes) {
  const size_t first = i.flags & kReduces ? 1 : 0;  // bar.red has a result
  if (!w.converged()) return Outcome::kBlocked;
  Group& g = w.group();
  NamedBarrier& b = w.block().named.at(uniform(w, i.operands[first], lanes));
  if (!g.waiting) {
    const bool all = i.operands.size() <= first + 1 || (i.flags & kReduces) != 0;
    g.phase = b.phase;
    g.waiting = true;
    b.waits_for_all = all;
    b.expected = all ? 0 : static_cast<uint32_t>(uniform(w, i.operands[first + 1], lanes));
    if (i.flags & kReduces) b.any = b.any || (w.read_predicate(i.operands[first + 1]) & lanes) != 0;
    b.arriving.join(w.snapshot());
    b.arrived += kLanes;
    if (!all && b.arrived > b.expected) w.fail("more threads at a barrier than it waits for");
    if (b.arrived == (all ? w.block().live_threads() : b.expected)) b.release();
  }
  if (b.phase == g.phase) return Outcome::kBlocked;
  g.waiting = false;
  w.clocks.join(b.released);
  if (i.flags & kReduces) w.set_predicate(i.operands[0], b.result ? kAllLanes : 0, lanes);
  return Outcome::kNext;
}

// --- of the cluster

Outcome arrive_at_cluster(Warp& w, const Instruction&, uint32_t) {
  if (!w.converged()) return Outcome::kBlocked;
  Cluster& c = w.cluster();
  w.cluster_phase = c.phase;
  c.arriving.join(w.snapshot());
  c.arrived += kLanes;
  c.try_advance();
  return Outcome::kNext;
}
Outcome wait_for_cluster(Warp& w, const Instruction&, uint32_t) {
  if (!w.converged() || w.cluster().phase == w.cluster_phase) return Outcome::kBlocked;
  w.clocks.join(w.cluster().released);
  return Outcome::kNext;
}

// --- of the stream's kernels

Outcome wait_for_last_kernel(Warp& w, const Instruction&, uint32_t) {
  w.block().waits = true;
  w.cluster().waits.push_back(Epoch::of(w.id(), w.snapshot()[w.id()]));
  return Outcome::kNext;
}
Outcome release_next_kernel(Warp& w, const Instruction&, uint32_t) {
  w.block().releases_early |= !has_waited(w);
  return Outcome::kNext;
}

// --- in shared memory

uint32_t barrier_address(Warp& w, const Instruction& i, size_t operand, int lane) {
  return static_cast<uint32_t>(address_of(w, i, operand, lane));
}

Outcome init_barrier(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    w.block().init_barrier(w, barrier_address(w, i, 0, lane),
                           static_cast<uint32_t>(value(w, i.operands[1], lane)));
  });
  return Outcome::kNext;
}

// Arrives, and lets the phase wait for bytes if there is a third operand.
Outcome arrive(Warp& w, const Instruction& i, uint32_t lanes) {
  const Clocks now = w.snapshot();
  for_lanes(lanes, [&](int lane) {
    uint32_t address = barrier_address(w, i, 1, lane);
    Block& block = w.cluster().block_of(w, address);
    MemoryBarrier& b = block.barrier(&w, address);
    if (i.operands.size() > 2) b.bytes += static_cast<int64_t>(value(w, i.operands[2], lane));
    block.arrive(b, now, 1);
  });
  return Outcome::kNext;
}

bool has_passed(Warp& w, const Instruction& i, uint32_t lanes) {
  bool done = true;
  for_lanes(lanes, [&](int lane) {
    const MemoryBarrier& b = w.block().barrier(&w, barrier_address(w, i, 1, lane));
    done = done && (b.phase & 1) != (value(w, i.operands[2], lane) & 1);
  });
  if (!done) return false;
  for_lanes(lanes, [&](int lane) {
    const MemoryBarrier& b = w.block().barrier(&w, barrier_address(w, i, 1, lane));
    if (b.phase > 0) w.clocks.join(b.released[(b.phase - 1) & 1]);
  });
  return true;
}
Outcome wait(Warp& w, const Instruction& i, uint32_t lanes) {
  if (!has_passed(w, i, lanes)) return Outcome::kBlocked;
  w.set_predicate(i.operands[0], kAllLanes, lanes);
  return Outcome::kNext;
}
// All lanes wait for the same barrier.
Outcome test_wait(Warp& w, const Instruction& i, uint32_t lanes) {
  w.set_predicate(i.operands[0], has_passed(w, i, lanes) ? kAllLanes : 0, lanes);
  return Outcome::kNext;
}

Outcome map_address(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    w.lanes<uint32_t>(i.operands[0])[lane] =
        static_cast<uint32_t>(value(w, i.operands[1], lane)) |
        static_cast<uint32_t>(value(w, i.operands[2], lane) + 1) << 24;
  });
  return Outcome::kNext;
}

// --- fences

Outcome fence_for_async_proxy(Warp& w, const Instruction&, uint32_t) {
  Fences& fences = w.cluster().fences;
  fences.at[w.id()] = fences.now++;
  return Outcome::kNext;
}

// --- lanes of a warp

bool are_here(Warp& w, uint32_t members) { return (w.group().lanes & members) == members; }

Outcome sync_warp(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto members = static_cast<uint32_t>(uniform(w, i.operands[0], lanes));
  return are_here(w, members & w.live_lanes()) ? Outcome::kNext : Outcome::kBlocked;
}

Outcome vote_any(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto members = static_cast<uint32_t>(uniform(w, i.operands[2], lanes));
  if (!are_here(w, members)) return Outcome::kBlocked;
  const bool any = (w.read_predicate(i.operands[1]) & members) != 0;
  w.set_predicate(i.operands[0], any ? kAllLanes : 0, lanes);
  return Outcome::kNext;
}
Outcome ballot(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto members = static_cast<uint32_t>(uniform(w, i.operands[2], lanes));
  if (!are_here(w, members)) return Outcome::kBlocked;
  const uint32_t bits = w.read_predicate(i.operands[1]) & members;
  for_lanes(lanes, [&](int lane) { w.lanes<uint32_t>(i.operands[0])[lane] = bits; });
  return Outcome::kNext;
}

enum Shuffle : uint32_t { kUp, kButterfly, kIndex };

// d, (p,) a, by or lane, clamp and segment, members
Outcome shuffle(Warp& w, const Instruction& i, uint32_t lanes) {
  const bool has_predicate = i.operands.size() == 6;
  const size_t first = has_predicate ? 2 : 1;
  const auto members = static_cast<uint32_t>(uniform(w, i.operands[first + 3], lanes));
  if (!are_here(w, members & w.live_lanes())) return Outcome::kBlocked;
  uint32_t source[kLanes], inside = 0;
  const uint32_t* a = w.lanes<uint32_t>(i.operands[first]);
  for_lanes(lanes, [&](int lane) {
    const auto by = static_cast<uint32_t>(value(w, i.operands[first + 1], lane)) & 0x1f;
    const auto c = static_cast<uint32_t>(value(w, i.operands[first + 2], lane));
    const uint32_t segment = c >> 8 & 0x1f, clamp = c & 0x1f;
    const uint32_t most = (static_cast<uint32_t>(lane) & segment) | (clamp & ~segment);
    const uint32_t least = static_cast<uint32_t>(lane) & segment;
    const auto me = static_cast<int>(lane);
    int from = 0;
    bool in = false;
    switch (i.flags) {
      case kUp:
        from = me - static_cast<int>(by);
        in = from >= static_cast<int>(most);
        break;
      case kButterfly:
        from = me ^ static_cast<int>(by);
        in = from <= static_cast<int>(most);
        break;
      default:
        from = static_cast<int>(least | (by & ~segment));
        in = from <= static_cast<int>(most);
    }
    if (!in) from = me;
    if (!(members >> from & 1)) w.fail("a lane takes a value of one that is not a member");
    source[lane] = a[from];
    inside |= uint32_t{in} << lane;
  });
  keep(w.lanes<uint32_t>(i.operands[0]), source, lanes);
  if (has_predicate) w.set_predicate(i.operands[1], inside, lanes);
  return Outcome::kNext;
}

}  // namespace

Execute decode_sync(const Words& words, Instruction& i) {
  const std::string& op = words[0];
  if (op == "bar" && words[1] == "warp") return sync_warp;
  if (op == "bar" && words[1] == "sync") return sync_threads;
  if (op == "bar" && words[1] == "red" && words[2] == "or") {
    i.flags = kReduces;
    return sync_threads;
  }
  if (op == "barrier" && words[1] == "cluster")
    return words[2] == "arrive" ? arrive_at_cluster
           : words[2] == "wait" ? wait_for_cluster
                                : nullptr;
  if (op == "mbarrier") {
    if (words[1] == "init") return init_barrier;
    if (words[1] == "arrive") return arrive;
    if (words[1] == "try_wait" && words[2] == "parity") return wait;
    if (words[1] == "test_wait" && words[2] == "parity") return test_wait;
    return nullptr;
  }
  if (op == "mapa") return map_address;
  if (op == "fence" && words[1] == "proxy" && words[2] == "async") return fence_for_async_proxy;
  if (op == "griddepcontrol")
    return words[1] == "wait" ? wait_for_last_kernel : release_next_kernel;
  // These do nothing here. The emulator delays only what other instructions wait for, and it does
  // not count registers.
  if (op == "fence" || op == "setmaxnreg") return nothing;
  if (op == "vote") {
    if (words[2] == "any") return vote_any;
    if (words[2] == "ballot") return ballot;
    return nullptr;
  }
  if (op == "shfl") {
    const std::string& how = words[2];
    i.flags = how == "up" ? kUp : how == "bfly" ? kButterfly : kIndex;
    return how == "down" ? nullptr : shuffle;
  }
  return nullptr;
}

}  // namespace emulator
