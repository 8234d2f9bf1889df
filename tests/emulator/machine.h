// What runs a kernel: warps in blocks in clusters, their shared memory, and what is on its way.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "hazards.h"
#include "program.h"

namespace emulator {

struct Dim {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

struct Launch {
  const Kernel* kernel = nullptr;
  Dim grid, block;
  uint32_t cluster = 1;  // blocks, in x
  uint32_t dynamic_shared_bytes = 0;
  const void* stream = nullptr;
  bool overlaps = false;  // may start when all blocks of the stream's last kernel let it
  std::vector<uint8_t> parameters;

  uint32_t warps() const {  // of a block
    return static_cast<uint32_t>((block.count() + kLanes - 1) / kLanes);
  }
  uint32_t shared_bytes() const { return kernel->shared_bytes + dynamic_shared_bytes; }
};

class Block;
class Cluster;

// What is wrong with a kernel, as the instruction that shows it has it.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Lanes that are at the same instruction. `waiting`: they have arrived at a barrier.
struct Group {
  uint32_t pc, lanes;
  bool blocked = false, waiting = false;
  uint64_t phase = 0;  // of the barrier that they wait for
};

// Sixteen bytes a lane on their way from global to shared memory (cp.async), the end of a group of
// them, or an arrival behind them.
struct LaneCopies {
  enum Kind { kCopy, kCommit, kArrive } kind;
  uint32_t lanes;
  bool done;
  std::array<uint32_t, kLanes> shared;  // addresses; of barriers
  std::array<const uint8_t*, kLanes> global;
  std::array<uint8_t, kLanes> bytes;  // that are read, the rest is zero
  Clocks issued;                      // when it was asked for
};

// From shared to global memory (cp.async.bulk), or the end of a group of these.
struct BulkStore {
  bool commit, done;
  uint32_t shared, bytes;
  uint8_t* global;
  Clocks issued;
};

// From global memory or a block's shared memory to that of a block, which a barrier counts.
struct BulkCopy {
  const uint8_t* global;  // nullptr: from shared memory
  Block* from;
  Block* to;
  uint32_t from_shared, to_shared, bytes, barrier;
  Clocks issued;
  int warp;  // that asked for it
};

// What a warpgroup's product reads of shared memory until it is waited for.
struct ProductReads {
  bool commit;
  std::vector<uint32_t> addresses;  // of 16 bytes each
  Clocks issued;
};

class Warp {
 public:
  Warp(Block* block, int index, int id);

  // Runs at most so many instructions; false: it has run none, for it waits.
  bool run(int instructions);
  bool exited() const { return groups_.empty(); }
  uint32_t live_lanes() const { return live_; }

  template <class T>
  T* lanes(const Operand& x) {
    return reinterpret_cast<T*>((x.kind == Operand::kConstant ? constants_ : registers_.data()) +
                                x.place);
  }
  uint32_t& predicate(const Operand& x) { return *lanes<uint32_t>(x); }
  uint32_t read_predicate(const Operand& x) {
    const uint32_t bits = predicate(x);
    return x.negated ? ~bits : bits;
  }
  void set_predicate(const Operand& x, uint32_t bits, uint32_t lanes) {
    if (x.kind == Operand::kNone) return;
    uint32_t& p = predicate(x);
    p = (p & ~lanes) | (bits & lanes);
  }

  Block& block() { return *block_; }
  Cluster& cluster();
  Group& group() { return groups_[current_]; }
  int index() const { return index_; }
  int id() const { return id_; }  // in the cluster, of its clock
  // Whether all lanes that have not exited are at this instruction.
  bool converged() { return group().lanes == live_; }
  [[noreturn]] void fail(const std::string& what) const;
  // A hazard, if there is one, of this instruction or of what was asked for before.
  void check(const std::string& hazard, const char* of = "") const {
    if (!hazard.empty()) fail(of + hazard);
  }
  std::string where() const;

  // Its clocks; what it does from now on is behind what it has done so far.
  Clocks snapshot() {
    const Clocks now = clocks;
    ++clocks[id_];
    return now;
  }

  Clocks clocks;
  std::deque<LaneCopies> copies;
  std::array<int, kLanes> pending_copies{};  // groups
  std::deque<BulkStore> stores;
  int pending_stores = 0;
  std::deque<ProductReads> products;
  int pending_products = 0;
  uint64_t cluster_phase = 0;  // that it arrived in

 private:
  void branch(const Instruction& i, uint32_t lanes);
  void settle();

  Block* block_;
  int index_, id_;
  std::vector<uint8_t> registers_;
  uint8_t* constants_;
  std::vector<Group> groups_;
  size_t current_ = 0;
  uint32_t live_ = kAllLanes;
};

// A barrier of some threads of a block, by number.
struct NamedBarrier {
  void release();

  uint32_t arrived = 0, expected = 0;
  bool waits_for_all = false;  // that have not exited
  uint64_t phase = 0;
  bool any = false, result = false;  // what arrivals reduce
  Clocks arriving, released;
};

// A barrier in shared memory (mbarrier).
struct MemoryBarrier {
  int64_t expected = 0, pending = 0, bytes = 0;
  uint64_t phase = 0;
  int agent = 0;  // whose clock copies take that it counts
  Clocks arriving;
  std::array<Clocks, 2> released;
};

class Block {
 public:
  Block(Cluster* cluster, const Launch& launch, int rank);
  void start(Dim index);

  // `bytes` at an address of shared memory. A fault: not within what the block has, or not aligned.
  uint8_t* shared(const Warp& warp, uint32_t address, uint32_t bytes);
  MemoryBarrier& barrier(const Warp* warp, uint32_t address);
  void init_barrier(const Warp& warp, uint32_t address, uint32_t arrivals);
  void arrive(MemoryBarrier& barrier, const Clocks& clocks, int64_t arrivals);
  void complete_bytes(MemoryBarrier& barrier, int64_t bytes);

  Cluster& cluster() { return *cluster_; }
  const Launch& launch() const { return launch_; }
  int rank() const { return rank_; }
  Dim index() const { return index_; }
  uint32_t live_threads() const;
  std::string describe_barriers() const;

  std::vector<std::unique_ptr<Warp>> warps;
  std::array<NamedBarrier, 16> named;
  Hazards hazards;
  // Of the stream's last kernel: whether a warp waits for it, and whether the next one may start
  // before that.
  bool waits = false, releases_early = false;

 private:
  void advance(MemoryBarrier& barrier);

  Cluster* cluster_;
  const Launch& launch_;
  int rank_;
  Dim index_;
  std::vector<uint8_t> memory_;
  std::unordered_map<uint32_t, MemoryBarrier> barriers_;
};

// What happens and how much of it; a run of the same seed is the same run.
struct Options {
  uint64_t seed = 0;
  bool hazards = true;
};

class Cluster {
 public:
  Cluster(const Launch& launch, const Options& options);
  // Runs the blocks from `first` of the grid on.
  void run(uint64_t first);

  Block& block(int rank) { return *blocks_[rank]; }
  int size() const { return static_cast<int>(blocks_.size()); }
  // Which block an address of the cluster's shared memory belongs to, and where there.
  Block& block_of(Warp& warp, uint32_t& address);
  int take_agent();  // a clock for a barrier's copies
  void copy_later(BulkCopy copy) { bulk_copies_.push_back(std::move(copy)); }
  bool checks_hazards() const { return options_.hazards; }

  // Of all warps that have not exited, to arrive at the cluster's barrier.
  uint32_t arrived = 0;
  uint64_t phase = 0;
  Clocks arriving, released;
  void try_advance();
  Fences fences;

  std::vector<Epoch> waits;       // for the stream's last kernel
  bool all_release_early = true;  // of all blocks so far
  bool any_waits = false;

  uint64_t instructions = 0;      // of warps, that have run
  std::vector<uint64_t> runs_of;  // each instruction of the kernel

 private:
  bool move_something();
  bool force_something();
  [[noreturn]] void report_deadlock() const;
  void finish();
  void complete(const BulkCopy& copy);

  const Launch& launch_;
  Options options_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<BulkCopy> bulk_copies_;
  int agents_ = 0;
};

// Moves what is on its way, and lets a warp's oldest count as arrived.
void perform(Warp& warp, LaneCopies& copies);
void retire_oldest_copies(Warp& warp);
bool arrive_behind_copies(Warp& warp);  // at the oldest barrier; false: at none
void perform(Warp& warp, BulkStore& store);
void retire_oldest_store(Warp& warp);

// A variable of the environment.
const char* environment(const char* name, const char* otherwise);

// Whether what the warp does now comes after a wait for the stream's last kernel, by it or another.
bool has_waited(Warp& warp);

// A whole grid, cluster after cluster. Throws Fault.
void run(const Launch& launch);

// Global memory, as the host has allocated it.
void add_allocation(void* p, size_t bytes);
bool remove_allocation(void* p);
size_t allocation_bytes(const void* p);  // 0: not the start of one
void check_global(Warp& warp, const void* p, size_t bytes, bool writes = false);

}  // namespace emulator
