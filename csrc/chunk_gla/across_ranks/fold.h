// The fold of what the ranks of a text hand on, for both backends: plain, no torch header.
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
  int64_t each = 0;  // rows that a rank hands on
  int64_t rows = 0;  // of x
  int64_t H = 0, K = 0, V = 0;
  // Whose x; how many ranks before, or after, reach it; and, of packed sequences, the row that they
  // enter. Without `is_packed` they enter each row.
  int64_t rank = 0, reach = 0, entered = 0;
  bool key_gated = false, value_gated = false, v_first = false, backwards = false;
  bool is_packed = false;

  // What a rank hands on begins `stride` elements after the last one's: states [each, H, K, V];
  // with `decays` in the same memory, [each, H, K] and [each, H, V] follow.
  const T* states = nullptr;
  int64_t stride = 0;
  const T* decays = nullptr;  // of the first rank: of key channels, then of value channels
  int64_t decay_stride = 0;
  const T* boundary = nullptr;  // [rows, H, K, V] or v first: x of rows that nothing enters, else 0
  T* x = nullptr;               // [rows, H, K, V] or v first
  T* kept = nullptr;            // where they are asked for, the decays of all ranks

  constexpr int64_t decays_each() const {
    return each * H * ((key_gated ? K : 0) + (value_gated ? V : 0));
  }
  constexpr int64_t kept_elements() const { return kept == nullptr ? 0 : size * decays_each(); }

  constexpr bool is_entered(int64_t row) const {
    return reach > 0 && (!is_packed || entered == row);
  }

  // Of step i of a fold: the rank it comes from, and the row among those it hands on.
  struct Source {
    int64_t rank, row;
  };
  constexpr Source source(int64_t row, int64_t i) const {
    return {backwards ? rank + reach - i : rank - reach + i, is_packed ? 0 : row};
  }

  // Elements of the decays of one row and head.
  constexpr int64_t key_decay(const Source& s, int64_t head) const {
    return s.rank * decay_stride + (s.row * H + head) * K;
  }
  constexpr int64_t value_decay(const Source& s, int64_t head) const {
    return s.rank * decay_stride + (key_gated ? each * H * K : 0) + (s.row * H + head) * V;
  }
  constexpr int64_t state(const Source& s, int64_t head) const {
    return s.rank * stride + (s.row * H + head) * K * V;
  }
  // Of x and the boundary.
  constexpr int64_t element(int64_t row, int64_t head, int64_t k, int64_t v) const {
    return (row * H + head) * K * V + (v_first ? v * K + k : k * V + v);
  }
};

}  // namespace gla_ext
