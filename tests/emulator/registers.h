// Places for a kernel's registers among those of a warp.
#pragma once

#include <map>

#include "program.h"

namespace emulator {

// What is known of an instruction's operands before registers have places.
struct Draft {
  std::vector<int> registers;  // of the operands: a number, or -1
  int guard = -1;
  std::string label;  // that it branches to
  int scope = 0;
};

// Gives every register a place. Registers that are not in use at the same time share one: PTX has
// thousands of registers, and those of a warp should stay in the cache. A register has its place to
// itself from its first use to its last. `bytes`: size of a value of each register, 0 for a
// predicate. `specials`: by name, the registers that have a value when a warp starts.
void place_registers(Kernel& kernel, const std::vector<Draft>& drafts,
                     const std::vector<uint32_t>& bytes,
                     const std::map<std::string, uint32_t>& specials);

}  // namespace emulator
