// The chunk grid that every backend shares: it starts at each sequence's first token.
#pragma once

#include <cstdint>

namespace gla_ext {

constexpr int64_t kChunk = 64;     // C: tokens per chunk
constexpr int64_t kSubChunk = 16;  // c: tokens per sub-chunk

}  // namespace gla_ext
