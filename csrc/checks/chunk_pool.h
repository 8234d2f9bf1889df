// The input contract of chunk_gla_, once, for every backend and for tracing.
#pragma once

#include "arguments.h"

namespace gla_ext {

constexpr int64_t kMostCheckpointTokens = int64_t{1} << 30;  // between two of a sequence

Shape check_chunk_gla_on_pool(const PoolArguments& a);

// For backends: the pool, the checkpoints and `out` are written where they lie.
void check_pool_layouts(const PoolArguments& a);

}  // namespace gla_ext
