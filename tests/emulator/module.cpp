// A module's text, its kernels, and who knows which instruction.
#include <algorithm>

#include "lanes.h"
#include "text.h"

namespace emulator {

Execute decode(const Words& words, Instruction& i) {
  for (const auto part : {decode_arithmetic, decode_bits, decode_predicate, decode_conversion,
                          decode_memory, decode_copy, decode_sync, decode_product})
    if (const Execute execute = part(words, i); execute != nullptr) return execute;
  return nullptr;
}

Module::Module(std::string text) : text_(std::move(text)) {
  const Text all = text_;
  size_t module_start = 0;
  for (size_t at = 0, next; at < all.size(); at = next) {
    next = std::min(all.find('\n', at), all.size() - 1) + 1;
    const Text line = all.substr(at, next - at);
    if (line.starts_with(".version")) module_start = at;
    const auto entry = line.find(".entry ");
    if (entry == Text::npos) continue;
    const Text name = trimmed(line.substr(entry + 7, line.find('(') - entry - 7));
    next = all.find('{', at);
    for (int depth = 0; depth > 0 || all[next - 1] != '}'; ++next)
      depth += all[next] == '{' ? 1 : all[next] == '}' ? -1 : 0;
    entries_[std::string(name)] = {module_start, at, next};
  }
}

const Kernel* Module::find(const std::string& name) {
  if (const auto made = kernels_.find(name); made != kernels_.end()) return &made->second;
  const auto at = entries_.find(name);
  if (at == entries_.end()) return nullptr;
  const auto [module_start, start, end] = at->second;
  const Text text = text_;
  Kernel kernel = parse_kernel(name, text.substr(module_start, start - module_start),
                               text.substr(start, end - start));
  return &kernels_.emplace(name, std::move(kernel)).first->second;
}

}  // namespace emulator
