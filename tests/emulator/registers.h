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

// Registers that are not in use at the same time share a place: PTX has thousands of them, and a
// warp's should stay in the cache. A register's place is its own from where it is first in use to
// where it is last. `bytes`: of each register's values, 0 of a predicate. `specials`: those that a
// warp starts with, by name.
void place_registers(Kernel& kernel, const std::vector<Draft>& drafts,
                     const std::vector<uint32_t>& bytes,
                     const std::map<std::string, uint32_t>& specials);

}  // namespace emulator
