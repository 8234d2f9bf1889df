// Loads and stores, of values and of matrices.
#include "lanes.h"

namespace emulator {
namespace {

enum Space : uint32_t { kAny, kGlobal, kShared, kParameters };

// Where `bytes` lie that a lane reads, or, if there is anything to write, is to write.
uint8_t* find(Warp& w, uint32_t space, uint64_t address, uint32_t bytes,
              const void* written = nullptr) {
  if (address % bytes != 0) w.fail("an address is no multiple of " + std::to_string(bytes));
  if (space == kAny) {
    const bool shared = (address & kSharedWindow) != 0;
    return find(w, shared ? kShared : kGlobal, address & ~kSharedWindow, bytes, written);
  }
  if (space == kGlobal) {
    auto* p = reinterpret_cast<uint8_t*>(address);
    check_global(w, p, bytes, written != nullptr);
    return p;
  }
  if (space == kParameters) {
    const auto& parameters = w.block().launch().parameters;
    if (address + bytes > parameters.size()) w.fail("there is no such parameter");
    return const_cast<uint8_t*>(parameters.data()) + address;
  }
  auto at = static_cast<uint32_t>(address);
  Block& block = w.cluster().block_of(w, at);
  uint8_t* p = block.shared(w, at, bytes);
  if (w.cluster().checks_hazards())
    w.check(written == nullptr ? block.hazards.read(at, bytes, w.id(), w.clocks)
                               : block.hazards.write(at, bytes, std::memcmp(p, written, bytes) == 0,
                                                     w.id(), w.clocks));
  return p;
}

// kSpace | bytes of an element | whether it is signed
constexpr uint32_t kBytesShift = 4, kSigned = 1 << 12;

template <class T>
uint64_t extended(const uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof(T));
  return static_cast<uint64_t>(static_cast<int64_t>(x));
}
uint64_t element(const uint8_t* p, uint32_t bytes, bool is_signed) {
  switch (bytes) {
    case 1:
      return is_signed ? extended<int8_t>(p) : extended<uint8_t>(p);
    case 2:
      return is_signed ? extended<int16_t>(p) : extended<uint16_t>(p);
    case 4:
      return is_signed ? extended<int32_t>(p) : extended<uint32_t>(p);
    default:
      return extended<int64_t>(p);
  }
}

Outcome load(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint32_t space = i.flags & 0xf, bytes = i.flags >> kBytesShift & 0xff;
  const auto count = static_cast<uint32_t>(i.count);
  // Of all lanes first: a destination may be the address of others.
  uint8_t* from[kLanes];
  for_lanes(lanes, [&](int lane) {
    from[lane] = find(w, space, address_of(w, i, count, lane), bytes * count);
  });
  for (uint32_t n = 0; n < count; ++n) {
    const Operand& to = i.operands[n];
    if (to.kind == Operand::kNone) continue;
    for_lanes(lanes, [&](int lane) {
      const uint64_t x = element(from[lane] + n * bytes, bytes, (i.flags & kSigned) != 0);
      if (to.wide)
        w.lanes<uint64_t>(to)[lane] = x;
      else
        w.lanes<uint32_t>(to)[lane] = static_cast<uint32_t>(x);
    });
  }
  return Outcome::kNext;
}

Outcome store(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint32_t space = i.flags & 0xf, bytes = i.flags >> kBytesShift & 0xff;
  const auto count = static_cast<uint32_t>(i.count);
  for_lanes(lanes, [&](int lane) {
    uint8_t written[32];
    for (uint32_t n = 0; n < count; ++n) {
      const uint64_t x = value(w, i.operands[1 + n], lane);
      std::memcpy(written + n * bytes, &x, bytes);
    }
    std::memcpy(find(w, space, address_of(w, i, 0, lane), bytes * count, written), written,
                bytes * count);
  });
  return Outcome::kNext;
}

// Of matrices of 8 x 8 elements of 16 bits; a lane gives a row's address.
constexpr uint32_t kTransposed = 1;

Outcome load_matrices(Warp& w, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) return Outcome::kBlocked;
  uint16_t rows[kLanes][8];
  for (int lane = 0; lane < 8 * i.count; ++lane)
    std::memcpy(rows[lane], find(w, kShared, address_of(w, i, i.count, lane), 16), 16);
  for (int matrix = 0; matrix < i.count; ++matrix)
    for (int lane = 0; lane < kLanes; ++lane) {
      const int r = lane / 4, c = 2 * (lane % 4);
      const uint16_t (*m)[8] = rows + 8 * matrix;
      const uint32_t low = i.flags & kTransposed ? m[c][r] : m[r][c];
      const uint32_t high = i.flags & kTransposed ? m[c + 1][r] : m[r][c + 1];
      w.lanes<uint32_t>(i.operands[matrix])[lane] = high << 16 | low;
    }
  return Outcome::kNext;
}

Outcome store_matrices(Warp& w, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) return Outcome::kBlocked;
  uint16_t rows[kLanes][8];
  for (int matrix = 0; matrix < i.count; ++matrix)
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t x = w.lanes<uint32_t>(i.operands[1 + matrix])[lane];
      const int r = lane / 4, c = 2 * (lane % 4);
      uint16_t (*m)[8] = rows + 8 * matrix;
      (i.flags & kTransposed ? m[c][r] : m[r][c]) = static_cast<uint16_t>(x);
      (i.flags & kTransposed ? m[c + 1][r] : m[r][c + 1]) = static_cast<uint16_t>(x >> 16);
    }
  for (int lane = 0; lane < 8 * i.count; ++lane)
    std::memcpy(find(w, kShared, address_of(w, i, 0, lane), 16, rows[lane]), rows[lane], 16);
  return Outcome::kNext;
}

// movmatrix: a matrix of 8 x 8 elements of 16 bits in registers, two neighbours a lane, transposed.
Outcome transpose_matrix(Warp& w, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) return Outcome::kBlocked;
  uint16_t m[8][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint32_t x = w.lanes<uint32_t>(i.operands[1])[lane];
    m[lane / 4][2 * (lane % 4)] = static_cast<uint16_t>(x);
    m[lane / 4][2 * (lane % 4) + 1] = static_cast<uint16_t>(x >> 16);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const int r = lane / 4, c = 2 * (lane % 4);
    w.lanes<uint32_t>(i.operands[0])[lane] = uint32_t{m[c + 1][r]} << 16 | m[c][r];
  }
  return Outcome::kNext;
}

}  // namespace

Execute decode_memory(const Words& words, Instruction& i) {
  const std::string &op = words[0], &type = words.back();
  if (op == "ldmatrix" || op == "stmatrix") {
    i.flags = has(words, "trans") ? kTransposed : 0;
    return op == "ldmatrix" ? load_matrices : store_matrices;
  }
  if (op == "movmatrix") return transpose_matrix;
  if (op != "ld" && op != "st") return nullptr;
  const uint32_t space = has(words, "shared")   ? kShared
                         : has(words, "param")  ? kParameters
                         : has(words, "global") ? kGlobal
                                                : kAny;
  if (has(words, "local") || has(words, "const")) return nullptr;
  const uint32_t bits = static_cast<uint32_t>(std::stoul(type.substr(1)));
  i.flags = space | bits / 8 << kBytesShift | (type[0] == 's' ? kSigned : 0);
  return op == "ld" ? load : store;
}

}  // namespace emulator
