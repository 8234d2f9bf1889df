// PTX text to `Kernel`: declarations, statements, scopes and names.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>

#include "lanes.h"
#include "registers.h"
#include "text.h"

namespace emulator {
namespace {

uint32_t aligned(uint32_t at, uint32_t to) { return (at + to - 1) / to * to; }

// A name, and what is between its brackets if it has any.
std::pair<Text, std::optional<Text>> array(Text s) {
  const auto bracket = s.find('[');
  if (bracket == Text::npos) return {s, std::nullopt};
  return {s.substr(0, bracket), s.substr(bracket + 1, s.find(']') - bracket - 1)};
}

// What a name stands for.
struct Meaning {
  enum { kRegister, kShared, kParameter } kind;
  uint32_t value;  // a register's number, an address
};

struct Scope {
  int parent;
  std::map<std::string, Meaning, std::less<>> names;
  std::map<std::string, uint32_t, std::less<>> labels;
};

class Parser {
 public:
  Parser(const std::string& name, Text globals, Text body) : body_(body) {
    kernel_.name = name;
    scopes_.push_back({-1, {}, {}});
    shared_memory(globals);
  }

  Kernel parse() {
    const auto open = body_.find('(');
    const auto brace = body_.find('{');
    if (open != Text::npos && open < brace)
      parameters(body_.substr(open + 1, body_.find(')') - open - 1));
    read_statements(body_.substr(brace));
    kernel_.code.push_back(make("ret", {}));
    drafts_.push_back({});
    resolve_labels();
    place_registers(kernel_, drafts_, registers_, specials_);
    return std::move(kernel_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("PTX of " + kernel_.name + ", line " + std::to_string(line_) + ": " +
                             what);
  }

  // --- declarations

  void parameters(Text list) {
    uint32_t at = 0;
    for (Text parameter : split(list, ',')) {
      uint32_t alignment = 0, bytes = 0, count = 1;
      std::string name;
      const auto parts = split(parameter, ' ');
      for (size_t i = 0; i < parts.size(); ++i) {
        if (parts[i] == ".param" || parts[i].empty()) continue;
        if (parts[i] == ".align") {
          alignment = number(parts[++i]);
        } else if (parts[i][0] == '.') {
          bytes = bytes_of(parts[i]);
        } else {
          const auto [n, size] = array(parts[i]);
          if (size) count = number(*size);
          name = n;
        }
      }
      at = aligned(at, std::max(alignment, bytes));
      scopes_[0].names[name] = {Meaning::kParameter, at};
      kernel_.parameters.push_back({at, bytes * count});
      at += bytes * count;
    }
    kernel_.parameter_bytes = at;
  }

  // Shared memory of a declaration such as `.shared .align 16 .b8 name[64]`; with no size, what the
  // launch adds, which begins behind all else.
  void shared(Text declaration) {
    uint32_t alignment = 1, bytes = 1, count = 1;
    const auto parts = split(declaration, ' ');
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      if (parts[i] == ".align")
        alignment = number(parts[++i]);
      else if (parts[i] != ".shared" && parts[i] != ".extern" && !parts[i].empty())
        bytes = bytes_of(parts[i]);
    }
    const auto [name, size] = array(parts.back());
    const bool dynamic = size && size->empty();
    if (size) count = dynamic ? 0 : number(*size);
    if (body_.find(name) == Text::npos) return;
    const uint32_t start =
        aligned(kernel_.shared_bytes, std::max(alignment, dynamic ? 16u : bytes));
    scopes_[0].names[std::string(name)] = {Meaning::kShared, kSharedBase + start};
    kernel_.shared_bytes = start + bytes * count;
  }

  // All declarations of shared memory in a text, first those with a size.
  void shared_memory(Text globals) {
    for (const bool sized : {true, false})
      for (const Text text : {globals, sized ? body_ : Text()})
        for (size_t at = text.find(".shared "); at != Text::npos;
             at = text.find(".shared ", at + 1)) {
          const size_t line = text.rfind('\n', at) + 1;
          const Text before = trimmed(text.substr(line, at - line));
          if (!before.empty() && before != ".extern") continue;
          const Text declaration = text.substr(at, text.find(';', at) - at);
          if (declaration.ends_with("[]") != sized) shared(declaration);
        }
  }

  void registers(Text declaration) {
    const auto parts = split(declaration, ' ');
    const uint32_t bytes = parts[1] == ".pred" ? 0 : std::max(4u, bytes_of(parts[1]));
    const auto first = declaration.find(parts[1]) + parts[1].size();
    for (Text name : split(declaration.substr(first), ',')) {
      if (const auto angle = name.find('<'); angle != Text::npos) {
        const uint32_t count = number(name.substr(angle + 1, name.find('>') - angle - 1));
        for (uint32_t i = 0; i < count; ++i)
          declare(std::string(name.substr(0, angle)) + std::to_string(i), bytes);
      } else {
        declare(std::string(name), bytes);
      }
    }
  }
  void declare(std::string name, uint32_t bytes) {
    scopes_[scope_].names[std::move(name)] = {Meaning::kRegister,
                                              static_cast<uint32_t>(registers_.size())};
    registers_.push_back(bytes);
  }

  // --- statements

  void read_statements(Text s) {
    size_t i = 0;
    while (i < s.size()) {
      const char c = s[i];
      if (c == '\n') ++line_;
      if (std::isspace(static_cast<unsigned char>(c)) || c == ';') {
        ++i;
      } else if (s.substr(i, 2) == "//") {
        while (i < s.size() && s[i] != '\n') ++i;
      } else if (c == '{') {
        scopes_.push_back({scope_, {}, {}});
        scope_ = static_cast<int>(scopes_.size()) - 1;
        ++i;
      } else if (c == '}') {
        scope_ = scopes_[scope_].parent;
        ++i;
        if (scope_ == 0) return;
      } else {
        size_t end = i;
        while (end < s.size() && is_name(s[end])) ++end;
        if (end < s.size() && s[end] == ':' && s.substr(end, 2) != "::") {
          scopes_[scope_].labels[std::string(s.substr(i, end - i))] =
              static_cast<uint32_t>(kernel_.code.size());
          i = end + 1;
          continue;
        }
        end = s.find(';', i);
        statement(trimmed(s.substr(i, end - i)));
        line_ += static_cast<uint32_t>(std::count(s.begin() + i, s.begin() + end, '\n'));
        i = end + 1;
      }
    }
  }

  void statement(Text s) {
    if (s.starts_with(".reg")) return registers(s);
    if (s.starts_with(".")) return;         // .shared, which has been read; .pragma, .loc
    if (s.starts_with("st.param")) return;  // what a failed assertion would print
    if (s.starts_with("call")) s = "call";  // __assertfail, which is all that kernels call
    Operand guard;
    Draft draft;
    draft.scope = scope_;
    if (s[0] == '@') {
      const auto end = s.find_first_of(" \t");
      Text name = s.substr(1, end - 1);
      guard.negated = name[0] == '!';
      if (guard.negated) name = name.substr(1);
      draft.guard = static_cast<int>(register_of(name));
      guard.kind = Operand::kRegister;
      guard.predicate = true;
      s = trimmed(s.substr(end));
    }
    const auto end = std::min(s.find_first_of(" \t"), s.size());
    Instruction i = make(s.substr(0, end), trimmed(s.substr(end)), &draft);
    i.guard = guard;
    kernel_.code.push_back(std::move(i));
    drafts_.push_back(std::move(draft));
  }

  Instruction make(Text opcode, Text operands, Draft* draft = nullptr) {
    Instruction i;
    i.line = line_;
    i.text = std::string(opcode) + " " + std::string(operands);
    const auto words = words_of(opcode);
    if (words[0] == "bra") {
      draft->label = operands;
    } else {
      for (const Text operand : split(operands, ',')) add_operand(operand, words, i, *draft);
    }
    i.execute = decode(words, i);
    if (i.execute == nullptr) fail("the emulator does not know " + i.text);
    return i;
  }

  // --- operands

  void add_operand(Text s, const std::vector<std::string>& words, Instruction& i, Draft& draft) {
    if (s[0] == '{') {
      const auto parts = split(s.substr(1, s.size() - 2), ',');
      if (i.operands.empty() || i.count == 1) i.count = static_cast<int>(parts.size());
      for (const Text part : parts) add_operand(part, words, i, draft);
      return;
    }
    if (s[0] == '[') {
      add_address(trimmed(s.substr(1, s.size() - 2)), words, i, draft);
      return;
    }
    if (const auto bar = s.find('|'); bar != Text::npos) {  // of shfl: a value and a predicate
      add_operand(trimmed(s.substr(0, bar)), words, i, draft);
      add_operand(trimmed(s.substr(bar + 1)), words, i, draft);
      return;
    }
    Operand x;
    int number_of_register = -1;
    if (s[0] == '$' || s.starts_with("__unnamed")) {  // texts of an assertion
      x = constant(0, words, i);
    } else if (s == "_") {
      x.kind = Operand::kNone;
    } else if (s[0] == '!') {
      number_of_register = static_cast<int>(register_of(trimmed(s.substr(1))));
      x.negated = true;
    } else if (std::isdigit(static_cast<unsigned char>(s[0])) || s[0] == '-') {
      x = constant(literal(s), words, i);
    } else if (const Meaning* m = find(s); m != nullptr && m->kind != Meaning::kRegister) {
      x = constant(m->value, words, i);
    } else if (m == nullptr && s.find('+') != Text::npos) {  // a symbol and an offset
      const auto plus = s.find('+');
      const Meaning* base = find(trimmed(s.substr(0, plus)));
      if (base == nullptr) fail("no such name: " + std::string(s));
      x = constant(base->value + number(trimmed(s.substr(plus + 1))), words, i);
    } else {
      number_of_register = static_cast<int>(register_of(s));
    }
    if (number_of_register >= 0) {
      x.kind = Operand::kRegister;
      x.wide = registers_[number_of_register] == 8;
      x.predicate = registers_[number_of_register] == 0;
    }
    i.operands.push_back(x);
    draft.registers.push_back(number_of_register);
  }

  // A register or a name, and an offset, in the instruction's `offset` (of one address; others have
  // none).
  void add_address(Text s, const std::vector<std::string>& words, Instruction& i, Draft& draft) {
    int64_t offset = 0;
    if (const auto plus = s.rfind('+'); plus != Text::npos) {
      offset = static_cast<int64_t>(literal(trimmed(s.substr(plus + 1))));
      s = trimmed(s.substr(0, plus));
    }
    if (offset != 0 && i.offset != 0) fail("two offsets in one instruction");
    i.offset += offset;
    if (const Meaning* m = find(s); m != nullptr && m->kind != Meaning::kRegister) {
      i.operands.push_back(constant(m->value, {"b64"}, i));
      draft.registers.push_back(-1);
    } else {
      add_operand(s, words, i, draft);
    }
  }

  uint64_t literal(Text s) const {
    bool negative = s[0] == '-';
    if (negative) s = s.substr(1);
    uint64_t value = 0;
    if (s.starts_with("0f") || s.starts_with("0F") || s.starts_with("0d") || s.starts_with("0D") ||
        s.starts_with("0x") || s.starts_with("0X"))
      std::from_chars(s.data() + 2, s.data() + s.size(), value, 16);
    else
      std::from_chars(s.data(), s.data() + s.size(), value);
    return negative ? -value : value;
  }
  uint32_t number(Text s) const { return static_cast<uint32_t>(literal(trimmed(s))); }

  // A constant. It is as wide as the last type in the opcode. It has 4 bytes if the opcode has no
  // type, and if it is the number of bits of a shift.
  Operand constant(uint64_t value, const std::vector<std::string>& words, const Instruction& i) {
    bool wide = false, predicate = false;
    for (const std::string& word : words)
      if (word.size() >= 2 && std::strchr("bsuf", word[0]) != nullptr &&
          std::isdigit(static_cast<unsigned char>(word[1])))
        wide = bytes_of(word) == 8;
    if ((words[0] == "shl" || words[0] == "shr") && i.operands.size() == 2) wide = false;
    if (words.back() == "pred") predicate = true;
    const auto [place, added] =
        constants_.try_emplace({value, wide}, static_cast<uint32_t>(kernel_.constants.size()));
    if (added) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
        kernel_.constants.insert(kernel_.constants.end(), bytes, bytes + (wide ? 8 : 4));
      }
    }
    Operand x;
    x.kind = Operand::kConstant;
    x.wide = wide;
    x.predicate = predicate;
    x.place = place->second;
    return x;
  }

  const Meaning* find(Text name) const {
    for (int scope = scope_; scope >= 0; scope = scopes_[scope].parent) {
      const auto& names = scopes_[scope].names;
      if (const auto at = names.find(name); at != names.end()) return &at->second;
    }
    return nullptr;
  }

  uint32_t register_of(Text name) {
    if (const Meaning* m = find(name); m != nullptr && m->kind == Meaning::kRegister)
      return m->value;
    if (name[0] != '%') fail("no such name: " + std::string(name));
    const std::string special(name);  // %tid.x and the like: a register that a warp starts with
    const auto number = static_cast<uint32_t>(registers_.size());
    registers_.push_back(4);
    scopes_[0].names[special] = {Meaning::kRegister, number};
    specials_[special] = number;
    return number;
  }

  // --- the end

  void resolve_labels() {
    for (size_t n = 0; n < kernel_.code.size(); ++n) {
      if (drafts_[n].label.empty()) continue;
      std::optional<uint32_t> target;
      for (int scope = drafts_[n].scope; scope >= 0 && !target; scope = scopes_[scope].parent) {
        const auto& labels = scopes_[scope].labels;
        if (const auto at = labels.find(drafts_[n].label); at != labels.end()) target = at->second;
      }
      if (!target) fail("no such label: " + drafts_[n].label);
      kernel_.code[n].target = *target;
    }
  }

  Text body_;
  Kernel kernel_;
  std::vector<Scope> scopes_;
  int scope_ = 0;
  uint32_t line_ = 1;
  std::vector<uint32_t> registers_;  // bytes of a value: 0 (a predicate), 4 or 8
  std::vector<Draft> drafts_;
  std::map<std::string, uint32_t> specials_;
  std::map<std::pair<uint64_t, bool>, uint32_t> constants_;
};

}  // namespace

Kernel parse_kernel(const std::string& name, Text globals, Text body) {
  return Parser(name, globals, body).parse();
}

}  // namespace emulator
