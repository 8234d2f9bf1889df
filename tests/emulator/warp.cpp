// Lanes that run one instruction at a time, together where they are at the same.
#include <algorithm>
#include <map>

#include "machine.h"

namespace emulator {

Warp::Warp(Block* block, int index, int id)
    : block_(block),
      index_(index),
      id_(id),
      registers_(block->launch().kernel->register_bytes),
      constants_(const_cast<uint8_t*>(block->launch().kernel->constants.data())) {
  const Launch& launch = block->launch();
  const uint32_t threads = static_cast<uint32_t>(launch.block.count());
  live_ = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    if (index * kLanes + lane < static_cast<int>(threads)) live_ |= 1u << lane;
  groups_.push_back({0, live_});
  clocks[id] = 1;
  const Dim at = block->index();
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t thread = index * kLanes + lane;
    const std::map<std::string, uint32_t> known{
        {"%tid.x", thread % launch.block.x},
        {"%tid.y", thread / launch.block.x % launch.block.y},
        {"%tid.z", thread / launch.block.x / launch.block.y},
        {"%ntid.x", launch.block.x},
        {"%ntid.y", launch.block.y},
        {"%ntid.z", launch.block.z},
        {"%ctaid.x", at.x},
        {"%ctaid.y", at.y},
        {"%ctaid.z", at.z},
        {"%nctaid.x", launch.grid.x},
        {"%nctaid.y", launch.grid.y},
        {"%nctaid.z", launch.grid.z},
        {"%laneid", lane},
        {"%cluster_ctarank", static_cast<uint32_t>(block->rank())},
    };
    for (const auto& [name, place] : launch.kernel->special) {
      const auto value = known.find(name);
      if (value == known.end()) throw Fault("the emulator does not know " + name);
      lanes<uint32_t>(place)[lane] = value->second;
    }
  }
}

Cluster& Warp::cluster() { return block_->cluster(); }

std::string Warp::where() const {
  const Dim at = block_->index();
  std::string text = "block " + std::to_string(at.x) + ", warp " + std::to_string(index_);
  if (exited()) return text + ": done";
  const Instruction& i = block_->launch().kernel->code[groups_[current_].pc];
  return text + ", line " + std::to_string(i.line) + " of its PTX: " + i.text.substr(0, 160);
}

void Warp::fail(const std::string& what) const {
  throw Fault(block_->launch().kernel->name + ", " + where() + ": " + what);
}

void Warp::branch(const Instruction& i, uint32_t lanes) {
  Group& g = groups_[current_];
  if (lanes == g.lanes) {
    g.pc = i.target;
    return;
  }
  g.lanes &= ~lanes;
  ++g.pc;
  groups_.push_back({i.target, lanes});
}

// Merges groups of lanes that are at the same instruction, except groups that have arrived at a
// barrier there. Then chooses the group that runs next: the one furthest behind that is not
// blocked, so that the lanes meet again.
void Warp::settle() {
  if (groups_.size() == 1) {
    current_ = 0;
    return;
  }
  std::sort(groups_.begin(), groups_.end(),
            [](const Group& a, const Group& b) { return a.pc < b.pc; });
  for (size_t n = 0; n + 1 < groups_.size();) {
    Group &a = groups_[n], &b = groups_[n + 1];
    if (a.pc == b.pc && !a.waiting && !b.waiting) {
      a.lanes |= b.lanes;
      a.blocked = false;
      groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(n) + 1);
    } else {
      ++n;
    }
  }
  current_ = 0;
  while (current_ + 1 < groups_.size() && groups_[current_].blocked) ++current_;
}

bool Warp::run(int instructions) {
  const auto& code = block_->launch().kernel->code;
  Cluster& cluster = block_->cluster();
  for (Group& g : groups_) g.blocked = false;
  settle();
  bool ran = false;
  while (instructions > 0 && !groups_.empty()) {
    Group& g = groups_[current_];
    if (g.blocked) return ran;
    const Instruction& i = code[g.pc];
    uint32_t lanes = g.lanes;
    if (i.guard.kind != Operand::kNone) lanes &= read_predicate(i.guard);
    if (lanes == 0) {
      ++g.pc;
    } else {
      switch (i.execute(*this, i, lanes)) {
        case Outcome::kNext:
          ++g.pc;
          break;
        case Outcome::kBranch:
          branch(i, lanes);
          break;
        case Outcome::kBlocked:
          if (lanes != g.lanes) fail("waits for some of the lanes that are here alone");
          g.blocked = true;
          settle();
          continue;
        case Outcome::kExit:
          live_ &= ~lanes;
          g.lanes &= ~lanes;
          ++g.pc;
          if (g.lanes == 0) groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(current_));
          if (groups_.empty()) cluster.try_advance();  // barriers may wait for fewer now
          break;
      }
    }
    ran = true;
    ++cluster.instructions;
    ++cluster.runs_of[&i - code.data()];
    --instructions;
    if (groups_.size() > 1) settle();
    if (groups_.size() == 1) current_ = 0;
  }
  return ran;
}

}  // namespace emulator
