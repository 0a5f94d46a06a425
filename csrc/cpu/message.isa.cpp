// Interprets the instructions of a message for tiles of edges. A value of a tile is a small matrix in
// scratch memory that stays in the cache; each instruction is a loop over vectors.
#include "params/message.h"

#include <limits>

#include "elementary.h"
#include "lane_groups.h"
#include "long_sums.h"
#include "params/dropout.h"
#include "params/random.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {
namespace {

// A function apart from its callers: the compiler optimises others as without it.
#define PYG_FAST_APART __attribute__((noinline))

// Vectors

template <typename Acc>
PYG_FAST_INLINE M<Acc> first_lanes(int64_t count) {
  M<Acc> lane;
  for (int k = 0; k < kWidth<Acc>; ++k) lane[k] = k;
  return lane < static_cast<mask_t<Acc>>(count);
}

// The first `count` numbers at p, then zeros.
template <typename Acc>
PYG_FAST_INLINE V<Acc> load_part(const Acc* p, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Acc) == 4) {
    return bit_cast<V<Acc>>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p));
  } else {
    return bit_cast<V<Acc>>(_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), p));
  }
#elif defined(__AVX2__)
  const auto mask = bit_cast<__m256i>(first_lanes<Acc>(count));
  if constexpr (sizeof(Acc) == 4) {
    return bit_cast<V<Acc>>(_mm256_maskload_ps(p, mask));
  } else {
    return bit_cast<V<Acc>>(_mm256_maskload_pd(p, mask));
  }
#else
  V<Acc> v = {};
  for (int64_t k = 0; k < count; ++k) v[k] = p[k];
  return v;
#endif
}

template <typename Acc>
PYG_FAST_INLINE void store_part(Acc* p, V<Acc> v, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Acc) == 4) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), bit_cast<__m512>(v));
  } else {
    _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << count) - 1), bit_cast<__m512d>(v));
  }
#elif defined(__AVX2__)
  const auto mask = bit_cast<__m256i>(first_lanes<Acc>(count));
  if constexpr (sizeof(Acc) == 4) {
    _mm256_maskstore_ps(p, mask, bit_cast<__m256>(v));
  } else {
    _mm256_maskstore_pd(p, mask, bit_cast<__m256d>(v));
  }
#else
  for (int64_t k = 0; k < count; ++k) p[k] = v[k];
#endif
}

template <typename Acc>
PYG_FAST_INLINE V<Acc> truth(M<Acc> mask) {
  return masked<Acc, kWidth<Acc>>(all<Acc>(1), mask);
}

// Loops

// An index has so many more numbers, those of the edges that follow: their rows are prefetched.
constexpr int64_t kAhead = 16;

// Row e by its number in an index, while row e + kAhead comes: n numbers of it, none if n is 0.
template <typename Acc>
PYG_FAST_INLINE const Acc* indexed_row(const Acc* p, const int64_t* index, int64_t e, int64_t row,
                                       int64_t n) {
  const char* next = reinterpret_cast<const char*>(p + index[e + kAhead] * row);
  const int64_t bytes = n * static_cast<int64_t>(sizeof(Acc));
  for (int64_t b = 0; b < bytes; b += kCacheLine) __builtin_prefetch(next + b);
  return p + index[e] * row;
}

// Rows of `n` numbers. Row i of operand k begins at in[k] + (index[k] ? index[k][i] : i) * row[k].
template <typename Acc, int kIn>
struct Rows {
  Acc* out;
  int64_t out_row;
  const Acc* in[kIn];
  const int64_t* index[kIn];
  int64_t row[kIn];
  int64_t inner[kIn];  // the stride in a row; that of `out` is 1
  int64_t ahead[kIn];  // numbers to prefetch of a row by an index
  int64_t count;
  int64_t n;

  PYG_FAST_INLINE const Acc* at(int k, int64_t i) const {
    return index[k] != nullptr ? indexed_row(in[k], index[k], i, row[k], ahead[k])
                               : in[k] + i * row[k];
  }
};

template <typename Acc>
PYG_FAST_INLINE V<Acc> fetch(const Acc* p, int64_t stride, int64_t c) {
  if (stride == 1) return load<kWidth<Acc>>(p + c);
  if (stride == 0) return all<Acc>(*p);
  V<Acc> v;
  for (int k = 0; k < kWidth<Acc>; ++k) v[k] = p[(c + k) * stride];
  return v;
}

template <typename Acc>
PYG_FAST_INLINE V<Acc> fetch_part(const Acc* p, int64_t stride, int64_t c, int64_t count) {
  if (stride == 1) return load_part<Acc>(p + c, count);
  if (stride == 0) return all<Acc>(*p);
  V<Acc> v = {};
  for (int64_t k = 0; k < count; ++k) v[k] = p[(c + k) * stride];
  return v;
}

// R rows of kWidth / R numbers, from row i on; with a stride of 0 a row has one number.
template <typename Acc, int R, int kStride, int kIn>
PYG_FAST_INLINE V<Acc> fetch_rows(const Rows<Acc, kIn>& rows, int k, int64_t i) {
  constexpr int kPart = kWidth<Acc> / R;
  if constexpr (kStride == 1) {
    if (rows.index[k] == nullptr && rows.row[k] == kPart) return load<kWidth<Acc>>(rows.at(k, i));
  } else if (rows.index[k] == nullptr && rows.row[k] == 1) {
    return repeated<Acc, kWidth<Acc>, kPart>(load_part<Acc>(rows.at(k, i), R));
  }
  Vec<Acc, kPart> part[R];
  PYG_FAST_UNROLL
  for (int r = 0; r < R; ++r) {
    const Acc* p = rows.at(k, i + r);
    if constexpr (kStride == 1) part[r] = load<kPart>(p);
    else part[r] = splat<kPart>(*p);
  }
  return bit_cast<V<Acc>>(part);
}

// Calls f with vectors of R rows each. Returns the number of rows that are done.
template <typename Acc, int R, int kA, int kB, int kC, int kIn, typename F>
PYG_FAST_INLINE int64_t packed_rows(const Rows<Acc, kIn>& rows, const F& f) {
  int64_t i = 0;
  for (; i + R <= rows.count; i += R) {
    V<Acc> v[kIn];
    v[0] = fetch_rows<Acc, R, kA>(rows, 0, i);
    if constexpr (kIn > 1) v[1] = fetch_rows<Acc, R, kB>(rows, 1, i);
    if constexpr (kIn > 2) v[2] = fetch_rows<Acc, R, kC>(rows, 2, i);
    store<kWidth<Acc>>(rows.out + i * rows.n, f(v));
  }
  return i;
}

// Calls f with the vectors of the operands. Strides below 0 are those that only `rows` knows.
template <typename Acc, int kIn, int kA, int kB, int kC = -1, typename F>
PYG_FAST_INLINE void rows_loop(const Rows<Acc, kIn>& rows, const F& f) {
  constexpr int kV = kWidth<Acc>;
  const int64_t strides[3] = {kA >= 0 ? kA : rows.inner[0],
                              kB >= 0 || kIn < 2 ? kB : rows.inner[kIn > 1 ? 1 : 0],
                              kC >= 0 ? kC : rows.inner[kIn - 1]};
  int64_t i = 0;
  if constexpr (kA >= 0 && (kIn < 2 || kB >= 0) && (kIn < 3 || kC >= 0) && kV >= 8) {
    if (rows.out_row == rows.n && rows.n == kV / 2) i = packed_rows<Acc, 2, kA, kB, kC>(rows, f);
    if (rows.out_row == rows.n && rows.n == kV / 4) i = packed_rows<Acc, 4, kA, kB, kC>(rows, f);
    if constexpr (kV >= 16) {
      if (rows.out_row == rows.n && rows.n == kV / 8) i = packed_rows<Acc, 8, kA, kB, kC>(rows, f);
    }
  }
  for (; i < rows.count; ++i) {
    Acc* out = rows.out + i * rows.out_row;
    const Acc* p[kIn];
    PYG_FAST_UNROLL
    for (int k = 0; k < kIn; ++k) p[k] = rows.at(k, i);
    int64_t c = 0;
    for (; c + kV <= rows.n; c += kV) {
      V<Acc> v[kIn];
      PYG_FAST_UNROLL
      for (int k = 0; k < kIn; ++k) v[k] = fetch<Acc>(p[k], strides[k], c);
      store<kV>(out + c, f(v));
    }
    if (c < rows.n) {
      V<Acc> v[kIn];
      PYG_FAST_UNROLL
      for (int k = 0; k < kIn; ++k) v[k] = fetch_part<Acc>(p[k], strides[k], c, rows.n - c);
      store_part<Acc>(out + c, f(v), rows.n - c);
    }
  }
}

// Rows of one number each, as of a slice: a vector has those of several rows.
template <typename Acc, int kIn, typename F>
void column_loop(const Rows<Acc, kIn>& rows, const F& f) {
  constexpr int kV = kWidth<Acc>;
  for (int64_t i = 0; i < rows.count; i += kV) {
    const int64_t count = std::min<int64_t>(kV, rows.count - i);
    V<Acc> v[kIn];
    PYG_FAST_UNROLL
    for (int k = 0; k < kIn; ++k) {
      if (rows.index[k] == nullptr) {
        const Acc* p = rows.at(k, i);
        v[k] =
            count == kV ? fetch<Acc>(p, rows.row[k], 0) : fetch_part<Acc>(p, rows.row[k], 0, count);
      } else {
        v[k] = V<Acc>{};
        for (int64_t r = 0; r < count; ++r) v[k][r] = *rows.at(k, i + r);
      }
    }
    const V<Acc> out = f(v);
    Acc* p = rows.out + i * rows.out_row;
    if (rows.out_row == 1) {
      count == kV ? store<kV>(p, out) : store_part<Acc>(p, out, count);
    } else {
      for (int64_t r = 0; r < count; ++r) p[r * rows.out_row] = out[r];
    }
  }
}

// Calls f with whole vectors of rows of three numbers, as of coordinates, one after the other in
// memory; operands of one number per row are spread over it. Returns the rows that are left.
template <typename Acc, int kIn, typename F>
Rows<Acc, kIn> triple_rows(const Rows<Acc, kIn>& rows, const F& f) {
  constexpr int kV = kWidth<Acc>;
  if (rows.out_row != 3) return rows;
  for (int k = 0; k < kIn; ++k) {
    const bool in_order = rows.inner[k] == 0 || (rows.inner[k] == 1 && rows.row[k] == 3);
    if (rows.index[k] != nullptr || !in_order) return rows;
  }
  Rows<Acc, kIn> left = rows;
  for (; left.count >= kV; left.count -= kV, left.out += 3 * kV) {
    V<Acc> number[kIn];
    PYG_FAST_UNROLL
    for (int k = 0; k < kIn; ++k) {
      if (rows.inner[k] == 0) number[k] = fetch<Acc>(left.in[k], rows.row[k], 0);
    }
    PYG_FAST_UNROLL
    for (int part = 0; part < 3; ++part) {
      V<Acc> v[kIn];
      PYG_FAST_UNROLL
      for (int k = 0; k < kIn; ++k) {
        if (rows.inner[k] == 1) {
          v[k] = load<kV>(left.in[k] + part * kV);
        } else {
          PYG_FAST_UNROLL
          for (int c = 0; c < kV; ++c) v[k][c] = number[k][(part * kV + c) / 3];
        }
      }
      store<kV>(left.out + part * kV, f(v));
    }
    for (int k = 0; k < kIn; ++k) left.in[k] += kV * rows.row[k];
  }
  return left;
}

template <typename Acc, typename F>
void unary(const Rows<Acc, 1>& rows, const F& f) {
  const auto g = [&](V<Acc>* v) PYG_FAST_ALWAYS { return f(v[0]); };
  if (rows.n == 1) return column_loop<Acc, 1>(rows, g);
  if (rows.inner[0] == 1) return rows_loop<Acc, 1, 1, -1>(rows, g);
  rows_loop<Acc, 1, -1, -1>(rows, g);
}

template <typename Acc, typename F>
void binary(const Rows<Acc, 2>& rows, const F& f) {
  const auto g = [&](V<Acc>* v) PYG_FAST_ALWAYS { return f(v[0], v[1]); };
  if (rows.n == 1) return column_loop<Acc, 2>(rows, g);
  if (rows.n == 3) return rows_loop<Acc, 2, -1, -1>(triple_rows<Acc, 2>(rows, g), g);
  if (rows.inner[0] == 1 && rows.inner[1] == 1) return rows_loop<Acc, 2, 1, 1>(rows, g);
  if (rows.inner[0] == 1 && rows.inner[1] == 0) return rows_loop<Acc, 2, 1, 0>(rows, g);
  if (rows.inner[0] == 0 && rows.inner[1] == 1) return rows_loop<Acc, 2, 0, 1>(rows, g);
  rows_loop<Acc, 2, -1, -1>(rows, g);
}

template <typename Acc>
void fma(const Rows<Acc, 3>& rows) {
  const auto f = [](V<Acc>* v) PYG_FAST_ALWAYS { return v[0] * v[1] + v[2]; };
  if (rows.n == 1) return column_loop<Acc, 3>(rows, f);
  if (rows.n == 3) return rows_loop<Acc, 3, -1, -1>(triple_rows<Acc, 3>(rows, f), f);
  const int64_t b = rows.inner[1], c = rows.inner[2];
  if (rows.inner[0] == 1 && b == 1 && c == 1) return rows_loop<Acc, 3, 1, 1, 1>(rows, f);
  if (rows.inner[0] == 1 && b == 1 && c == 0) return rows_loop<Acc, 3, 1, 1, 0>(rows, f);
  if (rows.inner[0] == 1 && b == 0 && c == 1) return rows_loop<Acc, 3, 1, 0, 1>(rows, f);
  if (rows.inner[0] == 1 && b == 0 && c == 0) return rows_loop<Acc, 3, 1, 0, 0>(rows, f);
  rows_loop<Acc, 3, -1, -1>(rows, f);
}

template <typename Acc>
void where(const Rows<Acc, 3>& rows) {
  const auto f = [](V<Acc>* v) PYG_FAST_ALWAYS { return v[0] != 0 ? v[1] : v[2]; };
  if (rows.n == 1) return column_loop<Acc, 3>(rows, f);
  if (rows.n == 3) return rows_loop<Acc, 3, -1, -1>(triple_rows<Acc, 3>(rows, f), f);
  const int64_t b = rows.inner[1], c = rows.inner[2];
  if (rows.inner[0] == 1 && b == 1 && c == 1) return rows_loop<Acc, 3, 1, 1, 1>(rows, f);
  if (rows.inner[0] == 1 && b == 1 && c == 0) return rows_loop<Acc, 3, 1, 1, 0>(rows, f);
  if (rows.inner[0] == 1 && b == 0 && c == 1) return rows_loop<Acc, 3, 1, 0, 1>(rows, f);
  rows_loop<Acc, 3, -1, -1>(rows, f);
}

template <typename Acc>
void unary_op(MessageOp op, const Rows<Acc, 1>& rows) {
  constexpr int kV = kWidth<Acc>;
  using X = V<Acc>;
  const auto lanes = [&](auto f) PYG_FAST_ALWAYS {
    unary<Acc>(rows, [&](X x) PYG_FAST_ALWAYS { return by_lane<Acc>(x, f); });
  };
  switch (op) {
    case MessageOp::copy: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return x; });
    case MessageOp::neg: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return -x; });
    case MessageOp::abs:
      return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return abs_of<Acc>(x); });
    case MessageOp::exp:
      return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return exp_of<Acc, kV>(x); });
    case MessageOp::exp2: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return exp2_of(x); });
    case MessageOp::expm1: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return expm1_of(x); });
    case MessageOp::log: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return log_of(x); });
    case MessageOp::log2: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return log2_of(x); });
    case MessageOp::log10: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return log10_of(x); });
    case MessageOp::log1p: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return log1p_of(x); });
    case MessageOp::sqrt:
      return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return sqrt_of<Acc>(x); });
    case MessageOp::rsqrt:
      return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return 1 / sqrt_of<Acc>(x); });
    case MessageOp::reciprocal: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return 1 / x; });
    case MessageOp::sin:
      return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return sin_of<Acc>(x); });
    case MessageOp::cos:
      return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return cos_of<Acc>(x); });
    case MessageOp::tanh: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return tanh_of(x); });
    case MessageOp::sigmoid:
      return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return 1 / (1 + exp_of<Acc, kV>(-x)); });
    case MessageOp::erf: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return erf_of(x); });
    case MessageOp::sign:
      return unary<Acc>(rows,
                        [](X x) PYG_FAST_ALWAYS { return truth<Acc>(x > 0) - truth<Acc>(x < 0); });
    case MessageOp::floor: return lanes([](Acc a) { return std::floor(a); });
    case MessageOp::ceil: return lanes([](Acc a) { return std::ceil(a); });
    case MessageOp::relu:
      return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return x <= 0 ? X{} : x; });
    case MessageOp::logical_not:
      return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return truth<Acc>(x == 0); });
    case MessageOp::asin: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return asin_of(x); });
    case MessageOp::acos: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return acos_of(x); });
    case MessageOp::atan: return unary<Acc>(rows, [](X x) PYG_FAST_ALWAYS { return atan_of(x); });
    default: return;
  }
}

// Of vectors or of numbers.
template <typename X>
PYG_FAST_INLINE X larger(X a, X b) {
  return a > b || a != a ? a : b;
}
template <typename X>
PYG_FAST_INLINE X smaller(X a, X b) {
  return a < b || a != a ? a : b;
}

template <typename Acc>
void binary_op(MessageOp op, const Rows<Acc, 2>& rows) {
  using X = V<Acc>;
  switch (op) {
    case MessageOp::add: return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return a + b; });
    case MessageOp::sub: return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return a - b; });
    case MessageOp::mul: return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return a * b; });
    case MessageOp::div: return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return a / b; });
    case MessageOp::pow:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return pow_of(a, b); });
    case MessageOp::maximum:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return larger(a, b); });
    case MessageOp::minimum:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return smaller(a, b); });
    case MessageOp::lt:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return truth<Acc>(a < b); });
    case MessageOp::le:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return truth<Acc>(a <= b); });
    case MessageOp::gt:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return truth<Acc>(a > b); });
    case MessageOp::ge:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return truth<Acc>(a >= b); });
    case MessageOp::eq:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return truth<Acc>(a == b); });
    case MessageOp::ne:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return truth<Acc>(a != b); });
    case MessageOp::logical_and:
      return binary<Acc>(rows,
                         [](X a, X b) PYG_FAST_ALWAYS { return truth<Acc>((a != 0) & (b != 0)); });
    case MessageOp::logical_or:
      return binary<Acc>(rows,
                         [](X a, X b) PYG_FAST_ALWAYS { return truth<Acc>((a != 0) | (b != 0)); });
    case MessageOp::atan2:
      return binary<Acc>(rows, [](X a, X b) PYG_FAST_ALWAYS { return atan2_of(a, b); });
    default: return;
  }
}

// All lanes combined, as a tree.
template <typename Acc, int W = kWidth<Acc>, typename F>
PYG_FAST_INLINE Acc folded(Vec<Acc, W> v, const F& f) {
  if constexpr (W * sizeof(Acc) > 16) {
    Vec<Acc, W / 2> half[2];
    __builtin_memcpy(half, &v, sizeof(v));
    return folded<Acc, W / 2>(f(half[0], half[1]), f);
  } else if constexpr (W == 4) {
    return f(f(v[0], v[1]), f(v[2], v[3]));
  } else {
    return f(v[0], v[1]);
  }
}

// Combines all rows into one, some vectors of them at a time, kSumBlock rows at a time.
template <typename Acc, int kVectors, typename F>
PYG_FAST_INLINE void reduce_columns(const Rows<Acc, 1>& rows, int64_t c, Acc neutral, const F& f) {
  constexpr int kV = kWidth<Acc>;
  for (int64_t i = 0; i < rows.count;) {
    const int64_t stop = rows.count - i < kSumBlock ? rows.count : i + kSumBlock;
    V<Acc> part[kVectors];
    PYG_FAST_UNROLL
    for (int j = 0; j < kVectors; ++j) part[j] = all<Acc>(neutral);
    for (; i < stop; ++i) {
      const Acc* p = rows.at(0, i) + c;
      PYG_FAST_UNROLL
      for (int j = 0; j < kVectors; ++j) part[j] = f(part[j], load<kV>(p + j * kV));
    }
    PYG_FAST_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      Acc* to = rows.out + c + j * kV;
      store<kV>(to, f(load<kV>(to), part[j]));
    }
  }
}

// Combines each row of C numbers, or of a multiple of C where that is a vector, into a number of
// `out`: a vector of numbers at a time, also of the last rows, so that the order of sums is the same.
template <typename Acc, int C, typename F>
void reduce_groups(const Rows<Acc, 1>& rows, const F& f) {
  constexpr int kV = kWidth<Acc>;
  for (int64_t i = 0; i < rows.count; i += kV) {
    const int64_t count = std::min<int64_t>(kV, rows.count - i);
    const Acc* p = rows.at(0, i);
    int64_t left = C < kV ? count * C : count;  // numbers, or rows
    const auto next = [&]() PYG_FAST_ALWAYS {
      V<Acc> v = {};
      if constexpr (C < kV) {
        v = left >= kV ? load<kV>(p) : load_part<Acc>(p, std::max<int64_t>(left, 0));
        left -= kV;
        p += kV;
      } else if (left > 0) {
        v = load<kV>(p);
        for (int64_t c = kV; c < rows.n; c += kV) v = f(v, load<kV>(p + c));
        --left;
        p += rows.row[0];
      }
      return v;
    };
    const V<Acc> v = group_folds<Acc, kV, C>(next, f);
    Acc* out = rows.out + i;
    if (count == kV) {
      store<kV>(out, f(load<kV>(out), v));
    } else {
      store_part<Acc>(out, f(load_part<Acc>(out, count), v), count);
    }
  }
}

// Whether `reduce_groups` did it.
template <typename Acc, typename F>
bool reduced_groups(const Rows<Acc, 1>& rows, const F& f) {
  constexpr int kV = kWidth<Acc>;
  if (rows.index[0] != nullptr || rows.inner[0] != 1 || rows.out_row != 1) return false;
  const bool is_dense = rows.row[0] == rows.n;
  if (rows.n > 0 && rows.n % kV == 0 && rows.n <= kSumBlock * kV) {
    reduce_groups<Acc, kV>(rows, f);
    return true;
  }
  if constexpr (kV > 2) {
    if (is_dense && rows.n == 2) return reduce_groups<Acc, 2>(rows, f), true;
  }
  if constexpr (kV > 4) {
    if (is_dense && rows.n == 4) return reduce_groups<Acc, 4>(rows, f), true;
  }
  if constexpr (kV > 8) {
    if (is_dense && rows.n == 8) return reduce_groups<Acc, 8>(rows, f), true;
  }
  return false;
}

// Combines the operand into `out`, whose inner stride is 1 or (`across`) 0.
template <typename Acc, typename F>
void reduce_rows(const Rows<Acc, 1>& rows, bool across, Acc neutral, const F& f) {
  constexpr int kV = kWidth<Acc>;
  if (!across && rows.out_row == 0 && rows.inner[0] == 1) {
    int64_t c = 0;
    for (; c + 4 * kV <= rows.n; c += 4 * kV) reduce_columns<Acc, 4>(rows, c, neutral, f);
    for (; c + kV <= rows.n; c += kV) reduce_columns<Acc, 1>(rows, c, neutral, f);
    if (c == rows.n) return;
    for (int64_t i = 0; i < rows.count;) {
      const int64_t stop = rows.count - i < kSumBlock ? rows.count : i + kSumBlock;
      V<Acc> part = all<Acc>(neutral);
      for (; i < stop; ++i) {
        part = f(part, load_part<Acc>(rows.at(0, i) + c, rows.n - c));
      }
      store_part<Acc>(rows.out + c, f(load_part<Acc>(rows.out + c, rows.n - c), part), rows.n - c);
    }
    return;
  }
  if (across && reduced_groups<Acc>(rows, f)) return;
  for (int64_t i = 0; i < rows.count; ++i) {
    Acc* out = rows.out + i * rows.out_row;
    const Acc* p = rows.at(0, i);
    const int64_t stride = rows.inner[0];
    int64_t c = 0;
    if (!across) {
      for (; c + kV <= rows.n; c += kV) {
        store<kV>(out + c, f(load<kV>(out + c), fetch<Acc>(p, stride, c)));
      }
      if (c < rows.n) {
        const auto v =
            f(load_part<Acc>(out + c, rows.n - c), fetch_part<Acc>(p, stride, c, rows.n - c));
        store_part<Acc>(out + c, v, rows.n - c);
      }
      continue;
    }
    Acc total = *out;
    if (rows.n >= kV) {
      V<Acc> v = all<Acc>(neutral);
      while (c + kV <= rows.n) {
        const int64_t left = rows.n - c, stop = c + (left < kSumBlock * kV ? left : kSumBlock * kV);
        V<Acc> part = all<Acc>(neutral);
        for (; c + kV <= stop; c += kV) part = f(part, fetch<Acc>(p, stride, c));
        v = f(v, part);
      }
      total = f(total, folded<Acc>(v, f));
    }
    for (; c < rows.n; ++c) total = f(total, p[c * stride]);
    *out = total;
  }
}

template <typename Acc>
void reduce_op(MessageOp op, const Rows<Acc, 1>& rows, bool across) {
  constexpr Acc kInf = std::numeric_limits<Acc>::infinity();
  switch (op) {
    case MessageOp::sum:
      return reduce_rows<Acc>(rows, across, 0,
                              [](auto a, auto b) PYG_FAST_ALWAYS { return a + b; });
    case MessageOp::amax:
      return reduce_rows<Acc>(rows, across, -kInf,
                              [](auto a, auto b) PYG_FAST_ALWAYS { return larger(a, b); });
    case MessageOp::amin:
      return reduce_rows<Acc>(rows, across, kInf,
                              [](auto a, auto b) PYG_FAST_ALWAYS { return smaller(a, b); });
    default: return;
  }
}

// Sums the products of two operands along their rows. Strides below 0 are those that only `rows` knows.
template <typename Acc, int kStride>
PYG_FAST_INLINE void dot_loop(const Rows<Acc, 2>& rows, bool add) {
  constexpr int kV = kWidth<Acc>;
  const int64_t a_stride = kStride >= 0 ? kStride : rows.inner[0];
  const int64_t b_stride = kStride >= 0 ? kStride : rows.inner[1];
  for (int64_t i = 0; i < rows.count; ++i) {
    const Acc* a = rows.at(0, i);
    const Acc* b = rows.at(1, i);
    Acc total = add ? rows.out[i * rows.out_row] : 0;
    int64_t c = 0;
    if (rows.n >= kV) {
      V<Acc> v = {};
      for (; c + kV <= rows.n; c += kV)
        v += fetch<Acc>(a, a_stride, c) * fetch<Acc>(b, b_stride, c);
      total += folded<Acc>(v, [](auto x, auto y) PYG_FAST_ALWAYS { return x + y; });
    }
    for (; c < rows.n; ++c) total += a[c * a_stride] * b[c * b_stride];
    rows.out[i * rows.out_row] = total;
  }
}

template <typename Acc>
void dot(const Rows<Acc, 2>& rows, bool add) {
  if (rows.inner[0] == 1 && rows.inner[1] == 1) return dot_loop<Acc, 1>(rows, add);
  dot_loop<Acc, -1>(rows, add);
}

// Heads

// Rows of heads of channels: channel c of head h of edge e is at(e)[h * head + c * inner].
template <typename Acc>
struct Heads {
  const Acc* p;
  const int64_t* index;
  int64_t row, head, inner;
  int64_t ahead = 0;  // numbers to prefetch of a row by an index

  PYG_FAST_INLINE const Acc* at(int64_t e) const {
    return index != nullptr ? indexed_row(p, index, e, row, ahead) : p + e * row;
  }
};

// Calls f(at): at(e) is row e, without a branch for each.
template <typename Acc, typename F>
PYG_FAST_INLINE void with_rows(const Heads<Acc>& x, const F& f) {
  if (x.index != nullptr) return f([&](int64_t e) PYG_FAST_ALWAYS { return x.at(e); });
  f([p = x.p, row = x.row](int64_t e) PYG_FAST_ALWAYS { return p + e * row; });
}

// Calls f(Int<W>, Int<G>) for vectors of W lanes: a head has some of them (G is W), or, where operands
// are `dense`, each has some heads of G channels. Returns false if neither is so.
template <typename Acc, int W = kWidth<Acc>, typename F>
PYG_FAST_INLINE bool with_head_lanes(int64_t heads, int64_t channels, bool dense, const F& f) {
  if (channels % W == 0) {
    f(Int<W>{}, Int<W>{});
    return true;
  }
  if (dense && heads * channels % W == 0) {
    if (W > 2 && channels == W / 2) return f(Int<W>{}, Int<(W > 2 ? W / 2 : W)>{}), true;
    if (W > 4 && channels == W / 4) return f(Int<W>{}, Int<(W > 4 ? W / 4 : W)>{}), true;
    if (W > 8 && channels == W / 8) return f(Int<W>{}, Int<(W > 8 ? W / 8 : W)>{}), true;
  }
  if constexpr (W * sizeof(Acc) > 16) {
    return with_head_lanes<Acc, W / 2>(heads, channels, dense, f);
  }
  return false;
}

// out[e, h] = sum over c of a[e, h, c] * b[e, h, c]
template <typename Acc, int W, int G>
void dots_of_heads(Heads<Acc> a, Heads<Acc> b, int64_t count, int64_t heads, int64_t channels,
                   Acc* out) {
  const int64_t last = (G == W ? heads : heads * channels / W) - 1;
  int64_t e = 0, k = 0;
  const Acc *of_a = a.at(0), *of_b = b.at(0);
  const int64_t a_step = G == W ? a.head : W, b_step = G == W ? b.head : W;
  // The products of a head, or of a vector of heads.
  const auto next = [&]() PYG_FAST_ALWAYS {
    Vec<Acc, W> sum = {};
    if (e == count) return sum;
    if constexpr (G == W) {
      for (int64_t c = 0; c < channels; c += W) sum += load<W>(of_a + c) * load<W>(of_b + c);
    } else {
      sum = load<W>(of_a) * load<W>(of_b);
    }
    if (k < last) {
      ++k;
      of_a += a_step;
      of_b += b_step;
    } else {
      k = 0;
      if (++e < count) {
        of_a = a.at(e);
        of_b = b.at(e);
      }
    }
    return sum;
  };
  const int64_t size = count * heads;
  int64_t at = 0;
  for (; at + W <= size; at += W) store<W>(out + at, group_sums<Acc, W, G>(next));
  if (at < size) {
    Acc rest[W];
    store<W>(rest, group_sums<Acc, W, G>(next));
    __builtin_memcpy(out + at, rest, static_cast<size_t>(size - at) * sizeof(Acc));
  }
}

// A matrix product: out[m, n] (+)= sum over k of a[m, k] * b[k, n].
template <typename Acc>
struct Product {
  Acc* out;
  const Acc* a;
  const Acc* b;
  int64_t m, k, n;
  int64_t out_m, a_m, a_k, b_k;  // strides; those of n are 1
  bool add;
};

template <typename Acc, int kRows, int kVectors, bool kPart>
PYG_FAST_INLINE void product_block(const Product<Acc>& p, int64_t m, int64_t n) {
  constexpr int kV = kWidth<Acc>;
  const int64_t rest = p.n - n;
  V<Acc> sum[kRows][kVectors];
  PYG_FAST_UNROLL
  for (int i = 0; i < kRows; ++i) {
    PYG_FAST_UNROLL
    for (int j = 0; j < kVectors; ++j) sum[i][j] = V<Acc>{};
  }
  const Acc* a = p.a + m * p.a_m;
  const Acc* b = p.b + n;
  for (int64_t k = 0; k < p.k; ++k, a += p.a_k, b += p.b_k) {
    V<Acc> row[kVectors];
    PYG_FAST_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      row[j] = kPart ? load_part<Acc>(b + j * kV, rest) : load<kV>(b + j * kV);
    }
    PYG_FAST_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const V<Acc> factor = all<Acc>(a[i * p.a_m]);
      PYG_FAST_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[i][j] += factor * row[j];
    }
  }
  PYG_FAST_UNROLL
  for (int i = 0; i < kRows; ++i) {
    PYG_FAST_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      Acc* at = p.out + (m + i) * p.out_m + n + j * kV;
      if (p.add) sum[i][j] += kPart ? load_part<Acc>(at, rest) : load<kV>(at);
      kPart ? store_part<Acc>(at, sum[i][j], rest) : store<kV>(at, sum[i][j]);
    }
  }
}

// As many rows at a time as keep the multiply-adds of a row apart, then what is left.
template <typename Acc, int kRows, int kVectors, bool kPart>
PYG_FAST_INLINE void product_rows(const Product<Acc>& p, int64_t m, int64_t n) {
  for (; m + kRows <= p.m; m += kRows) product_block<Acc, kRows, kVectors, kPart>(p, m, n);
  if constexpr (kRows > 1) {
    if (m < p.m) product_rows<Acc, kRows / 2, kVectors, kPart>(p, m, n);
  }
}

template <typename Acc>
void product(const Product<Acc>& p) {
  constexpr int kV = kWidth<Acc>, kMost = kManyRegisters ? 4 : 2;
  int64_t n = 0;
  for (; n + kMost * kV <= p.n; n += kMost * kV) product_rows<Acc, 4, kMost, false>(p, 0, n);
  for (; n + kV <= p.n; n += kV) product_rows<Acc, 8, 1, false>(p, 0, n);
  if (n < p.n) product_rows<Acc, 8, 1, true>(p, 0, n);
}

// The machine

template <typename Acc, typename T>
PYG_FAST_INLINE Acc number_of(T v) {
  return static_cast<Acc>(v);
}
template <typename Acc>
PYG_FAST_INLINE Acc number_of(Half v) {
  return static_cast<Acc>(load_one(&v));
}
template <typename Acc>
PYG_FAST_INLINE Acc number_of(BFloat16 v) {
  return static_cast<Acc>(load_one(&v));
}

template <typename Acc, typename T>
void convert(Acc* out, const T* x, int64_t n) {
  for_chunks<kWidth<Acc>>(0, n, [&](auto v, int64_t c) PYG_FAST_ALWAYS {
    constexpr int kV = decltype(v)::value;
    if constexpr (std::is_same<T, Half>::value || std::is_same<T, BFloat16>::value) {
      if constexpr (sizeof(Acc) == 4) {
        store<kV>(out + c, load<kV>(x + c));
        return;
      }
    }
    for (int k = 0; k < kV; ++k) out[c + k] = number_of<Acc>(x[c + k]);
  });
}

template <typename F>
PYG_FAST_INLINE void with_message_type(MessageType type, const F& f) {
  switch (type) {
    case MessageType::f32: return f(Type<float>{});
    case MessageType::f64: return f(Type<double>{});
    case MessageType::f16: return f(Type<Half>{});
    case MessageType::bf16: return f(Type<BFloat16>{});
    case MessageType::boolean: return f(Type<uint8_t>{});
    case MessageType::i32: return f(Type<int32_t>{});
    case MessageType::i64: return f(Type<int64_t>{});
  }
}

// Stores n results in the type of the output.
template <typename Acc>
void write(const MessageOutput& output, int64_t at, const Acc* x, int64_t n) {
  if (output.type == (sizeof(Acc) == 4 ? MessageType::f32 : MessageType::f64)) {
    __builtin_memcpy(static_cast<Acc*>(output.data) + at, x, static_cast<size_t>(n) * sizeof(Acc));
  } else if (output.type == MessageType::f32) {
    for (int64_t c = 0; c < n; ++c)
      static_cast<float*>(output.data)[at + c] = static_cast<float>(x[c]);
  } else if (output.type == MessageType::f64) {
    for (int64_t c = 0; c < n; ++c) static_cast<double*>(output.data)[at + c] = x[c];
  } else if (output.type == MessageType::f16) {
    for (int64_t c = 0; c < n; ++c) {
      store_one(static_cast<Half*>(output.data) + at + c, static_cast<float>(x[c]));
    }
  } else {
    for (int64_t c = 0; c < n; ++c) {
      store_one(static_cast<BFloat16*>(output.data) + at + c, static_cast<float>(x[c]));
    }
  }
}

constexpr int64_t kEmptyRows = 64;  // of a tile, at least

template <typename Acc>
class Machine {
  static constexpr int kV = kWidth<Acc>;

  // A row's edges in the tile.
  struct Segment {
    int64_t row, begin, end, degree;
    bool first, last;
  };

 public:
  Machine(const Message& p, int64_t share)
      : p_(p), head_(*reinterpret_cast<const MessageHeader*>(p.code)), share_(share) {}

  void run(int64_t row_begin, int64_t row_end) {
    prepare();
    p_.csr.index64 ? tiles<int64_t>(row_begin, row_end) : tiles<int32_t>(row_begin, row_end);
  }

 private:
  // Memory, and the values that all edges share.
  void prepare() {
    const int64_t most = head_.tile_edges;
    int64_t state = 0, params = 0;
    for (int64_t k = 0; k < p_.num_outputs; ++k) {
      state += padded(p_.output[k].width) * parts_of(p_.output[k]);
    }
    for (int64_t k = 0; k < p_.num_inputs; ++k) {
      const auto& input = p_.input[k];
      if (input.index == MessageIndex::none && !is_acc(input.type)) params += padded(input.width);
    }
    tile_ = numbers_.of_size(padded(head_.tile_size) + padded(head_.uniform_size) + state + params +
                             kBuffer);
    uniform_ = tile_ + padded(head_.tile_size);
    state_ = uniform_ + padded(head_.uniform_size);
    Acc* next = state_ + state;
    bases_ = pointers_.of_size(2 + p_.num_inputs + p_.num_outputs);
    bases_[0] = tile_;
    bases_[1] = uniform_;
    for (int64_t k = 0; k < p_.num_inputs; ++k) {
      const auto& input = p_.input[k];
      bases_[2 + k] = static_cast<Acc*>(const_cast<void*>(input.data));
      if (input.index != MessageIndex::none || is_acc(input.type)) continue;
      with_message_type(input.type, [&](auto type) {
        using T = typename decltype(type)::type;
        convert<Acc, T>(next, static_cast<const T*>(input.data), input.width);
      });
      bases_[2 + k] = next;
      next += padded(input.width);
    }
    buffer_ = next;
    int64_t chosen = 0;
    state_at_ = offsets_.of_size(2 * p_.num_outputs + 1);
    int64_t at = 0;
    for (int64_t k = 0; k < p_.num_outputs; ++k) {
      const auto& output = p_.output[k];
      bases_[2 + p_.num_inputs + k] = state_ + at;
      if (output.total) {
        __builtin_memset(state_ + at, 0, static_cast<size_t>(output.width) * sizeof(Acc));
      }
      state_at_[2 * k] = at;
      state_at_[2 * k + 1] = chosen;
      at += padded(output.width) * parts_of(output);
      if (output.arg != nullptr && !output.softmax) chosen += output.width;
    }
    chosen_ = choices_.of_size(chosen + 1);
    rows_ = ids_.of_size(3 * (most + kAhead));
    cols_ = rows_ + most + kAhead;
    edges_ = cols_ + most + kAhead;
    segments_ = parts_.of_size(most + kEmptyRows);
    for (int64_t k = 0; k < p_.num_numbers; ++k) uniform_[k] = static_cast<Acc>(p_.numbers[k]);
    const int64_t* code = p_.code + sizeof(MessageHeader) / 8;
    count_ = 1;
    section(code);
    body_ = code;
  }

  // What an output keeps of a row that the next tile goes on with: the first term of its sums, and the
  // sums of earlier tiles. Of a softmax also the largest score, and what its growth makes of the sums.
  static int64_t parts_of(const MessageOutput& output) { return output.softmax ? 4 : 2; }
  Acc* state_of(int64_t output, int64_t part = 0) const {
    return state_ + state_at_[2 * output] + part * padded(p_.output[output].width);
  }

  static bool is_acc(MessageType type) {
    return type == (sizeof(Acc) == 4 ? MessageType::f32 : MessageType::f64);
  }
  static int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

  template <typename Index>
  void tiles(int64_t row, int64_t row_end) {
    const auto* rowptr = static_cast<const Index*>(p_.csr.rowptr);
    const auto* col = static_cast<const Col*>(p_.csr.col);
    const auto* perm = static_cast<const Index*>(p_.csr.perm);
    if (row >= row_end) return;
    const int64_t stop = rowptr[row_end];
    int64_t e = rowptr[row];
    int64_t known = 0;  // edges of the tile that the last one prefetched
    while (row < row_end) {
      const int64_t begin = e;
      int64_t count = 0;
      num_segments_ = 0;
      while (row < row_end && num_segments_ < head_.tile_edges + kEmptyRows) {
        const int64_t start = rowptr[row], end = rowptr[row + 1];
        const int64_t room = head_.tile_edges - count;
        if (room == 0 && end > e) break;
        const int64_t taken = end - e < room ? end - e : room;
        segments_[num_segments_++] =
            Segment{row, count, count + taken, end - start, e == start, e + taken == end};
        for (int64_t k = 0; k < taken; ++k) rows_[count + k] = row;
        count += taken;
        e += taken;
        if (e == end) ++row;
      }
      const int64_t ahead = stop - begin < count + kAhead ? stop - begin : count + kAhead;
      for (int64_t k = known; k < ahead; ++k) {
        cols_[k] = col[begin + k];
        edges_[k] = perm != nullptr ? static_cast<int64_t>(perm[begin + k]) : begin + k;
      }
      for (int64_t k = ahead; k < count + kAhead; ++k) cols_[k] = edges_[k] = 0;
      for (int64_t k = count; k < count + kAhead; ++k) rows_[k] = 0;
      count_ = count;
      const int64_t* code = body_;
      for (int64_t s = 1; s < head_.num_sections; ++s) section(code);
      if ((since_carry_ += count) + head_.tile_edges > kSumBlock || row == row_end) carry_totals();
      known = ahead - count;
      __builtin_memmove(cols_, cols_ + count, static_cast<size_t>(known) * sizeof(int64_t));
      __builtin_memmove(edges_, edges_ + count, static_cast<size_t>(known) * sizeof(int64_t));
    }
  }

  // Moves sums over all edges of the last tiles to the results.
  void carry_totals() {
    since_carry_ = 0;
    for (int64_t k = 0; k < p_.num_outputs; ++k) {
      const auto& output = p_.output[k];
      if (!output.total) continue;
      carry(state_of(k), static_cast<Acc*>(output.data) + share_ * output.width, output.width);
    }
  }

  // Runs a section, and moves `code` to the next one.
  void section(const int64_t*& code) {
    const auto& section = *reinterpret_cast<const MessageSection*>(code);
    code += sizeof(MessageSection) / 8;
    const auto* begin = reinterpret_cast<const MessageInstruction*>(code);
    const auto* end = begin + section.num_instructions;
    for (int64_t k = 0; k < section.repeats; ++k) {
      column_ = section.first + k * section.step;
      for (const auto* i = begin; i < end; ++i) step(*i);
    }
    code = reinterpret_cast<const int64_t*>(end);
  }

  Acc* address(const MessageOperand& o) const {
    return bases_[o.space] + o.offset + o.column * column_;
  }

  int64_t size(const MessageInstruction& i, int64_t d) const {
    return d == i.edge_dim ? i.size[d] * count_ : i.size[d];
  }

  void step(const MessageInstruction& i) {
    using Op = MessageOp;
    const auto op = static_cast<Op>(i.op);
    // A tile of empty rows alone has only results.
    if (count_ == 0 && op < Op::row_sum) return;
    if (op <= Op::atan) {
      nest<1>(i, [&](const Rows<Acc, 1>& rows, bool) { unary_op<Acc>(op, rows); });
    } else if (op < Op::where) {
      nest<2>(i, [&](const Rows<Acc, 2>& rows, bool) { binary_op<Acc>(op, rows); });
    } else if (op == Op::where) {
      nest<3>(i, [](const Rows<Acc, 3>& rows, bool) { where<Acc>(rows); });
    } else if (op == Op::fma) {
      nest<3>(i, [](const Rows<Acc, 3>& rows, bool) { fma<Acc>(rows); });
    } else if (op == Op::load) {
      gather(i);
    } else if (op == Op::picked) {
      p_.csr.index64 ? picked<int64_t>(i) : picked<int32_t>(i);
    } else if (op == Op::keep) {
      keep(i);
    } else if (op <= Op::amin) {
      nest<1>(i, [&](const Rows<Acc, 1>& rows, bool across) { reduce_op<Acc>(op, rows, across); });
    } else if (op == Op::dot) {
      if (dots(i)) return;
      nest<2>(i, [&](const Rows<Acc, 2>& rows, bool) { dot<Acc>(rows, i.extra[0] != 0); });
    } else if (op == Op::product) {
      multiply(i);
    } else if (op == Op::to_edge) {
      to_edge(i);
    } else if (op <= Op::row_mean) {
      row_sum(i, op == Op::row_mean);
    } else if (op == Op::row_product) {
      row_product(i);
    } else if (op == Op::row_softmax) {
      row_softmax(i);
    } else {
      const bool most = op == Op::row_max;
      p_.csr.index64 ? most ? extreme<int64_t, true>(i) : extreme<int64_t, false>(i)
      : most ? extreme<int32_t, true>(i)
                     : extreme<int32_t, false>(i);
    }
  }

  const int64_t* ids(MessageIndex index) const {
    return index == MessageIndex::row ? rows_ : index == MessageIndex::col ? cols_ : edges_;
  }

  // How many numbers of a row by an index are read. The rows of a tile's own nodes come in order.
  int64_t ahead_of(const MessageInput& input, const MessageInstruction& i,
                   const MessageOperand& o) const {
    const bool in_order = input.index == MessageIndex::row ||
                          (input.index == MessageIndex::edge && p_.csr.perm == nullptr);
    int64_t last = 0;
    for (int64_t d = 1; d < i.num_dims; ++d) last += (size(i, d) - 1) * o.stride[d];
    return in_order ? 0 : last + 1;
  }

  // Calls f for the two innermost dimensions.
  template <int kIn, typename F>
  PYG_FAST_INLINE void nest(const MessageInstruction& i, const F& f) {
    const int64_t dims = i.num_dims;
    Rows<Acc, kIn> rows;
    rows.n = size(i, dims - 1);
    rows.count = dims > 1 ? size(i, dims - 2) : 1;
    rows.out_row = dims > 1 ? i.operand[0].stride[dims - 2] : 0;
    const bool across = rows.n > 1 && i.operand[0].stride[dims - 1] == 0;
    Acc* out = address(i.operand[0]);
    const Acc* in[kIn];
    const int64_t* index[kIn];
    int64_t ahead[kIn] = {};
    for (int k = 0; k < kIn; ++k) {
      const auto& o = i.operand[k + 1];
      in[k] = address(o);
      index[k] = nullptr;
      rows.index[k] = nullptr;
      rows.row[k] = dims > 1 ? o.stride[dims - 2] : 0;
      rows.inner[k] = o.stride[dims - 1];
      rows.ahead[k] = 0;
      if (o.space >= 2 && o.space < 2 + p_.num_inputs) {
        const auto& input = p_.input[o.space - 2];
        if (input.index != MessageIndex::none) {
          index[k] = ids(input.index);
          ahead[k] = ahead_of(input, i, o);
          if (dims == 2) {
            rows.index[k] = index[k];
            rows.row[k] = input.width;
            rows.ahead[k] = ahead[k];
          }
        }
      }
    }
    if (dims == 3) {  // As with heads, at every edge: without the count of places below.
      int64_t step[kIn];
      for (int k = 0; k < kIn; ++k) {
        const auto& o = i.operand[k + 1];
        step[k] = index[k] != nullptr ? p_.input[o.space - 2].width : o.stride[0];
      }
      const int64_t count = size(i, 0), out_step = i.operand[0].stride[0];
      for (int64_t e = 0; e < count; ++e) {
        rows.out = out + e * out_step;
        for (int k = 0; k < kIn; ++k) {
          rows.in[k] = index[k] != nullptr ? indexed_row(in[k], index[k], e, step[k], ahead[k])
                                           : in[k] + e * step[k];
        }
        f(rows, across);
      }
      return;
    }
    int64_t at[kMessageDims] = {};
    for (;;) {
      rows.out = out;
      for (int k = 0; k < kIn; ++k) rows.in[k] = in[k];
      for (int64_t d = 0; d < dims - 2; ++d) {
        rows.out += at[d] * i.operand[0].stride[d];
        for (int k = 0; k < kIn; ++k) {
          const bool indexed = d == 0 && index[k] != nullptr;
          rows.in[k] += indexed ? index[k][at[0]] * p_.input[i.operand[k + 1].space - 2].width
                                : at[d] * i.operand[k + 1].stride[d];
        }
      }
      // Of one dimension alone, an indexed operand has a number for each edge.
      f(rows, across);
      int64_t d = dims - 3;
      for (; d >= 0 && ++at[d] == size(i, d); --d) at[d] = 0;
      if (d < 0) return;
    }
  }

  PYG_FAST_APART void gather(const MessageInstruction& i) {
    const auto& input = p_.input[i.extra[0]];
    const int64_t* id = ids(input.index);
    const int64_t n = i.size[1], stride = i.operand[0].stride[0], column = i.extra[3] * column_;
    Acc* out = address(i.operand[0]);
    with_message_type(input.type, [&](auto type) {
      using T = typename decltype(type)::type;
      const T* x = static_cast<const T*>(input.data) + column;
      const auto narrow = [&](auto size) PYG_FAST_ALWAYS {
        for (int64_t e = 0; e < count_; ++e) {
          const T* row = indexed_row(x, id, e, input.width, n);
          PYG_FAST_UNROLL
          for (int k = 0; k < size(); ++k) out[e * stride + k] = number_of<Acc>(row[k]);
        }
      };
      if (n == 1) return narrow(std::integral_constant<int, 1>{});
      if (n == 2) return narrow(std::integral_constant<int, 2>{});
      if (n == 3) return narrow(std::integral_constant<int, 3>{});
      if (n == 4) return narrow(std::integral_constant<int, 4>{});
      for (int64_t e = 0; e < count_; ++e) {
        convert<Acc, T>(out + e * stride, indexed_row(x, id, e, input.width, n), n);
      }
    });
  }

  template <typename Index>
  PYG_FAST_APART void picked(const MessageInstruction& i) {
    gather(i);
    const auto& input = p_.input[i.extra[1]];
    const int64_t* id = ids(input.index);
    const int64_t n = i.size[1], stride = i.operand[0].stride[0];
    const Index* arg = static_cast<const Index*>(input.data) + i.extra[3] * column_;
    Acc* out = address(i.operand[0]);
    for (int64_t e = 0; e < count_; ++e) {
      const Index* chosen = arg + id[e] * input.width;
      const Index edge = static_cast<Index>(edges_[e]);
      Acc* to = out + e * stride;
      for (int64_t c = 0; c < n; ++c) to[c] = chosen[c] == edge ? to[c] : 0;
    }
  }

  PYG_FAST_APART void keep(const MessageInstruction& i) {
    const uint64_t seed =
        mixed64(p_.seed + static_cast<uint64_t>(i.extra[0]) * 0x9e3779b97f4a7c15u);
    const auto threshold = static_cast<uint32_t>(i.extra[1]);
    const Acc scale = uniform_[i.extra[2]];
    const auto first = static_cast<uint32_t>(i.extra[3] * column_);
    const auto n = static_cast<uint32_t>(i.size[1]);
    Acc* out = address(i.operand[0]);
    for (int64_t e = 0; e < count_; ++e, out += i.operand[0].stride[0]) {
      const uint32_t bits = edge_bits(seed, static_cast<uint64_t>(edges_[e]));
      for (uint32_t c = 0; c < n; ++c) out[c] = keeps(bits, first + c, threshold) ? scale : 0;
    }
  }

  PYG_FAST_APART void multiply(const MessageInstruction& i) {
    const auto &out = i.operand[0], &a = i.operand[1], &b = i.operand[2];
    const int64_t m = i.num_dims - 3, k = m + 1, n = m + 2;
    Product<Acc> product;
    product.m = size(i, m);
    product.n = size(i, n);
    product.out_m = out.stride[m];
    product.a_m = a.stride[m];
    product.a_k = a.stride[k];
    product.b_k = b.stride[k];
    product.add = i.extra[0] != 0;
    int64_t at[kMessageDims] = {};
    for (;;) {
      product.out = address(out);
      product.a = address(a);
      product.b = address(b);
      for (int64_t d = 0; d < m; ++d) {
        product.out += at[d] * out.stride[d];
        product.a += at[d] * a.stride[d];
        product.b += at[d] * b.stride[d];
      }
      // Over edges, sums are long.
      for (int64_t left = size(i, k); left > 0; left -= product.k) {
        product.k = k == i.edge_dim && left > kSumBlock ? kSumBlock : left;
        PYG_FAST_ISA::product<Acc>(product);
        product.a += product.k * product.a_k;
        product.b += product.k * product.b_k;
        product.add = true;
      }
      product.add = i.extra[0] != 0;
      int64_t d = m - 1;
      for (; d >= 0 && ++at[d] == size(i, d); --d) at[d] = 0;
      if (d < 0) return;
    }
  }

  // An operand of edges, its last dimension that of channels, the one before that of heads.
  Heads<Acc> heads_of(const MessageInstruction& i, int k) const {
    const auto& o = i.operand[k];
    const int64_t dims = i.num_dims;
    const int64_t head = dims > 2 ? o.stride[dims - 2] : 0, inner = o.stride[dims - 1];
    if (o.space >= 2 && o.space < 2 + p_.num_inputs) {
      const auto& input = p_.input[o.space - 2];
      if (input.index != MessageIndex::none) {
        return {address(o), ids(input.index), input.width, head, inner, ahead_of(input, i, o)};
      }
    }
    return {address(o), nullptr, o.stride[0], head, inner};
  }

  // Dot products of heads; false if the operands are laid out in another way.
  PYG_FAST_APART bool dots(const MessageInstruction& i) {
    const int64_t dims = i.num_dims;
    if (dims < 2 || dims > 3 || i.edge_dim != 0 || i.extra[0] != 0) return false;
    const int64_t heads = dims == 3 ? i.size[1] : 1, channels = i.size[dims - 1];
    const auto& out = i.operand[0];
    const Heads<Acc> a = heads_of(i, 1), b = heads_of(i, 2);
    if (a.inner != 1 || b.inner != 1 || out.stride[dims - 1] != 0 || out.stride[0] != heads ||
        (dims == 3 && out.stride[1] != 1)) {
      return false;
    }
    const bool dense = heads > 1 && a.head == channels && b.head == channels;
    return with_head_lanes<Acc>(heads, channels, dense, [&](auto w, auto g) {
      dots_of_heads<Acc, decltype(w)::value, decltype(g)::value>(a, b, size(i, 0), heads, channels,
                                                                 address(out));
    });
  }

  void to_edge(const MessageInstruction& i) {
    const auto& output = p_.output[i.extra[0]];
    const Heads<Acc> x = heads_of(i, 1);
    const int64_t column = i.extra[1] * column_;
    for (int64_t e = 0; e < count_; ++e) {
      write<Acc>(output, edges_[e] * output.width + column, x.at(e), i.size[1]);
    }
  }

  // Sums of a row: the first term for the next tile, those of earlier tiles, and the results' place.
  struct Sums {
    Acc *rest, *total, *out;
  };

  // Of the row in a segment. Without a type of its own `out` is `rest`.
  Sums sums_of(int64_t k, int64_t column, const Segment& segment) const {
    const auto& output = p_.output[k];
    Acc* rest = state_of(k) + column;
    const bool direct = segment.last && is_acc(output.type);
    return {rest, state_of(k, 1) + column,
            direct ? static_cast<Acc*>(output.data) + segment.row * output.width + column : rest};
  }

  // Ends a segment with W sums (`count` of them, if that is less) from column c on.
  template <int W>
  PYG_FAST_INLINE void end_sums(const Segment& segment, const Sums& to, Vec<Acc, W> sum, int64_t c,
                                Acc scale = 1, int64_t count = W) {
    if (segment.last) {
      if (!segment.first) sum += load_some<W>(to.total + c, count);
      store_some<W>(to.out + c, sum * scale, count);
      return;
    }
    const auto before = segment.first ? Vec<Acc, W>{} : load_some<W>(to.total + c, count);
    const auto after = before + sum;
    store_some<W>(to.total + c, after, count);
    store_some<W>(to.rest + c, lost_of(sum, before, after), count);
  }

  // Calls f(segment) for parts of at most kSumBlock edges.
  template <typename F>
  PYG_FAST_INLINE static void by_blocks(Segment segment, const F& f) {
    for (; segment.end - segment.begin > kSumBlock; segment.begin += kSumBlock) {
      Segment part = segment;
      part.end = part.begin + kSumBlock;
      part.last = false;
      f(part);
      segment.first = false;
    }
    f(segment);
  }

  PYG_FAST_APART void row_sum(const MessageInstruction& i, bool mean) {
    const auto& output = p_.output[i.extra[0]];
    const Heads<Acc> x = heads_of(i, 1);
    const int64_t column = i.extra[1] * column_, n = i.size[1];
    for (int64_t s = 0; s < num_segments_; ++s) {
      const Segment& segment = segments_[s];
      const Sums to = sums_of(i.extra[0], column, segment);
      const Acc scale = mean && segment.last && segment.degree > 1
                            ? 1 / static_cast<Acc>(segment.degree)
                            : Acc{1};
      with_rows(x, [&](const auto& row) PYG_FAST_ALWAYS {
        by_blocks(segment, [&](const Segment& part) PYG_FAST_ALWAYS {
          int64_t c = 0;
          for (; c + 4 * kV <= n; c += 4 * kV) add_rows<4>(row, part, to, c, scale);
          for (; c + kV <= n; c += kV) add_rows<1>(row, part, to, c, scale);
          if (c == n) return;
          V<Acc> sum = part.first ? V<Acc>{} : load_part<Acc>(to.rest + c, n - c);
          for (int64_t e = part.begin; e < part.end; ++e) sum += load_part<Acc>(row(e) + c, n - c);
          end_sums<kV>(part, to, sum, c, scale, n - c);
        });
      });
      if (segment.last && !is_acc(output.type)) {
        write<Acc>(output, segment.row * output.width + column, to.out, n);
      }
    }
  }

  template <int kVectors, typename Row>
  PYG_FAST_INLINE void add_rows(const Row& row_of, const Segment& segment, const Sums& to,
                                int64_t c, Acc scale) {
    V<Acc> sum[kVectors];
    PYG_FAST_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      sum[j] = segment.first ? V<Acc>{} : load<kV>(to.rest + c + j * kV);
    }
    for (int64_t e = segment.begin; e < segment.end; ++e) {
      const Acc* row = row_of(e) + c;
      PYG_FAST_UNROLL
      for (int j = 0; j < kVectors; ++j) sum[j] += load<kV>(row + j * kV);
    }
    PYG_FAST_UNROLL
    for (int j = 0; j < kVectors; ++j) end_sums<kV>(segment, to, sum[j], c + j * kV, scale);
  }

  // Sums of products of x with w, which has a factor for each head or for each number. A sum, a mean, or
  // the average by the softmax of another output.
  PYG_FAST_APART void row_product(const MessageInstruction& i) {
    const auto& output = p_.output[i.extra[0]];
    const Heads<Acc> x = heads_of(i, 1), w = heads_of(i, 2);
    const int64_t heads = i.size[1], channels = i.size[2], n = heads * channels;
    const int64_t column = i.extra[1] * column_, groups = i.extra[3];
    const MessageOutput* softmax = groups > 0 ? &p_.output[i.extra[2]] : nullptr;
    const Acc* decay = groups > 0 ? state_of(i.extra[2], 2) + column : nullptr;
    for (int64_t s = 0; s < num_segments_; ++s) {
      const Segment& segment = segments_[s];
      const Sums to = sums_of(i.extra[0], column, segment);
      if (softmax != nullptr && !segment.first && decays(decay, groups)) {
        scale(to.rest, decay, n, groups);
        scale(to.total, decay, n, groups);
      }
      by_blocks(segment,
                [&](const Segment& part) { add_products(x, w, heads, channels, part, to); });
      if (!segment.last) continue;
      if (softmax != nullptr) {
        const int64_t first = segment.row * softmax->width + column;
        scale(to.out, static_cast<const Acc*>(softmax->arg) + first, n, groups);
      } else if (i.extra[2] != 0 && segment.degree > 1) {
        const Acc part = 1 / static_cast<Acc>(segment.degree);
        scale(to.out, &part, n, 1);
      }
      if (!is_acc(output.type)) {
        write<Acc>(output, segment.row * output.width + column, to.out, n);
      }
    }
  }

  static bool decays(const Acc* decay, int64_t groups) {
    for (int64_t g = 0; g < groups; ++g) {
      if (decay[g] != 1) return true;
    }
    return false;
  }

  // Adds the products of a segment.
  void add_products(const Heads<Acc>& x, const Heads<Acc>& w, int64_t heads, int64_t channels,
                    const Segment& segment, const Sums& to) {
    const int64_t n = heads * channels;
    const bool dense = heads > 1 && x.head == channels && w.head == 1;
    const bool each = heads == 1 && w.inner == 1;
    const auto by_lanes = [&](auto v, auto g) PYG_FAST_ALWAYS {
      constexpr int W = decltype(v)::value, G = decltype(g)::value;
      if (each) {
        if constexpr (G == W) add_vectors<W, 0>(x, w, n, channels, segment, to);
      } else {
        add_vectors<W, G>(x, w, n, channels, segment, to);
      }
    };
    if ((each || w.inner == 0) && with_head_lanes<Acc>(heads, channels, dense, by_lanes)) return;
    if (segment.first) {
      __builtin_memset(to.out, 0, static_cast<size_t>(n) * sizeof(Acc));
    } else if (to.out != to.rest) {
      __builtin_memcpy(to.out, to.rest, static_cast<size_t>(n) * sizeof(Acc));
    }
    for (int64_t e = segment.begin; e < segment.end; ++e) {
      const Acc *row = x.at(e), *factor = w.at(e);
      Acc* out = to.out;
      for (int64_t h = 0; h < heads; ++h, row += x.head, factor += w.head, out += channels) {
        for (int64_t c = 0; c < channels; c += kV) {
          const int64_t count = channels - c < kV ? channels - c : kV;
          const V<Acc> f = w.inner == 0 ? all<Acc>(*factor) : load_part_or_all(factor + c, count);
          const V<Acc> v = load_part_or_all(row + c, count);
          store_part_or_all(out + c, load_part_or_all(out + c, count) + v * f, count);
        }
      }
    }
    if (segment.first && segment.last) return;
    for (int64_t c = 0; c < n; c += kV) {
      const int64_t count = n - c < kV ? n - c : kV;
      end_sums<kV>(segment, to, load_part_or_all(to.out + c, count), c, 1, count);
    }
  }

  // Of heads as with_head_lanes divides them. G is 0 where w has a factor for each number.
  template <int W, int G>
  PYG_FAST_INLINE void add_vectors(const Heads<Acc>& x, const Heads<Acc>& w, int64_t n,
                                   int64_t channels, const Segment& segment, const Sums& to) {
    constexpr int kMost = kManyRegisters ? 8 : 4;
    const int64_t vectors = n / W;
    int64_t k = 0;
    for (; k + kMost <= vectors; k += kMost) {
      add_heads<W, G, kMost>(x, w, channels, k, segment, to);
    }
    if (k + 4 <= vectors) {
      add_heads<W, G, 4>(x, w, channels, k, segment, to);
      k += 4;
    }
    for (; k < vectors; ++k) add_heads<W, G, 1>(x, w, channels, k, segment, to);
  }

  // N vectors of W columns, from the k-th on.
  template <int W, int G, int N>
  void add_heads(const Heads<Acc>& x, const Heads<Acc>& w, int64_t channels, int64_t k,
                 const Segment& segment, const Sums& to) {
    Vec<Acc, W> sum[N];
    int64_t of_x[N], of_w[N];
    PYG_FAST_UNROLL
    for (int j = 0; j < N; ++j) {
      const int64_t column = (k + j) * W, head = column / channels;
      of_x[j] = head * x.head + column % channels;
      of_w[j] = head * w.head;
      sum[j] = segment.first ? Vec<Acc, W>{} : load<W>(to.rest + column);
    }
    for (int64_t e = segment.begin; e < segment.end; ++e) {
      const Acc *row = x.at(e), *factor = w.at(e);
      PYG_FAST_UNROLL
      for (int j = 0; j < N; ++j) {
        if constexpr (G == 0) {
          const int64_t column = (k + j) * W;
          sum[j] += load<W>(row + column) * load<W>(factor + column);
        } else if constexpr (G < W) {
          Vec<Acc, W> of_heads = {};
          __builtin_memcpy(&of_heads, factor + (k + j) * (W / G), W / G * sizeof(Acc));
          sum[j] += load<W>(row + (k + j) * W) * repeated<Acc, W, G>(of_heads);
        } else {
          sum[j] += load<W>(row + of_x[j]) * splat<W>(factor[of_w[j]]);
        }
      }
    }
    PYG_FAST_UNROLL
    for (int j = 0; j < N; ++j) end_sums<W>(segment, to, sum[j], (k + j) * W);
  }

  // Multiplies n numbers by one factor for each group of them.
  void scale(Acc* x, const Acc* factor, int64_t n, int64_t groups) {
    const bool single = groups > 1 && groups == n;
    const int64_t rows = single ? 1 : groups, columns = n / rows;
    for (int64_t g = 0; g < rows; ++g, x += columns) {
      for (int64_t c = 0; c < columns; c += kV) {
        const int64_t count = columns - c < kV ? columns - c : kV;
        const V<Acc> f = single ? load_part_or_all(factor + c, count) : all<Acc>(factor[g]);
        store_part_or_all(x + c, load_part_or_all(x + c, count) * f, count);
      }
    }
  }

  // Turns scores into exponentials relative to about the largest score of the row so far (softmax.h).
  // Later instructions multiply earlier sums by `decay`. The results are that score, and the reciprocal of
  // the sum.
  PYG_FAST_APART void row_softmax(const MessageInstruction& i) {
    const auto& output = p_.output[i.extra[0]];
    const int64_t n = i.size[1], column = i.extra[1] * column_;
    const Acc* scores = address(i.operand[1]);
    Acc* powers = address(i.operand[0]);
    Acc* sum = state_of(i.extra[0]) + column;
    Acc* total = state_of(i.extra[0], 3) + column;
    Acc* most = state_of(i.extra[0], 1) + column;
    Acc* decay = state_of(i.extra[0], 2) + column;
    // Vectors hold several edges, or parts of one.
    const bool flat = kV % n == 0;
    for (int64_t s = 0; s < num_segments_; ++s) {
      const Segment& segment = segments_[s];
      if (segment.first) {
        for (int64_t h = 0; h < n; ++h) {
          sum[h] = total[h] = 0;
          most[h] = -std::numeric_limits<Acc>::infinity();
        }
      }
      const int64_t at = segment.begin * n, size = (segment.end - segment.begin) * n;
      for (int64_t c = 0; c < n; c += kV) {
        const int64_t width = flat ? kV : n - c < kV ? n - c : kV;
        // Only the first segment of a tile goes on with earlier sums.
        add_to_softmax(scores + at + c, powers + at + c, size - c, flat ? kV : n, width, n, sum + c,
                       total + c, most + c, segment.first ? nullptr : decay + c);
      }
      if (!segment.last) continue;
      const int64_t place = segment.row * output.width + column;
      Acc* most_of = static_cast<Acc*>(output.data) + place;
      Acc* scale_of = static_cast<Acc*>(output.arg) + place;
      for (int64_t h = 0; h < n; ++h) {
        most_of[h] = segment.degree > 0 ? most[h] : 0;
        scale_of[h] = segment.degree > 0 ? 1 / (total[h] + sum[h]) : 0;
      }
    }
  }

  // Rows of `width` numbers, `stride` apart, of `size` in all; lanes at a distance of n are of one head.
  PYG_FAST_INLINE void add_to_softmax(const Acc* scores, Acc* powers, int64_t size, int64_t stride,
                                      int64_t width, int64_t n, Acc* sum, Acc* whole, Acc* most,
                                      Acc* decay) {
    const int64_t heads = n < width ? n : width;
    const auto folded_heads = [&](V<Acc> v, const auto& f) PYG_FAST_ALWAYS {
      Acc lanes[kV];
      stride == kV ? fold<Acc, kV>(v, n < kV ? n : kV, lanes, f) : store<kV>(lanes, v);
      return load<kV>(lanes);
    };
    const auto of_heads = [&](const Acc* p) PYG_FAST_ALWAYS {
      Acc lanes[kV];
      for (int64_t k = 0; k < kV; ++k) lanes[k] = k < heads ? p[k] : lanes[k - heads];
      return load<kV>(lanes);
    };
    const auto larger_of = [](auto a, auto b) PYG_FAST_ALWAYS { return larger(a, b); };
    const V<Acc> before = of_heads(most);
    V<Acc> top = before;
    int64_t at = 0;
    for (; at + kV <= size && width == kV; at += stride) top = larger(load<kV>(scores + at), top);
    for (; at < size; at += stride) {
      const int64_t count = size - at < width ? size - at : width;
      const M<Acc> within = first_lanes<Acc>(count);
      top = within != 0 ? larger(load_part<Acc>(scores + at, count), top) : top;
    }
    top = new_base<Acc, kV>(before, folded_heads(top, larger_of));
    const V<Acc> base = top > -std::numeric_limits<Acc>::infinity() ? top : V<Acc>{};
    V<Acc> total = {};
    at = 0;
    for (; at + kV <= size && width == kV; at += stride) {
      const V<Acc> power = exp_of<Acc, kV>(load<kV>(scores + at) - base);
      total += power;
      store<kV>(powers + at, power);
    }
    for (; at < size; at += stride) {
      const int64_t count = size - at < width ? size - at : width;
      const V<Acc> power = exp_of<Acc, kV>(load_part<Acc>(scores + at, count) - base);
      total += masked<Acc, kV>(power, first_lanes<Acc>(count));
      store_part<Acc>(powers + at, power, count);
    }
    total = folded_heads(total, [](auto a, auto b) PYG_FAST_ALWAYS { return a + b; });
    const V<Acc> decayed = exp_of<Acc, kV>(before - base);
    for (int64_t h = 0; h < heads; ++h) most[h] = top[h];
    if (decay == nullptr) {
      for (int64_t h = 0; h < heads; ++h) sum[h] = total[h];
      return;
    }
    const V<Acc> part = of_heads(sum) * decayed + total, earlier = of_heads(whole) * decayed;
    const V<Acc> sums = earlier + part, rest = lost_of(part, earlier, sums);
    for (int64_t h = 0; h < heads; ++h) {
      decay[h] = decayed[h];
      whole[h] = sums[h];
      sum[h] = rest[h];
    }
  }

  // The largest (or smallest) rows of a segment, from column c on, `count` of the last vector.
  template <bool kMost, int kVectors, typename Row>
  PYG_FAST_INLINE void best_rows(const Row& row_of, const Segment& segment, int64_t c,
                                 int64_t count, Acc* state, int64_t* chosen) {
    V<Acc> best[kVectors];
    M<Acc> place[kVectors];
    const Acc* row = row_of(segment.begin) + c;
    PYG_FAST_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      best[j] = load_part_or_all(row + j * kV, count);
      place[j] = M<Acc>{};
    }
    for (int64_t e = segment.begin + 1; e < segment.end; ++e) {
      row = row_of(e) + c;
      const M<Acc> now = M<Acc>{} + static_cast<mask_t<Acc>>(e - segment.begin);
      PYG_FAST_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const V<Acc> v = load_part_or_all(row + j * kV, count);
        const M<Acc> order = kMost ? v > best[j] : v < best[j];
        const M<Acc> better = order | ((v != v) & (best[j] == best[j]));
        best[j] = better != 0 ? v : best[j];
        place[j] = better != 0 ? now : place[j];
      }
    }
    for (int j = 0; j < kVectors; ++j, c += kV) {
      for (int64_t k = 0; k < count; ++k) {
        const Acc v = best[j][k], old = state[c + k];
        const bool better = (kMost ? v > old : v < old) || (v != v && old == old);
        if (segment.first || better) {
          state[c + k] = v;
          chosen[c + k] = edges_[segment.begin + place[j][k]];
        }
      }
    }
  }

  template <typename Index, bool kMost>
  PYG_FAST_APART void extreme(const MessageInstruction& i) {
    const auto& output = p_.output[i.extra[0]];
    const Heads<Acc> x = heads_of(i, 1);
    const int64_t column = i.extra[1] * column_, n = i.size[1];
    Acc* state = state_of(i.extra[0]) + column;
    int64_t* chosen = chosen_ + state_at_[2 * i.extra[0] + 1] + column;
    for (int64_t s = 0; s < num_segments_; ++s) {
      const Segment& segment = segments_[s];
      if (segment.begin < segment.end) {
        with_rows(x, [&](const auto& row) PYG_FAST_ALWAYS {
          int64_t c = 0;
          for (; c + 4 * kV <= n; c += 4 * kV) {
            best_rows<kMost, 4>(row, segment, c, kV, state, chosen);
          }
          for (; c < n; c += kV) {
            best_rows<kMost, 1>(row, segment, c, n - c < kV ? n - c : kV, state, chosen);
          }
        });
      } else if (segment.first) {
        for (int64_t c = 0; c < n; ++c) {
          state[c] = 0;
          chosen[c] = -1;
        }
      }
      if (!segment.last) continue;
      const int64_t at = segment.row * output.width + column;
      write<Acc>(output, at, state, n);
      Index* arg = static_cast<Index*>(output.arg) + at;
      for (int64_t c = 0; c < n; ++c) arg[c] = static_cast<Index>(chosen[c]);
    }
  }

  // `count` numbers; all W if W is less than the width of a vector.
  template <int W>
  static PYG_FAST_INLINE Vec<Acc, W> load_some(const Acc* p, int64_t count) {
    if constexpr (W == kV) return load_part_or_all(p, count);
    else return load<W>(p);
  }
  template <int W>
  static PYG_FAST_INLINE void store_some(Acc* p, Vec<Acc, W> v, int64_t count) {
    if constexpr (W == kV) store_part_or_all(p, v, count);
    else store<W>(p, v);
  }
  static PYG_FAST_INLINE V<Acc> load_part_or_all(const Acc* p, int64_t count) {
    return count == kV ? load<kV>(p) : load_part<Acc>(p, count);
  }
  static PYG_FAST_INLINE void store_part_or_all(Acc* p, V<Acc> v, int64_t count) {
    count == kV ? store<kV>(p, v) : store_part<Acc>(p, v, count);
  }

  static constexpr int64_t kBuffer = 64;

  const Message& p_;
  const MessageHeader& head_;
  const int64_t share_;
  const int64_t* body_ = nullptr;
  Scratch<Acc> numbers_;
  Scratch<Acc*> pointers_;
  Scratch<int64_t> offsets_, choices_, ids_;
  Scratch<Segment> parts_;
  Acc *tile_ = nullptr, *uniform_ = nullptr, *state_ = nullptr, *buffer_ = nullptr;
  Acc** bases_ = nullptr;
  int64_t *state_at_ = nullptr, *chosen_ = nullptr;
  int64_t *rows_ = nullptr, *cols_ = nullptr, *edges_ = nullptr;  // of the edges of the tile
  Segment* segments_ = nullptr;
  int64_t num_segments_ = 0;
  int64_t count_ = 0;        // edges of the tile
  int64_t column_ = 0;       // the first one of the chunk
  int64_t since_carry_ = 0;  // edges of the tiles whose sums are not yet in the results
};

}  // namespace

void message(const Message& p, int64_t share, int64_t begin, int64_t end) {
  if (begin >= end) return;
  p.wide ? Machine<double>(p, share).run(begin, end) : Machine<float>(p, share).run(begin, end);
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(message, (const Message& p, int64_t share, int64_t begin, int64_t end),
                (p, share, begin, end))
