// Products of matrices, of a warp (mma.sync) and of a warpgroup (wgmma).
#include "lanes.h"
#include "numbers.h"

namespace emulator {
namespace {

// d [16 x 8] = a [16 x kSummed] b [kSummed x 8] + c; lane l has rows l / 4 and 8 more, and of every
// operand the columns or rows that its registers' order says.
template <int kSummed, int kColumns>
void multiply(const float (&a)[16][kSummed], const float (&b)[kSummed][kColumns],
              float (&d)[16][kColumns], int columns = kColumns) {
  for (int r = 0; r < 16; ++r)
    for (int k = 0; k < kSummed; ++k)
      for (int c = 0; c < columns; ++c) d[r][c] += a[r][k] * b[k][c];
}
// The n-th value that a lane has of d.
template <int kColumns>
float& of_lane(float (&d)[16][kColumns], int lane, int n) {
  return d[lane / 4 + n / 2 % 2 * 8][n / 4 * 8 + 2 * (lane % 4) + n % 2];
}
// The four registers of a, of 16 bits each, from operand `first` on.
template <float (*to_float)(uint16_t) = bf16_to_float>
void read_a(Warp& w, const Instruction& i, size_t first, float (&a)[16][16]) {
  for (int lane = 0; lane < kLanes; ++lane)
    for (int n = 0; n < 4; ++n) {
      const uint32_t x = w.lanes<uint32_t>(i.operands[first + n])[lane];
      const int r = lane / 4 + n % 2 * 8, k = 2 * (lane % 4) + n / 2 * 8;
      a[r][k] = to_float(static_cast<uint16_t>(x));
      a[r][k + 1] = to_float(static_cast<uint16_t>(x >> 16));
    }
}
template <int kSummed>
Outcome finish(Warp& w, const Instruction& i, const float (&a)[16][kSummed],
               const float (&b)[kSummed][8], size_t c_at) {
  float d[16][8];
  for (int n = 0; n < 4; ++n)
    for (int lane = 0; lane < kLanes; ++lane)
      of_lane(d, lane, n) = w.lanes<float>(i.operands[c_at + n])[lane];
  multiply(a, b, d);
  for (int n = 0; n < 4; ++n)
    for (int lane = 0; lane < kLanes; ++lane)
      w.lanes<float>(i.operands[n])[lane] = of_lane(d, lane, n);
  return Outcome::kNext;
}

template <float (*to_float)(uint16_t)>
Outcome multiply_halves(Warp& w, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) return Outcome::kBlocked;
  float a[16][16], b[16][8];
  read_a<to_float>(w, i, 4, a);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int n = 0; n < 2; ++n) {
      const uint32_t x = w.lanes<uint32_t>(i.operands[8 + n])[lane];
      const int k = 2 * (lane % 4) + n * 8;
      b[k][lane / 4] = to_float(static_cast<uint16_t>(x));
      b[k + 1][lane / 4] = to_float(static_cast<uint16_t>(x >> 16));
    }
  return finish(w, i, a, b, 10);
}

Outcome multiply_tf32(Warp& w, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) return Outcome::kBlocked;
  // What tf32 does not hold of a register is not looked at.
  const auto tf32 = [](uint32_t x) { return std::bit_cast<float>(x & ~0x1fffu); };
  float a[16][8], b[8][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int n = 0; n < 4; ++n)
      a[lane / 4 + n % 2 * 8][lane % 4 + n / 2 * 4] =
          tf32(w.lanes<uint32_t>(i.operands[4 + n])[lane]);
    for (int n = 0; n < 2; ++n)
      b[lane % 4 + n * 4][lane / 4] = tf32(w.lanes<uint32_t>(i.operands[8 + n])[lane]);
  }
  return finish(w, i, a, b, 10);
}

// --- of a warpgroup: rows 16 i and up of d are warp i's, which computes these alone

// An operand in shared memory, swizzled by 128 bytes.
class Tile {
 public:
  Tile(Warp& w, uint64_t descriptor, bool transposed)
      : warp_(w),
        start_(static_cast<uint32_t>(descriptor & 0x3fff) << 4),
        between_tiles_(static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        between_eights_(static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4),
        transposed_(transposed) {
    if (descriptor >> 62 != 1) w.fail("the emulator knows tiles swizzled by 128 bytes alone");
  }
  // Where eight elements from (row, summed) on lie, along the dimension that is contiguous.
  uint32_t address(int row, int summed) const {
    const int inner = transposed_ ? row : summed, outer = transposed_ ? summed : row;
    const uint32_t at = start_ + static_cast<uint32_t>(inner / 64) * between_tiles_ +
                        static_cast<uint32_t>(outer / 8) * between_eights_ +
                        static_cast<uint32_t>(outer % 8) * 128 +
                        static_cast<uint32_t>(inner % 64) * 2;
    return at ^ (at >> 7 & 7) << 4;
  }
  // Elements of `rows` rows from `first` on and 16 summed: get(row, summed, element).
  template <class Function>
  void read(int first, int rows, std::vector<uint32_t>& addresses, Function get) const {
    const int outer = transposed_ ? 16 : rows, inner = transposed_ ? rows : 16;
    for (int o = 0; o < outer; ++o)
      for (int n = 0; n < inner; n += 8) {
        const uint32_t at = transposed_ ? address(first + n, o) : address(first + o, n);
        uint16_t elements[8];
        std::memcpy(elements, warp_.block().shared(warp_, at, 16), 16);
        addresses.push_back(at);
        for (int e = 0; e < 8; ++e)
          transposed_ ? get(n + e, o, elements[e]) : get(o, n + e, elements[e]);
      }
  }

 private:
  Warp& warp_;
  uint32_t start_, between_tiles_, between_eights_;
  bool transposed_;
};

constexpr uint32_t kRegistersA = 1;

Outcome multiply_warpgroup(Warp& w, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) return Outcome::kBlocked;
  const int N = 2 * i.count;
  const size_t a_at = static_cast<size_t>(i.count);
  const bool registers = (i.flags & kRegistersA) != 0;
  const size_t b_at = a_at + (registers ? 4 : 1);
  const bool add = (w.read_predicate(i.operands[b_at + 1]) & 1) != 0;
  ProductReads reads{false, {}, w.clocks};

  static thread_local float a[16][16], b[16][256], d[16][256];
  if (registers) {
    read_a(w, i, a_at, a);
  } else {
    const bool transposed = uniform(w, i.operands[b_at + 4], lanes) != 0;
    Tile(w, uniform(w, i.operands[a_at], lanes), transposed)
        .read(w.index() % 4 * 16, 16, reads.addresses,
              [&](int r, int k, uint16_t x) { a[r][k] = bf16_to_float(x); });
  }
  const bool transposed = uniform(w, i.operands[b_at + (registers ? 4 : 5)], lanes) != 0;
  Tile(w, uniform(w, i.operands[b_at], lanes), transposed)
      .read(0, N, reads.addresses, [&](int n, int k, uint16_t x) { b[k][n] = bf16_to_float(x); });

  for (int n = 0; n < i.count; ++n)
    for (int lane = 0; lane < kLanes; ++lane)
      of_lane(d, lane, n) = add ? w.lanes<float>(i.operands[n])[lane] : 0.f;
  multiply(a, b, d, N);
  for (int n = 0; n < i.count; ++n)
    for (int lane = 0; lane < kLanes; ++lane)
      w.lanes<float>(i.operands[n])[lane] = of_lane(d, lane, n);
  w.products.push_back(std::move(reads));
  return Outcome::kNext;
}

Outcome commit_products(Warp& w, const Instruction&, uint32_t) {
  w.products.push_back({true, {}, {}});
  ++w.pending_products;
  return Outcome::kNext;
}

Outcome wait_for_products(Warp& w, const Instruction& i, uint32_t lanes) {
  const int most = static_cast<int>(uniform(w, i.operands[0], lanes));
  while (w.pending_products > most) {
    const ProductReads& reads = w.products.front();
    if (reads.commit) --w.pending_products;
    if (w.cluster().checks_hazards())
      for (const uint32_t address : reads.addresses)
        w.check(w.block().hazards.read_asynchronously(address, 16, w.id(), reads.issued,
                                                      Epoch::of(w.id(), w.clocks[w.id()])),
                "of the products waited for: ");
    w.products.pop_front();
  }
  return Outcome::kNext;
}

}  // namespace

Execute decode_product(const Words& words, Instruction& i) {
  if (words[0] == "mma" && words[1] == "sync") {
    if (has(words, "m16n8k16") && has(words, "bf16")) return multiply_halves<bf16_to_float>;
    if (has(words, "m16n8k16") && has(words, "f16")) return multiply_halves<f16_to_float>;
    if (has(words, "m16n8k8") && has(words, "tf32")) return multiply_tf32;
    return nullptr;
  }
  if (words[0] != "wgmma") return nullptr;
  if (words[1] == "fence") return nothing;
  if (words[1] == "commit_group") return commit_products;
  if (words[1] == "wait_group") return wait_for_products;
  if (words[1] == "mma_async" && has(words, "f32") && has(words, "bf16")) {
    // d, a (4 registers) or its tile, b's tile, whether to add, two signs, how a tile lies
    const size_t behind = i.operands.size() - static_cast<size_t>(i.count);
    i.flags = behind == 4 + 1 + 1 + 2 + 1 ? kRegistersA : 0;
    return multiply_warpgroup;
  }
  return nullptr;
}

}  // namespace emulator
