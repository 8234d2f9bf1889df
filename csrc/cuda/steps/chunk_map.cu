// Finds the chunks of a packed batch. It uses only cu_seqlens and runs on the device, so that a
// captured graph can be replayed with other offsets.
//
// reads   cu_seqlens [N + 1]
// writes  sequences [N + 1], of which the last is the tokens after every sequence; chunk_entries
//         [entries]
//
// For the fused path it also writes by_last_segment [N + 1] (sequences sorted by their last
// segments), cut_sequences (sequences of several segments) and totals. On a pool the recurrence
// takes short sequences. These have no chunks here, and no row in the entries that the other
// kernels read.
//
// Offsets are clamped to [0, T], so that wrong offsets never lead outside a tensor. The results are
// then undefined, and so, on a pool, are the rows of the call's own sequences.
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "cuda/device/launch.cuh"
#include "cuda/device/packed.cuh"
#include "cuda/device/states.cuh"

namespace gla_ext::cuda {
namespace {

constexpr int kMapThreads = 512;
constexpr int kSortedEach = 4;  // sequences per thread that are sorted at once

__device__ int64_t offset(const ChunkGrid& grid, int64_t n) {
  const int64_t x = grid.offsets_are_int64 ? static_cast<const int64_t*>(grid.cu_seqlens)[n]
                                           : static_cast<const int32_t*>(grid.cu_seqlens)[n];
  return x < 0 ? 0 : x > grid.T ? grid.T : x;
}

// The number of segments of a sequence of `chunks` chunks.
__device__ int64_t segments_of(const ChunkGrid& grid, int64_t chunks) {
  if (grid.segment_chunks == 0) return 1;
  return max(blocks_of(chunks, grid.segment_chunks), int64_t{1});
}

// Chooses the number of chunks of a summary, if `followed` segments are followed by another. It is
// as small as possible while the blocks of all summaries are resident at once, and at most a
// segment's.
__device__ int64_t choose_summary_chunks(const ChunkGrid& grid, int64_t followed) {
  int64_t parts = 1;
  while (parts < kMostSummaries && grid.segment_chunks % (2 * parts) == 0 &&
         grid.segment_chunks >= 2 * parts * kLeastSummaryChunks &&
         2 * parts * followed <= grid.summaries_at_once)
    parts *= 2;
  return grid.segment_chunks / parts;
}

// Sorts sequences by the number of chunks of their last segments, some thousands at a time; all
// other segments have full length. Called by a whole block.
__device__ void sort_sequences(const ChunkGrid& grid) {
  constexpr int kEach = kSortedEach;
  using Sort = cub::BlockRadixSort<uint32_t, kMapThreads, kEach, int32_t>;
  __shared__ typename Sort::TempStorage storage;
  const int64_t most = grid.segment_chunks > 0 ? grid.segment_chunks : grid.entries;
  int bits = 1;  // of a sort key
  while (most + 1 >= int64_t{1} << bits) ++bits;
  for (int64_t first = 0; first <= grid.N; first += kMapThreads * kEach) {
    const int64_t own = first + threadIdx.x * kEach;
    uint32_t keys[kEach];
    int32_t sequences[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t n = own + i;
      sequences[i] = static_cast<int32_t>(n);
      keys[i] = 0;  // sorted last
      if (n > grid.N) continue;
      const int64_t chunks = blocks_of(grid.sequences[n].length, kChunk);
      const int64_t before = (segments_of(grid, chunks) - 1) * grid.segment_chunks;
      keys[i] = static_cast<uint32_t>(1 + chunks - before);
    }
    Sort(storage).SortDescending(keys, sequences, 0, bits);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (own + i <= grid.N) grid.by_last_segment[own + i] = sequences[i];
    __syncthreads();  // before the storage is used again
  }
}

// Leaves short sequences to the recurrence and keeps the rows of the others.
__device__ void leave_to_recurrence(const Problem& p, int64_t n, Sequence& sequence) {
  const ShortSequences& given = p.short_sequences;
  const bool is_short = sequence.length <= given.most_tokens;
  if (is_short) sequence.length = 0;
  given.others[n] = is_short ? -1 : index_or(given.slots, n);
}

}  // namespace

namespace steps {

// Runs in one block: a running scan over the chunks of sequences, kMapThreads of them at a time.
__global__ void __launch_bounds__(kMapThreads) map_sequences(Problem p) {
  using Scan = cub::BlockScan<int64_t, kMapThreads>;
  __shared__ typename Scan::TempStorage storage;
  const ChunkGrid& grid = p.grid;
  const int64_t most = most_followed(grid, grid.N);
  // The low 32 bits sum segments or states; the bits above count the sequences that have any.
  constexpr int64_t kOneSequence = int64_t{1} << 32;
  const bool leaves_short = p.short_sequences.others != nullptr;
  int64_t done = 0, segments_done = 0, states_done = 0;
  for (int64_t first = 0; first <= grid.N; first += kMapThreads) {
    const int64_t n = first + threadIdx.x;
    Sequence sequence{0, 0, 0, 0, 0};
    if (n <= grid.N) {
      sequence.start = offset(grid, n);
      const int64_t end = n < grid.N ? offset(grid, n + 1) : grid.T;
      sequence.length = end > sequence.start ? end - sequence.start : 0;
      if (leaves_short && n < grid.N) leave_to_recurrence(p, n, sequence);
    }
    const int64_t chunks = (sequence.length + kChunk - 1) / kChunk;
    int64_t before, total;
    Scan(storage).ExclusiveSum(chunks, before, total);
    sequence.first_entry = done + before;
    if (n <= grid.N) {
      // Decreasing offsets could need more chunks than S and the entries have.
      const int64_t left = (n < grid.N ? grid.chunks : grid.entries) - sequence.first_entry;
      if (chunks > left) sequence.length = left > 0 ? left * kChunk : 0;
      grid.sequences[n] = sequence;
    }
    done += total;
    __syncthreads();  // before the storage is used again
    if (grid.totals == nullptr) continue;
    const int64_t segments = segments_of(grid, blocks_of(sequence.length, kChunk));
    const bool is_visited = sequence.length > 0 || !leaves_short;  // else the recurrence has it
    Scan(storage).ExclusiveSum(n <= grid.N ? segments + is_visited * kOneSequence : 0, before,
                               total);
    if (n <= grid.N) {
      const int64_t own = (segments_done + before) % kOneSequence;
      grid.sequences[n].first_segment = own;
      // Also empties a sequence if more segments are followed by another than there are states.
      if (segments > 1 && own - n + segments - 1 > most) grid.sequences[n].length = 0;
    }
    segments_done += total;
    __syncthreads();  // before the storage is used again
  }
  if (grid.totals == nullptr) return;
  const int64_t followed = min(segments_done % kOneSequence - (grid.N + 1), most);
  const int64_t summary_chunks = choose_summary_chunks(grid, followed);
  for (int64_t first = 0; first <= grid.N && followed > 0; first += kMapThreads) {
    const int64_t n = first + threadIdx.x;
    const int64_t chunks = n <= grid.N ? blocks_of(grid.sequences[n].length, kChunk) : 0;
    const int64_t states = chunks > grid.segment_chunks ? blocks_of(chunks, summary_chunks) : 0;
    int64_t before, total;
    const bool is_cut = states > 0 && n < grid.N;  // the tokens after the last one have no state
    Scan(storage).ExclusiveSum(is_cut ? kOneSequence + states : states, before, total);
    before += states_done;
    if (n <= grid.N) grid.sequences[n].first_state = before % kOneSequence;
    if (is_cut) p.cut_sequences[before / kOneSequence] = static_cast<int32_t>(n);
    states_done += total;
    __syncthreads();  // before the storage is used again
  }
  if (threadIdx.x != 0) return;
  // If all sequences are sorted at once, those without tokens come last.
  const bool are_last = grid.N < kMapThreads * kSortedEach;
  *grid.totals = {followed, states_done % kOneSequence, summary_chunks, states_done / kOneSequence,
                  are_last ? segments_done / kOneSequence : grid.N + 1};
}

// One thread per entry; then one block that sorts the sequences, if the order is needed.
__global__ void __launch_bounds__(kMapThreads) map_chunks(Problem p) {
  const ChunkGrid& grid = p.grid;
  if (blockIdx.x == blocks_of(grid.entries, kMapThreads)) return sort_sequences(grid);
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * kMapThreads + threadIdx.x;
  if (entry >= grid.entries) return;
  const uint32_t n = find_packed(grid, static_cast<uint32_t>(entry),
                                 [&](uint32_t n) { return grid.sequences[n].first_entry; });
  const Sequence sequence = grid.sequences[n];
  const int64_t done = (entry - sequence.first_entry) * kChunk;
  const int64_t left = sequence.length - done;
  grid.chunk_entries[entry] = {sequence.start + done,
                               static_cast<int32_t>(left <= 0       ? 0
                                                    : left < kChunk ? left
                                                                    : kChunk),
                               static_cast<int32_t>(n < grid.N && is_skipped(p, n) ? grid.N : n)};
}

}  // namespace steps

void launch_map_sequences(const Problem& p, cudaStream_t stream) {
  launch(steps::map_sequences, 1, kMapThreads, p, stream);
}

void launch_map_chunks(const Problem& p, cudaStream_t stream) {
  const int64_t blocks = blocks_of(p.grid.entries, kMapThreads);
  launch(steps::map_chunks, blocks + (p.grid.by_last_segment != nullptr), kMapThreads, p, stream);
}

}  // namespace gla_ext::cuda
