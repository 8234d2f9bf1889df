// The workspaces of cuBLAS, which torch keeps for each thread and stream.
#pragma once

namespace gla_ext::cuda {

// Drops those of a stream. Its next product gets another one: in a capture, from the graph's
// memory.
void drop_workspaces(void* stream);

}  // namespace gla_ext::cuda
