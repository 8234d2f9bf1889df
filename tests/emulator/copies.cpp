// Copies beside other work: of lanes (cp.async), and in bulk.
#include "lanes.h"

namespace emulator {
namespace {

// cp.async [shared], [global], 16, bytes that are read
Outcome copy_lanes(Warp& w, const Instruction& i, uint32_t lanes) {
  LaneCopies c{LaneCopies::kCopy, lanes, false, {}, {}, {}, w.clocks};
  for_lanes(lanes, [&](int lane) {
    const auto to = static_cast<uint32_t>(value(w, i.operands[0], lane));
    const auto* from = reinterpret_cast<const uint8_t*>(value(w, i.operands[1], lane));
    const uint64_t size = value(w, i.operands[2], lane);
    const uint64_t bytes = i.operands.size() > 3 ? value(w, i.operands[3], lane) : size;
    if (size != 16 || bytes > 16) w.fail("the emulator knows copies of 16 bytes alone");
    if (to % 16 != 0) w.fail("a copy's place is no multiple of 16");
    if (bytes > 0) {
      if (reinterpret_cast<uint64_t>(from) % 16 != 0)
        w.fail("a copy's source is no multiple of 16");
      check_global(w, from, bytes);
    }
    std::memset(w.block().shared(w, to, 16), 0xff, 16);
    if (w.cluster().checks_hazards()) w.check(w.block().hazards.begin_copy(to, 16, w.clocks));
    c.shared[lane] = to;
    c.global[lane] = from;
    c.bytes[lane] = static_cast<uint8_t>(bytes);
  });
  w.copies.push_back(c);
  return Outcome::kNext;
}

Outcome commit_lane_copies(Warp& w, const Instruction&, uint32_t lanes) {
  w.copies.push_back({LaneCopies::kCommit, lanes, true, {}, {}, {}, {}});
  for_lanes(lanes, [&](int lane) { ++w.pending_copies[lane]; });
  return Outcome::kNext;
}

Outcome wait_for_lane_copies(Warp& w, const Instruction& i, uint32_t lanes) {
  const int most = i.flags == 0 ? static_cast<int>(uniform(w, i.operands[0], lanes)) : 0;
  for_lanes(lanes, [&](int lane) {
    while (w.pending_copies[lane] > most) retire_oldest_copies(w);
  });
  while (i.flags != 0 && !w.copies.empty()) retire_oldest_copies(w);  // wait_all
  return Outcome::kNext;
}

Outcome arrive_behind_lane_copies(Warp& w, const Instruction& i, uint32_t lanes) {
  LaneCopies c{LaneCopies::kArrive, lanes, false, {}, {}, {}, w.snapshot()};
  for_lanes(lanes, [&](int lane) {
    c.shared[lane] = static_cast<uint32_t>(address_of(w, i, 0, lane));
    w.block().barrier(&w, c.shared[lane]);
  });
  w.copies.push_back(c);
  return Outcome::kNext;
}

void check_bulk(Warp& w, uint64_t a, uint64_t b, uint64_t bytes) {
  if (bytes == 0 || a % 16 != 0 || b % 16 != 0 || bytes % 16 != 0)
    w.fail("a bulk copy's places or bytes are no multiples of 16");
}

// [shared of a block of the cluster], [global or shared], bytes, [barrier]
template <bool kFromGlobal>
Outcome copy_bulk(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    auto to = static_cast<uint32_t>(value(w, i.operands[0], lane));
    const uint64_t from = value(w, i.operands[1], lane);
    const auto bytes = static_cast<uint32_t>(value(w, i.operands[2], lane));
    auto barrier = static_cast<uint32_t>(value(w, i.operands[3], lane));
    Block& target = w.cluster().block_of(w, to);
    if (&w.cluster().block_of(w, barrier) != &target)
      w.fail("a bulk copy's barrier is not of the block that it goes to");
    check_bulk(w, to, from, bytes);
    target.barrier(&w, barrier);
    BulkCopy c{nullptr, &w.block(), &target, 0, to, bytes, barrier, w.snapshot(), w.id()};
    if (kFromGlobal) {
      c.global = reinterpret_cast<const uint8_t*>(from);
      check_global(w, c.global, bytes);
    } else {
      c.from_shared = static_cast<uint32_t>(from);
      w.block().shared(w, c.from_shared, bytes);
    }
    std::memset(target.shared(w, to, bytes), 0xff, bytes);
    if (w.cluster().checks_hazards()) w.check(target.hazards.begin_copy(to, bytes, c.issued));
    w.cluster().copy_later(c);
  });
  return Outcome::kNext;
}

Outcome store_bulk(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    auto* to = reinterpret_cast<uint8_t*>(value(w, i.operands[0], lane));
    const auto from = static_cast<uint32_t>(value(w, i.operands[1], lane));
    const auto bytes = static_cast<uint32_t>(value(w, i.operands[2], lane));
    check_bulk(w, reinterpret_cast<uint64_t>(to), from, bytes);
    check_global(w, to, bytes, /*writes=*/true);
    w.block().shared(w, from, bytes);
    w.stores.push_back({false, false, from, bytes, to, w.clocks});
  });
  return Outcome::kNext;
}
Outcome commit_bulk_stores(Warp& w, const Instruction&, uint32_t) {
  w.stores.push_back({true, true, 0, 0, nullptr, {}});
  ++w.pending_stores;
  return Outcome::kNext;
}
Outcome wait_for_bulk_stores(Warp& w, const Instruction& i, uint32_t lanes) {
  const int most = static_cast<int>(uniform(w, i.operands[0], lanes));
  while (w.pending_stores > most) retire_oldest_store(w);
  return Outcome::kNext;
}

}  // namespace

Execute decode_copy(const Words& words, Instruction& i) {
  if (words[0] != "cp" || words[1] != "async") return nullptr;
  if (words[2] == "bulk") {
    if (words[3] == "commit_group") return commit_bulk_stores;
    if (words[3] == "wait_group") return wait_for_bulk_stores;
    if (words[3] == "global") return store_bulk;
    if (words[3] == "shared" && words[5] == "global") return copy_bulk<true>;
    if (words[3] == "shared" && words[5] == "shared") return copy_bulk<false>;
    return nullptr;
  }
  if (words[2] == "cg" || words[2] == "ca") return copy_lanes;
  if (words[2] == "commit_group") return commit_lane_copies;
  if (words[2] == "wait_group" || words[2] == "wait_all") {
    i.flags = words[2] == "wait_all";
    return wait_for_lane_copies;
  }
  if (words[2] == "mbarrier" && has(words, "noinc")) return arrive_behind_lane_copies;
  return nullptr;
}

}  // namespace emulator
