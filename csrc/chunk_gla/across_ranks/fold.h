// The fold of the summaries that ranks pass on, for both backends: plain, no torch header.
//
//   x <- exp(decay_i) x + state_i      over the ranks before, the first of them first; of gradients
//                                      over the ranks after, the last of them first
//
// A decay of 0 is an exact reset: x may be infinite there.
#pragma once

#include <cstdint>

namespace gla_ext {

// T: float or double.
template <class T>
struct Fold {
  int64_t size = 0;  // ranks
  int64_t each = 0;  // rows that a rank passes on
  int64_t rows = 0;  // of x
  int64_t H = 0, K = 0, V = 0;
  // The rank that x belongs to; how many ranks before, or after, reach it; and, for packed
  // sequences, the row that they enter. Without `is_packed` they enter each row.
  int64_t rank = 0, reach = 0, entered = 0;
  bool key_gated = false, value_gated = false, v_first = false, backwards = false;
  bool is_packed = false;

  // A rank's summary starts `stride` elements after that of the rank before. It has states [each,
  // H, K, V]; if `decays` is in the same memory, [each, H, K] and [each, H, V] follow.
  const T* states = nullptr;
  int64_t stride = 0;
  const T* decays = nullptr;  // of the first rank: of key channels, then of value channels
  int64_t decay_stride = 0;
  const T* boundary = nullptr;  // [rows, H, K, V] or v first: x of rows that nothing enters, else 0
  T* x = nullptr;               // [rows, H, K, V] or v first
  T* kept = nullptr;            // the decays of all ranks, if asked for

  constexpr int64_t decays_each() const {
    return each * H * ((key_gated ? K : 0) + (value_gated ? V : 0));
  }
  constexpr int64_t kept_elements() const { return kept == nullptr ? 0 : size * decays_each(); }

  constexpr bool is_entered(int64_t row) const {
    return reach > 0 && (!is_packed || entered == row);
  }

  // The source of step i of a fold: a rank, and a row among those that it passes on.
  struct Source {
    int64_t rank, row;
  };
  constexpr Source source(int64_t row, int64_t i) const {
    return {backwards ? rank + reach - i : rank - reach + i, is_packed ? 0 : row};
  }

  // Offset of the decays of one row and head.
  constexpr int64_t key_decay(const Source& s, int64_t head) const {
    return s.rank * decay_stride + (s.row * H + head) * K;
  }
  constexpr int64_t value_decay(const Source& s, int64_t head) const {
    return s.rank * decay_stride + (key_gated ? each * H * K : 0) + (s.row * H + head) * V;
  }
  constexpr int64_t state(const Source& s, int64_t head) const {
    return s.rank * stride + (s.row * H + head) * K * V;
  }
  // Offset in x and in the boundary.
  constexpr int64_t element(int64_t row, int64_t head, int64_t k, int64_t v) const {
    return (row * H + head) * K * V + (v_first ? v * K + k : k * V + v);
  }
};

}  // namespace gla_ext
