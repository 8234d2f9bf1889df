// A kernel of PTX text as it is run: instructions with resolved operands.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace emulator {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
// Where shared memory begins, so that address 0 is nobody's.
constexpr uint32_t kSharedBase = 1024;
// What is added to an address of shared memory that is to be one of any memory.
constexpr uint64_t kSharedWindow = uint64_t{1} << 56;

class Warp;
struct Instruction;

enum class Outcome { kNext, kBranch, kBlocked, kExit };
// Runs an instruction for some lanes of a warp. kBlocked: nothing has happened yet, try again.
using Execute = Outcome (*)(Warp&, const Instruction&, uint32_t lanes);

// A register of a warp, or a constant: one value a lane, of 4 or 8 bytes (a predicate: a bit a
// lane).
struct Operand {
  enum Kind : uint8_t { kRegister, kConstant, kNone };
  Kind kind = kNone;
  bool wide = false;       // 8 bytes
  bool predicate = false;  // a bit
  bool negated = false;
  uint32_t place = 0;  // bytes into the warp's registers, or the kernel's constants
};

struct Instruction {
  Execute execute = nullptr;
  std::vector<Operand> operands;  // in PTX's order, vectors and addresses flattened
  Operand guard;                  // kNone: always
  int64_t offset = 0;             // of an address
  uint32_t target = 0;            // of a branch
  int count = 1;                  // elements of a vector; columns of a product
  uint32_t flags = 0;             // what else the opcode says
  uint32_t line = 0;              // of the kernel's text
  std::string text;
};

// Whether a mov takes a register apart, and does not put one together.
inline bool splits(const Instruction& i) {
  return i.count == 2 && i.text.find('{') < i.text.find(',');
}

struct Parameter {
  uint32_t offset, bytes;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  std::vector<uint8_t> constants;
  uint32_t parameter_bytes = 0;
  uint32_t register_bytes = 0;  // of a warp
  uint32_t shared_bytes = 0;    // without what a launch adds
  // Registers that hold a thread's place, where the kernel reads them.
  std::unordered_map<std::string, Operand> special;
};

// Parses a kernel. `body` is its text, `globals` what is declared before it.
Kernel parse_kernel(const std::string& name, std::string_view globals, std::string_view body);

// The text of a module, whose kernels are made when they are first asked for.
class Module {
 public:
  explicit Module(std::string text);
  // nullptr: there is none of this name.
  const Kernel* find(const std::string& name);

 private:
  struct Entry {
    size_t module_start, start, end;  // of the .ptx file that it is in, and of itself
  };
  std::string text_;
  std::unordered_map<std::string, Entry> entries_;
  std::unordered_map<std::string, Kernel> kernels_;
};

}  // namespace emulator
