// PTX as text: its names, lists and types.
#pragma once

#include <cctype>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace emulator {

using Text = std::string_view;

inline bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%';
}

inline Text trimmed(Text s) {
  const auto first = s.find_first_not_of(" \t\r\n");
  return first == Text::npos ? Text() : s.substr(first, s.find_last_not_of(" \t\r\n") - first + 1);
}

// Parts between separators that are not in brackets.
inline std::vector<Text> split(Text s, char separator) {
  std::vector<Text> parts;
  int depth = 0;
  size_t start = 0;
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '{' || s[i] == '[' || s[i] == '(') ++depth;
    if (s[i] == '}' || s[i] == ']' || s[i] == ')') --depth;
    if (s[i] == separator && depth == 0) {
      parts.push_back(trimmed(s.substr(start, i - start)));
      start = i + 1;
    }
  }
  if (Text last = trimmed(s.substr(start)); !last.empty()) parts.push_back(last);
  return parts;
}

inline std::vector<std::string> words_of(Text opcode) {
  std::vector<std::string> words;
  for (const Text part : split(opcode, '.'))
    if (const Text word = trimmed(part); !word.empty()) {
      Text rest = word;
      for (size_t i = rest.find("::"); i != Text::npos; i = rest.find("::")) {
        words.emplace_back(rest.substr(0, i));
        rest = rest.substr(i + 2);
      }
      words.emplace_back(rest);
    }
  return words;
}

inline uint32_t bytes_of(Text type) {
  if (type == "pred") return 0;
  const auto digits = type.find_first_of("0123456789");
  uint32_t bits = 0;
  std::from_chars(type.data() + digits, type.data() + type.size(), bits);
  return bits / 8;
}

}  // namespace emulator
