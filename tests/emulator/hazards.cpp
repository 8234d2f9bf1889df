#include "hazards.h"

#include "program.h"

namespace emulator {
namespace {

std::string who(Epoch e) {
  return e.id() < Clocks::kWarps ? "warp " + std::to_string(e.id()) + " of the cluster" : "a copy";
}
std::string at(uint32_t address) { return "shared byte " + std::to_string(address - kSharedBase); }

}  // namespace

void Hazards::reset(uint32_t bytes, const Fences* fences) {
  words_.assign((bytes + 3) / 4, Word{});
  many_.clear();
  free_.clear();
  fences_ = fences;
}

template <class Function>
std::string Hazards::for_words(uint32_t address, uint32_t bytes, Function function) {
  const uint32_t end = (address - kSharedBase + bytes + 3) / 4;
  for (uint32_t i = (address - kSharedBase) / 4; i < end; ++i)
    if (std::string wrong = function(words_[i], kSharedBase + 4 * i); !wrong.empty()) return wrong;
  return {};
}

void Hazards::clear_reads(Word& word) {
  if (word.read >= kMany) free_.push_back(word.read - kMany);
  word.read = 0;
}

// Forgets the reads that are ordered before this one: whoever comes after this read comes after
// them too.
void Hazards::add_read(Word& word, Epoch epoch, const Clocks& clocks) {
  if (word.read < kMany) {
    if (Epoch{word.read}.before(clocks)) {
      word.read = epoch.bits;
      return;
    }
    uint32_t place = static_cast<uint32_t>(many_.size());
    if (free_.empty()) {
      many_.emplace_back();
    } else {
      place = free_.back();
      free_.pop_back();
    }
    many_[place].assign({Epoch{word.read}});
    word.read = kMany + place;
  }
  auto& reads = many_[word.read - kMany];
  std::erase_if(reads, [&](Epoch e) { return e.before(clocks); });
  reads.push_back(epoch);
}

std::string Hazards::check_write(const Word& word, uint32_t address, bool same,
                                 const Clocks& clocks) const {
  if (word.written == kInFlight)
    return "writes " + at(address) + " while a copy is on its way there";
  if (!same && !Epoch{word.written}.before(clocks))
    return "writes " + at(address) + ", which " + who({word.written}) +
           " has written without being waited for";
  const auto unordered = [&](Epoch e) {
    return e.before(clocks) ? std::string()
                            : "writes " + at(address) + ", which " + who(e) +
                                  " has read or is reading without being waited for";
  };
  if (word.read < kMany) return unordered({word.read});
  for (const Epoch e : many_[word.read - kMany])
    if (std::string wrong = unordered(e); !wrong.empty()) return wrong;
  return {};
}

std::string Hazards::read(uint32_t address, uint32_t bytes, int warp, const Clocks& clocks) {
  const Epoch mine = Epoch::of(warp, clocks[warp]);
  return for_words(address, bytes, [&](Word& word, uint32_t here) -> std::string {
    if (word.written == kInFlight) return "reads " + at(here) + " while a copy is on its way there";
    if (!Epoch{word.written}.before(clocks))
      return "reads " + at(here) + ", which " + who({word.written}) +
             " has written without being waited for";
    if (word.read != mine.bits) add_read(word, mine, clocks);
    return {};
  });
}

std::string Hazards::write(uint32_t address, uint32_t bytes, bool same, int warp,
                           const Clocks& clocks) {
  const Epoch mine = Epoch::of(warp, clocks[warp]);
  return for_words(address, bytes, [&](Word& word, uint32_t here) -> std::string {
    if (std::string wrong = check_write(word, here, same, clocks); !wrong.empty()) return wrong;
    clear_reads(word);
    word.written = mine.bits;
    word.ordinarily_at = fences_->now;
    word.writer = static_cast<uint32_t>(warp);
    return {};
  });
}

std::string Hazards::begin_copy(uint32_t address, uint32_t bytes, const Clocks& clocks) {
  return for_words(address, bytes, [&](Word& word, uint32_t here) -> std::string {
    if (std::string wrong = check_write(word, here, false, clocks); !wrong.empty()) return wrong;
    clear_reads(word);
    word.written = kInFlight;
    return {};
  });
}

void Hazards::end_copy(uint32_t address, uint32_t bytes, Epoch written, int warp) {
  for_words(address, bytes, [&](Word& word, uint32_t) -> std::string {
    word.written = written.bits;
    word.ordinarily_at = warp < 0 ? 0 : fences_->now;
    word.writer = static_cast<uint32_t>(warp);
    return {};
  });
}

std::string Hazards::read_asynchronously(uint32_t address, uint32_t bytes, int warp,
                                         const Clocks& issued, Epoch epoch) {
  return for_words(address, bytes, [&](Word& word, uint32_t here) -> std::string {
    if (word.written == kInFlight || !Epoch{word.written}.before(issued))
      return "product or bulk copy reads " + at(here) + ", which " +
             (word.written == kInFlight ? "a copy" : who({word.written})) +
             " writes without being waited for";
    if (word.ordinarily_at > fences_->at[warp] && word.ordinarily_at > fences_->at[word.writer])
      return "product or bulk copy reads " + at(here) + ", which " + who({word.written}) +
             " has written, without a proxy fence between";
    if (word.read != epoch.bits) add_read(word, epoch, issued);
    return {};
  });
}

}  // namespace emulator
