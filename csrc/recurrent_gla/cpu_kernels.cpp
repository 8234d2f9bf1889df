// The recurrence, token by token, of one (sequence, head):
//   S_t = a_t ⊙ S_{t-1} ⊙ b_t + k_t v_tᵀ      o_t = scale S_tᵀ q_t      a = exp g, b = exp gv
// and backward, last token first, with P_t = a_t ⊙ S_{t-1} ⊙ b_t and dS the gradient of S_t:
//   dS += scale q_t do_tᵀ     dq_t = scale S_t do_t     dk_t = dS v_t     dv_t = dSᵀ k_t
//   dg_t = rowsum(P_t ⊙ dS)   dgv_t = colsum(P_t ⊙ dS)  dS = a_t ⊙ dS ⊙ b_t
//
// reads   q, k, g [T, K], v, do, gv [T, V], state_in, dstate_out [K, V]
// writes  o [T, V], state_out [K, V]; dq, dk, dg [T, K], dv, dgv [T, V], dstate_in [K, V]
// Backward keeps one state every kStateBlock tokens and computes the others again from it. So
// nothing is divided by a decay, and nothing in dg cancels. Everything is accumulated in T.
#include "cpu_kernels.h"

#include "cpu/kernel_tables.h"
#include "cpu/kernels/gates.h"

namespace gla_ext::cpu {
namespace CPU_CAPABILITY {

constexpr int64_t kStateBlock = 16;  // tokens

template <typename T>
struct RecurrentTiles {
  int64_t K = 0, Kp = 0, Vp = 0;
  T *q = nullptr, *k = nullptr, *a = nullptr;           // [Kp], scale included in q
  T *v = nullptr, *b = nullptr, *o = nullptr;           // [Vp]
  T* S = nullptr;                                       // [K, Vp]
  T *d_o = nullptr, *dv = nullptr, *dgv = nullptr;      // [Vp]
  T *dq = nullptr, *dk = nullptr, *dg = nullptr;        // [Kp]
  T *dS = nullptr, *before = nullptr, *kept = nullptr;  // [K, Vp], [kStateBlock | blocks, K, Vp]

  // Lays the tiles out from `base`; with base == nullptr only counts. Returns the number of
  // elements.
  int64_t carve(T* base, int64_t K_, int64_t V, int64_t tokens, bool backward) {
    K = K_, Kp = padded(K_), Vp = padded(V);
    int64_t used = 0;
    const auto take = [&](int64_t n) {
      T* p = base == nullptr ? nullptr : base + used;
      used += n;
      return p;
    };
    for (T** p : {&q, &k, &a}) *p = take(Kp);
    for (T** p : {&v, &b, &o}) *p = take(Vp);
    S = take(K * Vp);
    if (!backward) return used;
    for (T** p : {&d_o, &dv, &dgv}) *p = take(Vp);
    for (T** p : {&dq, &dk, &dg}) *p = take(Kp);
    dS = take(K * Vp);
    before = take(kStateBlock * K * Vp);
    kept = take((tokens + kStateBlock - 1) / kStateBlock * K * Vp);
    return used;
  }
  int64_t state_size() const { return K * Vp; }
};

template <typename T>
int64_t recurrent_workspace(int64_t K, int64_t V, int64_t tokens, bool backward) {
  return RecurrentTiles<T>{}.carve(nullptr, K, V, tokens, backward);
}

// Offset of a token's row in one of the run's tensors; `t` counts in the order of the recurrence.
template <typename T>
inline int64_t row_offset(const Problem<T>& p, const Rows& rows, const Run<T>& run, int64_t t) {
  const int64_t token = run.start + (p.reverse ? run.length - 1 - t : t);
  return run.row * rows.stride_b + token * rows.stride_t + rows.head_offset(run.head);
}

// dst[padded(D)] <- a token's row, then zeros; zeros alone if the tensor is absent.
template <typename T>
inline void load_token(T* dst, const Problem<T>& p, const Rows& rows, const Run<T>& run, int64_t t,
                       int64_t D) {
  const int64_t n = rows.data == nullptr ? 0 : D;
  if (n > 0) convert_row(dst, rows.data, rows.dtype, row_offset(p, rows, run, t), n);
  std::memset(dst + n, 0, (padded(D) - n) * sizeof(T));
}

template <typename T>
inline void store_token(const T* src, const Problem<T>& p, const Rows& rows, const Run<T>& run,
                        int64_t t, int64_t D) {
  if (rows.data != nullptr)
    convert_row_back(rows.data, rows.dtype, row_offset(p, rows, run, t), src, D);
}

// exp of the gates; exactly 0 for a reset, 1 without gates, and NaN stays NaN.
template <typename T>
inline void load_decay(T* dst, const Problem<T>& p, const Rows& rows, const Run<T>& run, int64_t t,
                       int64_t D) {
  load_token(dst, p, rows, run, t, D);
  const Vec<T> log2e{T(kLog2E)}, low(kMinGate<T>), zero(T(0));
  map<T>(
      padded(D), [&](Vec<T> g) { return Vec<T>::blendv(g.exp(), zero, g * log2e < low); }, dst,
      dst);
}

template <typename T>
inline void load_step(const Problem<T>& p, const Run<T>& run, int64_t t, RecurrentTiles<T>& w) {
  load_token(w.q, p, p.q, run, t, p.K);
  load_token(w.k, p, p.k, run, t, p.K);
  load_token(w.v, p, p.v, run, t, p.V);
  load_decay(w.a, p, p.g, run, t, p.K);
  load_decay(w.b, p, p.gv, run, t, p.V);
  const Vec<T> scale(p.scale);
  map<T>(w.Kp, [&](Vec<T> q) { return q * scale; }, w.q, w.q);
}

// Vectors that cover kPad columns.
template <typename T>
constexpr int kColumnVecs = kPad / Vec<T>::size();

// Rows of a state that are summed before they are added to the others: one sum of 1,000 would be
// off by more than 1e-6 of it in fp32.
constexpr int64_t kSummedRows = 128;

// Computes S and o of one token.
template <typename T>
inline void forward_token(RecurrentTiles<T>& w) {
  constexpr int n = kColumnVecs<T>;
  constexpr int64_t width = Vec<T>::size();
  std::memset(w.o, 0, w.Vp * sizeof(T));
  for (int64_t j = 0; j < w.Vp; j += kPad) {
    Vec<T> v[n], b[n];
#pragma GCC unroll 4
    for (int x = 0; x < n; ++x) {
      v[x] = Vec<T>::loadu(w.v + j + x * width);
      b[x] = Vec<T>::loadu(w.b + j + x * width);
    }
    for (int64_t first = 0; first < w.K; first += kSummedRows) {
      const int64_t end = first + kSummedRows < w.K ? first + kSummedRows : w.K;
      Vec<T> o[n];
#pragma GCC unroll 4
      for (int x = 0; x < n; ++x) o[x] = Vec<T>(T(0));
      for (int64_t i = first; i < end; ++i) {
        const Vec<T> a(w.a[i]), k(w.k[i]), q(w.q[i]);
        T* row = w.S + i * w.Vp + j;
#pragma GCC unroll 4
        for (int x = 0; x < n; ++x) {
          const Vec<T> S = at::vec::fmadd(k, v[x], a * Vec<T>::loadu(row + x * width) * b[x]);
          S.store(row + x * width);
          o[x] = at::vec::fmadd(q, S, o[x]);
        }
      }
#pragma GCC unroll 4
      for (int x = 0; x < n; ++x) {
        T* sum = w.o + j + x * width;
        (Vec<T>::loadu(sum) + o[x]).store(sum);
      }
    }
  }
}

template <typename T>
void recurrent_forward(const Problem<T>& p, T* workspace, const Run<T>& run) {
  RecurrentTiles<T> w;
  w.carve(workspace, p.K, p.V, run.length, /*backward=*/false);
  load_state(w.S, w.Vp, run.state_in, run.state_dtype, p.state_v_first, p.K, p.V, w.k);
  for (int64_t t = 0; t < run.length; ++t) {
    load_step(p, run, t, w);
    forward_token(w);
    store_token(w.o, p, p.o, run, t, p.V);
  }
  if (run.state_out != nullptr)
    store_state(run.state_out, run.state_dtype, p.state_v_first, p.K, p.V, w.S, w.Vp, w.k);
}

// Computes one token's gradients. w.dS is first the gradient of S_t, without what o_t adds, and
// becomes that of S_{t-1}.
template <typename T>
inline void backward_token(const T* before, RecurrentTiles<T>& w) {
  constexpr int64_t width = Vec<T>::size();
  std::memset(w.dv, 0, w.Vp * sizeof(T));
  std::memset(w.dgv, 0, w.Vp * sizeof(T));
  for (int64_t i = 0; i < w.K; ++i) {
    const Vec<T> a(w.a[i]), k(w.k[i]), q(w.q[i]);
    Vec<T> dq(T(0)), dk(T(0)), dg(T(0));
    T* row = w.dS + i * w.Vp;
    for (int64_t j = 0; j < w.Vp; j += width) {
      const Vec<T> v = Vec<T>::loadu(w.v + j), b = Vec<T>::loadu(w.b + j);
      const Vec<T> d_o = Vec<T>::loadu(w.d_o + j);
      const Vec<T> P = a * Vec<T>::loadu(before + i * w.Vp + j) * b;
      const Vec<T> dS = at::vec::fmadd(q, d_o, Vec<T>::loadu(row + j));
      dq = at::vec::fmadd(at::vec::fmadd(k, v, P), d_o, dq);
      dk = at::vec::fmadd(dS, v, dk);
      dg = at::vec::fmadd(P, dS, dg);
      at::vec::fmadd(k, dS, Vec<T>::loadu(w.dv + j)).store(w.dv + j);
      at::vec::fmadd(P, dS, Vec<T>::loadu(w.dgv + j)).store(w.dgv + j);
      (a * dS * b).store(row + j);
    }
    w.dq[i] = sum_of_lanes(dq);
    w.dk[i] = sum_of_lanes(dk);
    w.dg[i] = w.a[i] == T(0) ? T(0) : sum_of_lanes(dg);
  }
  const Vec<T> zero(T(0));
  map<T>(
      w.Vp, [&](Vec<T> dgv, Vec<T> b) { return Vec<T>::blendv(dgv, zero, b == zero); }, w.dgv,
      w.dgv, w.b);
}

// Steps the state through a block's tokens. keep: stores the state before each token in w.before.
template <typename T>
void replay(const Problem<T>& p, const Run<T>& run, int64_t first, int64_t tokens, bool keep,
            RecurrentTiles<T>& w) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (keep) std::memcpy(w.before + t * w.state_size(), w.S, w.state_size() * sizeof(T));
    if (keep && t + 1 == tokens) return;
    load_step(p, run, first + t, w);
    forward_token(w);
  }
}

template <typename T>
void recurrent_backward(const Problem<T>& p, T* workspace, const Run<T>& run) {
  RecurrentTiles<T> w;
  w.carve(workspace, p.K, p.V, run.length, /*backward=*/true);
  const int64_t size = w.state_size(), blocks = (run.length + kStateBlock - 1) / kStateBlock;
  load_state(w.S, w.Vp, run.state_in, run.state_dtype, p.state_v_first, p.K, p.V, w.k);
  for (int64_t n = 0; n < blocks; ++n) {
    std::memcpy(w.kept + n * size, w.S, size * sizeof(T));
    if (n + 1 < blocks) replay(p, run, n * kStateBlock, kStateBlock, /*keep=*/false, w);
  }
  load_state(w.dS, w.Vp, run.dstate_out, run.state_dtype, p.state_v_first, p.K, p.V, w.k);
  for (int64_t n = blocks - 1; n >= 0; --n) {
    const int64_t first = n * kStateBlock;
    const int64_t tokens = run.length - first < kStateBlock ? run.length - first : kStateBlock;
    std::memcpy(w.S, w.kept + n * size, size * sizeof(T));
    replay(p, run, first, tokens, /*keep=*/true, w);
    for (int64_t t = tokens - 1; t >= 0; --t) {
      load_step(p, run, first + t, w);
      load_token(w.d_o, p, p.d_o, run, first + t, p.V);
      backward_token(w.before + t * size, w);
      const Vec<T> scale(p.scale);
      map<T>(w.Kp, [&](Vec<T> dq) { return dq * scale; }, w.dq, w.dq);
      store_token(w.dq, p, p.dq, run, first + t, p.K);
      store_token(w.dk, p, p.dk, run, first + t, p.K);
      store_token(w.dg, p, p.dg, run, first + t, p.K);
      store_token(w.dv, p, p.dv, run, first + t, p.V);
      store_token(w.dgv, p, p.dgv, run, first + t, p.V);
    }
  }
  if (run.dstate_in != nullptr)
    store_state(run.dstate_in, run.state_dtype, p.state_v_first, p.K, p.V, w.dS, w.Vp, w.k);
}

template <typename T>
int64_t buffered_workspace(int64_t K, int64_t V, int64_t drafts, int64_t tokens) {
  const int64_t Kp = padded(K), Vp = padded(V);
  return drafts * (Kp + 2 * Vp + tokens) + 2 * Kp + (Kp > Vp ? Kp : Vp);
}

template <typename T>
inline T dot(const T* x, const T* y, int64_t n) {
  Vec<T> sum(T(0));
  for (int64_t i = 0; i < n; i += Vec<T>::size())
    sum = at::vec::fmadd(Vec<T>::loadu(x + i), Vec<T>::loadu(y + i), sum);
  return sum_of_lanes(sum);
}

template <typename T>
inline void add_multiple(T* to, T factor, const T* x, int64_t n) {
  const Vec<T> f(factor);
  map<T>(n, [&](Vec<T> y, Vec<T> sum) { return at::vec::fmadd(f, y, sum); }, to, x, to);
}

// The chunk form, with running products of decays w_tj = a_{j+1} .. a_t, 1 for t = j:
//   o_t = Sᵀ (q_t ⊙ a_0 .. a_t) + Σ_{j <= t} A_tj v_j      A_tj = Σ_d q_td k_jd w_tjd
// The state is read once, in its own layout.
template <typename T>
void buffered(const Problem<T>& p, T* workspace, const BufferedRun<T>& run) {
  const int64_t Kp = padded(p.K), Vp = padded(p.V);
  const int64_t drafts = run.drafts.length, tokens = run.buffer.length, first = tokens - drafts;
  T *q = workspace, *o = q + drafts * Kp, *A = o + drafts * Vp;  // [drafts, Kp | Vp | tokens]
  T *part = A + drafts * tokens, *k = part + drafts * Vp, *a = k + Kp, *row = a + Kp;
  const Vec<T> scale(p.scale);
  for (int64_t t = 0; t < drafts; ++t) {
    load_token(q + t * Kp, p, p.q, run.drafts, t, p.K);
    map<T>(Kp, [&](Vec<T> x) { return x * scale; }, q + t * Kp, q + t * Kp);
  }
  for (int64_t j = tokens - 1; j >= 0; --j) {
    load_token(k, p, p.k, run.buffer, j, p.K);
    load_decay(a, p, p.g, run.buffer, j, p.K);
    for (int64_t t = j > first ? j - first : 0; t < drafts; ++t) {
      A[t * tokens + j] = dot(q + t * Kp, k, Kp);
      map<T>(Kp, Times(), q + t * Kp, q + t * Kp, a);
    }
  }
  std::memset(o, 0, drafts * Vp * sizeof(T));
  for (int64_t j = 0; j < tokens; ++j) {
    load_token(row, p, p.v, run.buffer, j, p.V);
    for (int64_t t = j > first ? j - first : 0; t < drafts; ++t)
      add_multiple(o + t * Vp, A[t * tokens + j], row, Vp);
  }
  std::memset(part, 0, drafts * Vp * sizeof(T));  // of o, the rows since it was last added
  const int64_t rows = p.state_v_first ? p.V : p.K, columns = p.state_v_first ? p.K : p.V;
  for (int64_t i = 0; i < rows; ++i) {
    convert_row(row, run.buffer.state_in, run.buffer.state_dtype, i * columns, columns);
    std::memset(row + columns, 0, (padded(columns) - columns) * sizeof(T));
    for (int64_t t = 0; t < drafts; ++t)
      if (p.state_v_first)
        o[t * Vp + i] += dot(q + t * Kp, row, Kp);
      else
        add_multiple(part + t * Vp, q[t * Kp + i], row, Vp);
    if (!p.state_v_first && ((i + 1) % kSummedRows == 0 || i + 1 == rows)) {
      map<T>(drafts * Vp, [](Vec<T> x, Vec<T> y) { return x + y; }, o, o, part);
      std::memset(part, 0, drafts * Vp * sizeof(T));
    }
  }
  for (int64_t t = 0; t < drafts; ++t) store_token(o + t * Vp, p, p.o, run.drafts, t, p.V);
}

}  // namespace CPU_CAPABILITY

template <>
const RecurrentKernels<float> KernelTables<RecurrentKernels<float>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::recurrent_workspace<float>, CPU_CAPABILITY::recurrent_forward<float>,
    CPU_CAPABILITY::recurrent_backward<float>, CPU_CAPABILITY::buffered_workspace<float>,
    CPU_CAPABILITY::buffered<float>};
template <>
const RecurrentKernels<double> KernelTables<RecurrentKernels<double>>::CPU_CAPABILITY = {
    CPU_CAPABILITY::recurrent_workspace<double>, CPU_CAPABILITY::recurrent_forward<double>,
    CPU_CAPABILITY::recurrent_backward<double>, CPU_CAPABILITY::buffered_workspace<double>,
    CPU_CAPABILITY::buffered<double>};

}  // namespace gla_ext::cpu
