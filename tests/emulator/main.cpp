// Runs one kernel of a .ptx file, whose only parameter is a pointer to words of global memory, 0 at
// first, and prints these, or what is wrong.
//
//   emulate FILE KERNEL BLOCKS THREADS CLUSTER SHARED_BYTES WORDS
#include <fstream>
#include <iostream>
#include <sstream>

#include "machine.h"

int main(int count, char** arguments) {
  if (count != 8) {
    std::cerr << "emulate FILE KERNEL BLOCKS THREADS CLUSTER SHARED_BYTES WORDS\n";
    return 2;
  }
  std::ifstream file(arguments[1]);
  std::stringstream text;
  text << file.rdbuf();
  const auto number = [&](int i) { return static_cast<uint32_t>(std::stoul(arguments[i])); };
  std::vector<uint32_t> words(number(7));
  emulator::add_allocation(words.data(), words.size() * sizeof(uint32_t));
  try {
    emulator::Module module(text.str());
    emulator::Launch launch;
    launch.kernel = module.find(arguments[2]);
    if (launch.kernel == nullptr) throw std::runtime_error("there is no such kernel");
    launch.grid.x = number(3);
    launch.block.x = number(4);
    launch.cluster = number(5);
    launch.dynamic_shared_bytes = number(6);
    const uint32_t* p = words.data();
    launch.parameters.resize(sizeof(p));
    std::memcpy(launch.parameters.data(), &p, sizeof(p));
    emulator::run(launch);
  } catch (const std::exception& error) {
    std::cout << "wrong: " << error.what() << "\n";
    return 1;
  }
  for (const uint32_t word : words) std::cout << word << "\n";
}
