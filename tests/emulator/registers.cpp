#include "registers.h"

#include <algorithm>
#include <set>

namespace emulator {
namespace {

using Bits = std::vector<uint64_t>;

void set(Bits& bits, int r) { bits[r / 64] |= uint64_t{1} << r % 64; }
bool test(const Bits& bits, int r) { return bits[r / 64] >> r % 64 & 1; }

bool starts_with_any(std::string_view text, std::initializer_list<std::string_view> starts) {
  return std::any_of(starts.begin(), starts.end(), [&](auto s) { return text.starts_with(s); });
}

// How many of the first operands an instruction writes.
int result_count(const Instruction& i) {
  const std::string_view text = i.text;
  if (starts_with_any(text, {"st.", "stmatrix", "bar.sync", "bar.warp", "barrier", "bra", "ret",
                             "call", "cp.", "fence", "griddepcontrol", "setmaxnreg", "wgmma.fence",
                             "wgmma.commit", "wgmma.wait", "mbarrier.init", "mbarrier.arrive"}))
    return 0;
  if (starts_with_any(text, {"ld.", "ldmatrix", "mma.", "wgmma.mma"})) return i.count;
  if (starts_with_any(text, {"shfl", "setp"})) return text.find('|') != text.npos ? 2 : 1;
  return text.starts_with("mov") && splits(i) ? 2 : 1;
}
// Whether it reads what it writes.
bool updates(const Instruction& i) { return i.text.starts_with("wgmma.mma"); }

// From which to which instruction each register is in use, one after the other in the text.
class Ranges {
 public:
  Ranges(const Kernel& kernel, const std::vector<Draft>& drafts, size_t registers)
      : from(registers, UINT32_MAX),
        to(registers, 0),
        code_(kernel.code),
        drafts_(drafts),
        registers_(registers) {
    find_blocks();
    find_uses();
    find_live();
    for (uint32_t n = 0; n < code_.size(); ++n) {
      extend(drafts_[n].guard, n);
      for (const int r : drafts_[n].registers) extend(r, n);
    }
    for (size_t b = 0; b < first_.size(); ++b)
      for (int r = 0; r < static_cast<int>(registers_); ++r) {
        if (test(live_in_[b], r)) extend(r, first_[b]);
        for (const size_t s : successors(b))
          if (test(live_in_[s], r)) extend(r, last(b));
      }
  }
  void extend(int r, uint32_t n) {
    if (r < 0) return;
    from[r] = std::min(from[r], n);
    to[r] = std::max(to[r], n);
  }

  std::vector<uint32_t> from, to;

 private:
  void find_blocks() {
    std::set<uint32_t> starts{0};
    for (uint32_t n = 0; n < code_.size(); ++n)
      if (!drafts_[n].label.empty()) {
        starts.insert(code_[n].target);
        starts.insert(n + 1);
      }
    starts.erase(static_cast<uint32_t>(code_.size()));
    first_.assign(starts.begin(), starts.end());
    block_of_.resize(code_.size());
    for (size_t b = 0; b < first_.size(); ++b)
      for (uint32_t n = first_[b]; n <= last(b); ++n) block_of_[n] = b;
  }
  uint32_t last(size_t b) const {
    return static_cast<uint32_t>(b + 1 < first_.size() ? first_[b + 1] : code_.size()) - 1;
  }
  std::vector<size_t> successors(size_t b) const {
    std::vector<size_t> next;
    const Instruction& i = code_[last(b)];
    const Draft& draft = drafts_[last(b)];
    const bool is_branch = !draft.label.empty();
    if (is_branch) next.push_back(block_of_[i.target]);
    const bool ends = (is_branch || i.text.starts_with("ret")) && draft.guard < 0;
    if (!ends && b + 1 < first_.size()) next.push_back(b + 1);
    return next;
  }

  // What each block reads before it writes it, and what it always writes.
  void find_uses() {
    live_in_.assign(first_.size(), Bits((registers_ + 63) / 64));
    written_ = live_in_;
    for (size_t n = 0; n < code_.size(); ++n) {
      Bits &read = live_in_[block_of_[n]], &written = written_[block_of_[n]];
      const auto use = [&](int r) {
        if (r >= 0 && !test(written, r)) set(read, r);
      };
      const auto& operands = drafts_[n].registers;
      const auto results = std::min<size_t>(result_count(code_[n]), operands.size());
      const bool always = drafts_[n].guard < 0;
      use(drafts_[n].guard);
      for (size_t k = 0; k < operands.size(); ++k)
        if (k >= results || !always || updates(code_[n])) use(operands[k]);
      for (size_t k = 0; k < results; ++k)
        if (operands[k] >= 0 && always) set(written, operands[k]);
    }
  }
  void find_live() {
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t b = first_.size(); b-- > 0;)
        for (const size_t s : successors(b))
          for (size_t w = 0; w < live_in_[b].size(); ++w) {
            const uint64_t more = live_in_[s][w] & ~written_[b][w] & ~live_in_[b][w];
            live_in_[b][w] |= more;
            changed |= more != 0;
          }
    }
  }

  const std::vector<Instruction>& code_;
  const std::vector<Draft>& drafts_;
  size_t registers_;
  std::vector<uint32_t> first_;  // instruction of a block
  std::vector<size_t> block_of_;
  std::vector<Bits> live_in_, written_;  // of a block
};

}  // namespace

void place_registers(Kernel& kernel, const std::vector<Draft>& drafts,
                     const std::vector<uint32_t>& bytes,
                     const std::map<std::string, uint32_t>& specials) {
  Ranges ranges(kernel, drafts, bytes.size());
  for (const auto& [name, r] : specials) ranges.extend(static_cast<int>(r), 0);

  std::vector<uint32_t> order;
  for (uint32_t r = 0; r < bytes.size(); ++r)
    if (ranges.from[r] != UINT32_MAX) order.push_back(r);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return ranges.from[a] < ranges.from[b]; });
  std::vector<uint32_t> places(bytes.size(), 0);
  std::map<uint32_t, std::vector<uint32_t>> free;  // places, by bytes
  std::multimap<uint32_t, uint32_t> ends;          // of those in use: last instruction, register
  for (const uint32_t r : order) {
    while (!ends.empty() && ends.begin()->first < ranges.from[r]) {
      const uint32_t old = ends.begin()->second;
      free[bytes[old]].push_back(places[old]);
      ends.erase(ends.begin());
    }
    if (auto& list = free[bytes[r]]; !list.empty()) {
      places[r] = list.back();
      list.pop_back();
    } else {
      places[r] = kernel.register_bytes;
      kernel.register_bytes += bytes[r] == 0 ? 64 : bytes[r] * kLanes;
    }
    ends.emplace(ranges.to[r], r);
  }

  for (size_t n = 0; n < kernel.code.size(); ++n) {
    Instruction& i = kernel.code[n];
    if (drafts[n].guard >= 0) i.guard.place = places[drafts[n].guard];
    for (size_t k = 0; k < i.operands.size(); ++k)
      if (const int r = drafts[n].registers[k]; r >= 0) i.operands[k].place = places[r];
  }
  for (const auto& [name, r] : specials) {
    Operand& x = kernel.special[name];
    x.kind = Operand::kRegister;
    x.place = places[r];
  }
}

}  // namespace emulator
