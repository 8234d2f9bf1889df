// What a warp has on its way: copies of lanes, and bulk stores.
#include <algorithm>

#include "lanes.h"

namespace emulator {

void perform(Warp& warp, LaneCopies& c) {
  if (c.done || c.kind != LaneCopies::kCopy) return;
  c.done = true;
  for_lanes(c.lanes, [&](int lane) {
    uint8_t* to = warp.block().shared(warp, c.shared[lane], 16);
    std::memset(to, 0, 16);
    if (c.bytes[lane] > 0) std::memcpy(to, c.global[lane], c.bytes[lane]);
  });
}

void retire_oldest_copies(Warp& warp) {
  LaneCopies& c = warp.copies.front();
  Block& block = warp.block();
  switch (c.kind) {
    case LaneCopies::kCopy:
      perform(warp, c);
      if (block.cluster().checks_hazards())
        for_lanes(c.lanes, [&](int lane) {
          block.hazards.end_copy(c.shared[lane], 16, Epoch::of(warp.id(), c.issued[warp.id()]),
                                 warp.id());
        });
      break;
    case LaneCopies::kCommit:
      for_lanes(c.lanes, [&](int lane) { --warp.pending_copies[lane]; });
      break;
    case LaneCopies::kArrive:
      for_lanes(c.lanes,
                [&](int lane) { block.arrive(block.barrier(&warp, c.shared[lane]), c.issued, 1); });
  }
  warp.copies.pop_front();
}

void perform(Warp& warp, BulkStore& s) {
  if (s.done || s.commit) return;
  s.done = true;
  std::memcpy(s.global, warp.block().shared(warp, s.shared, s.bytes), s.bytes);
}

void retire_oldest_store(Warp& warp) {
  BulkStore& s = warp.stores.front();
  if (s.commit) {
    --warp.pending_stores;
  } else {
    perform(warp, s);
    if (warp.cluster().checks_hazards())
      warp.check(
          warp.block().hazards.read_asynchronously(s.shared, s.bytes, warp.id(), s.issued,
                                                   Epoch::of(warp.id(), warp.clocks[warp.id()])),
          "a bulk store asked for before: ");
  }
  warp.stores.pop_front();
}

bool arrive_behind_copies(Warp& warp) {
  const auto arrival = std::find_if(warp.copies.begin(), warp.copies.end(),
                                    [](const auto& c) { return c.kind == LaneCopies::kArrive; });
  if (arrival == warp.copies.end()) return false;
  for (auto n = arrival - warp.copies.begin(); n >= 0; --n) retire_oldest_copies(warp);
  return true;
}

}  // namespace emulator
