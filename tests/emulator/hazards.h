// Which accesses to shared memory are ordered. Every warp has a clock, and so have the copies of
// every barrier; barriers hand clocks on. Every word knows who wrote it, who has read it since, and
// when.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

// How far each clock was when something happened, as far as whoever holds this knows.
class Clocks {
 public:
  static constexpr int kCount = 128, kWarps = 64;  // the first are warps', the rest of copies
  void join(const Clocks& other) {
    for (int i = 0; i < kCount; ++i) at_[i] = at_[i] > other.at_[i] ? at_[i] : other.at_[i];
  }
  uint32_t& operator[](int id) { return at_[id]; }
  uint32_t operator[](int id) const { return at_[id]; }

 private:
  std::array<uint32_t, kCount> at_{};
};

// Which clock, and its time.
struct Epoch {
  uint32_t bits = 0;  // 0: never
  static Epoch of(int id, uint32_t time) { return {static_cast<uint32_t>(id) << 24 | time}; }
  int id() const { return static_cast<int>(bits >> 24); }
  bool before(const Clocks& clocks) const { return bits == 0 || (bits & 0xffffff) <= clocks[id()]; }
};

// When each warp of a cluster has last made its ordinary writes visible to the asynchronous proxy,
// in instructions that the cluster has run.
struct Fences {
  uint32_t now = 1;
  std::array<uint32_t, Clocks::kCount> at{};
};

// Of one block's shared memory. What is out of order comes back as a sentence, else "".
class Hazards {
 public:
  void reset(uint32_t bytes, const Fences* fences);

  std::string read(uint32_t address, uint32_t bytes, int warp, const Clocks& clocks);
  // `same`: what is there already, which several may write without waiting for each other.
  std::string write(uint32_t address, uint32_t bytes, bool same, int warp, const Clocks& clocks);
  // A copy into shared memory is asked for: nobody may touch it until `end_copy`.
  std::string begin_copy(uint32_t address, uint32_t bytes, const Clocks& clocks);
  // `warp`: whose ordinary write it counts as, or -1 for the asynchronous proxy.
  void end_copy(uint32_t address, uint32_t bytes, Epoch written, int warp);
  // By the asynchronous proxy, between `issued` and now, when it counts as read at `epoch`.
  std::string read_asynchronously(uint32_t address, uint32_t bytes, int warp, const Clocks& issued,
                                  Epoch epoch);

 private:
  static constexpr uint32_t kInFlight = 0xffffffff, kMany = 0xfe000000;
  struct Word {
    uint32_t written;        // an epoch, or kInFlight
    uint32_t read;           // an epoch, or kMany and an index
    uint32_t ordinarily_at;  // of the last write, if ordinary
    uint32_t writer;
  };
  std::string check_write(const Word& word, uint32_t address, bool same,
                          const Clocks& clocks) const;
  void add_read(Word& word, Epoch epoch, const Clocks& clocks);
  void clear_reads(Word& word);
  template <class Function>
  std::string for_words(uint32_t address, uint32_t bytes, Function function);

  std::vector<Word> words_;
  std::vector<std::vector<Epoch>> many_;
  std::vector<uint32_t> free_;
  const Fences* fences_ = nullptr;
};

}  // namespace emulator
