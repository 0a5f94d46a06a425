// Element types, vectors of them and the choice of a tile. All is in the namespace of one instruction
// set: no other translation unit shares code compiled for it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "isa.h"
#include "params/common.h"

#define PYG_FAST_ALWAYS __attribute__((always_inline))
#define PYG_FAST_INLINE inline PYG_FAST_ALWAYS
#if defined(__clang__)
#define PYG_FAST_UNROLL _Pragma("unroll")
#define PYG_FAST_NO_UNROLL _Pragma("nounroll")
#else
#define PYG_FAST_UNROLL _Pragma("GCC unroll 16")
#define PYG_FAST_NO_UNROLL _Pragma("GCC unroll 1")
#endif

namespace pyg_fast::cpu::PYG_FAST_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kMaxVectors = 8;  // accumulators of a tile: they must stay in registers
constexpr bool kManyRegisters = kVectorBytes == 64;  // 32 of them, not 16
constexpr int kCacheLine = 64;

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename T>
using acc_t = typename Accumulator<T>::type;

template <typename T>
constexpr int kLanes = kVectorBytes / sizeof(acc_t<T>);

template <typename T, int V>
struct VectorOf {
  typedef T type __attribute__((vector_size(V * sizeof(T))));
};
template <typename T, int V>
using Vec = typename VectorOf<T, V>::type;

template <typename Acc>
struct MaskOf;
template <>
struct MaskOf<float> {
  using type = int32_t;
};
template <>
struct MaskOf<double> {
  using type = int64_t;
};
// The integer type as wide as Acc: the result type of a vector comparison.
template <typename Acc>
using mask_t = typename MaskOf<Acc>::type;

template <typename To, typename From>
PYG_FAST_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// The smallest integer of the type.
template <typename Key>
constexpr Key kLeast = static_cast<Key>(uint64_t{1} << (8 * sizeof(Key) - 1));

// load<V>(p): V consecutive elements, widened to their accumulator type.
template <int V>
PYG_FAST_INLINE Vec<float, V> load(const float* p) {
  Vec<float, V> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <int V>
PYG_FAST_INLINE Vec<double, V> load(const double* p) {
  Vec<double, V> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <int V>
PYG_FAST_INLINE Vec<float, V> load(const int8_t* p) {
  Vec<int8_t, V> v;
  __builtin_memcpy(&v, p, sizeof(v));
#if defined(__AVX512F__)
  if constexpr (V == 16) {
    const auto wide = _mm512_maskz_cvtepi8_epi32(0xffff, bit_cast<__m128i>(v));
    return bit_cast<Vec<float, V>>(_mm512_maskz_cvtepi32_ps(0xffff, wide));
  }
#endif
#if defined(__AVX2__)
  if constexpr (V == 8) {
    const auto wide = _mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(v)));
    return bit_cast<Vec<float, V>>(_mm256_cvtepi32_ps(wide));
  }
#endif
  // Two steps: compilers convert a wider step element by element.
  const auto wide = __builtin_convertvector(v, Vec<int16_t, V>);
  return __builtin_convertvector(__builtin_convertvector(wide, Vec<int32_t, V>), Vec<float, V>);
}

template <int V>
PYG_FAST_INLINE Vec<uint32_t, V> load_bits(const void* p) {
  Vec<uint16_t, V> v;
  __builtin_memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, Vec<uint32_t, V>);
}

template <int V>
PYG_FAST_INLINE Vec<float, V> load(const BFloat16* p) {
  return bit_cast<Vec<float, V>>(load_bits<V>(p) << 16);
}

template <int V>
PYG_FAST_INLINE Vec<float, V> load(const Half* p) {
#if defined(__F16C__)
  if constexpr (V == 4) {
    int64_t bits;
    __builtin_memcpy(&bits, p, sizeof(bits));
    return bit_cast<Vec<float, V>>(_mm_cvtph_ps(_mm_cvtsi64_si128(bits)));
  } else if constexpr (V == 8) {
    __m128i bits;
    __builtin_memcpy(&bits, p, sizeof(bits));
    return bit_cast<Vec<float, V>>(_mm256_cvtph_ps(bits));
  }
#endif
#if defined(__AVX512F__)
  if constexpr (V == 16) {
    __m256i bits;
    __builtin_memcpy(&bits, p, sizeof(bits));
    return bit_cast<Vec<float, V>>(_mm512_maskz_cvtph_ps(0xffff, bits));
  }
#endif
  // A multiplication rebiases the exponent, which also handles subnormals.
  const Vec<uint32_t, V> h = load_bits<V>(p);
  const auto magnitude = bit_cast<Vec<float, V>>((h & 0x7fffu) << 13) * 0x1p112f;
  const auto special = (h & 0x7c00u) == 0x7c00u ? (h & 0) + 0x7f800000u : (h & 0);
  return bit_cast<Vec<float, V>>(bit_cast<Vec<uint32_t, V>>(magnitude) | special |
                                 (h & 0x8000u) << 16);
}

// store(p, v): rounded to nearest even; NaN stays NaN.
template <int V>
PYG_FAST_INLINE void store(float* p, Vec<float, V> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

template <int V>
PYG_FAST_INLINE void store(double* p, Vec<double, V> v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

template <int V>
PYG_FAST_INLINE void store_bits(void* p, Vec<uint32_t, V> bits) {
  const auto v = __builtin_convertvector(bits, Vec<uint16_t, V>);
  __builtin_memcpy(p, &v, sizeof(v));
}

template <int V>
PYG_FAST_INLINE void store(BFloat16* p, Vec<float, V> v) {
  const auto bits = bit_cast<Vec<uint32_t, V>>(v);
  const auto rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  store_bits<V>(p, v == v ? rounded : (bits >> 16) | 0x40u);
}

template <int V>
PYG_FAST_INLINE void store(Half* p, Vec<float, V> v) {
  // Adding 0.5 rounds subnormal results, integer arithmetic the normal ones; above 65520: infinity.
  const auto bits = bit_cast<Vec<uint32_t, V>>(v);
  const auto magnitude = bits & 0x7fffffffu;
  const auto sum = bit_cast<Vec<float, V>>(magnitude) + 0.5f;
  const auto subnormal = bit_cast<Vec<uint32_t, V>>(sum) - 0x3f000000u;
  const auto normal = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1u)) >> 13;
  const auto infinite = (bits & 0) + 0x7c00u;
  auto half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? infinite : half;
  half = v == v ? half : infinite | 0x200u;
  store_bits<V>(p, half | (bits >> 16 & 0x8000u));
}

template <typename T>
PYG_FAST_INLINE acc_t<T> load_one(const T* p) {
  return load<1>(p)[0];
}

template <typename T>
PYG_FAST_INLINE void store_one(T* p, acc_t<T> v) {
  store<1>(p, Vec<acc_t<T>, 1>{v});
}

template <typename Acc, int V>
PYG_FAST_INLINE Acc sum_of(Vec<Acc, V> v) {
  if constexpr (V == 1) {
    return v[0];
  } else {
    struct Halves {
      Vec<Acc, V / 2> low, high;
    };
    const auto halves = bit_cast<Halves>(v);
    return sum_of<Acc, V / 2>(halves.low + halves.high);
  }
}

template <int N>
struct Int {
  static constexpr int value = N;
};
template <typename T>
struct Type {
  using type = T;
};

// Calls f(Type<T>, Type<Index>) with the stored types.
template <typename F>
PYG_FAST_INLINE void with_types(DType dtype, bool index64, const F& f) {
  const auto with_index = [&](auto type) {
    index64 ? f(type, Type<int64_t>{}) : f(type, Type<int32_t>{});
  };
  switch (dtype) {
    case DType::f32: return with_index(Type<float>{});
    case DType::f64: return with_index(Type<double>{});
    case DType::f16: return with_index(Type<Half>{});
    case DType::bf16: return with_index(Type<BFloat16>{});
  }
}

// Calls f(Type<C>) with the type of the columns.
template <typename F>
PYG_FAST_INLINE void with_columns(ColumnType type, const F& f) {
  switch (type) {
    case ColumnType::u8: return f(Type<uint8_t>{});
    case ColumnType::u16: return f(Type<uint16_t>{});
    case ColumnType::i32: return f(Type<int32_t>{});
  }
}

// Calls f(Int<V>, i) for chunks [i, i + V) that cover [begin, end); the last few are narrower.
template <int V, typename F>
PYG_FAST_INLINE void for_chunks(int64_t begin, int64_t end, const F& f) {
  for (; begin + V <= end; begin += V) f(Int<V>{}, begin);
  if constexpr (V > 1) {
    if (begin < end) for_chunks<V / 2>(begin, end, f);
  }
}

// A tile is N vectors of V lanes that cover `width` columns from `column` on. Vector j starts at j * V,
// but the last one at `last`: it overlaps the previous one if V does not divide width.
struct Tile {
  int64_t column;
  int64_t width;
};

template <int V, int N>
PYG_FAST_INLINE int64_t offset(int j, int64_t last) {
  return j + 1 < N ? int64_t{j} * V : last;
}

constexpr int64_t kPrefetchEdges = 16;

template <typename T, int V, int N>
PYG_FAST_INLINE void prefetch_tile(const T* x) {
  PYG_FAST_UNROLL
  for (int byte = 0; byte < static_cast<int>(sizeof(T)) * V * N; byte += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(x) + byte);
  }
}

// Calls f(Int<V>, Int<N>) for a width of at most kMost vectors.
template <int V, typename F>
PYG_FAST_INLINE void with_narrow(int64_t width, const F& f) {
  if (width == V) {
    f(Int<V>{}, Int<1>{});
  } else if (width > V) {
    f(Int<V>{}, Int<2>{});
  } else if constexpr (V > 1) {
    with_narrow<V / 2>(width, f);
  }
}

template <int V, int N, int kMost, typename F>
PYG_FAST_INLINE void with_vectors(int64_t vectors, const F& f) {
  if (vectors == N) {
    f(Int<V>{}, Int<N>{});
  } else if constexpr (N < kMost) {
    with_vectors<V, N + 1, kMost>(vectors, f);
  }
}

template <typename T, int kMost, typename F>
PYG_FAST_INLINE void with_tile(int64_t width, const F& f) {
  constexpr int V = kLanes<T>;
  if (width <= V) {
    with_narrow<V>(width, f);
  } else {
    with_vectors<V, 2, kMost>((width + V - 1) / V, f);
  }
}

// Calls f(Tile) for tiles of about equal width, at most max_vectors, that cover `dim` columns.
template <typename T, typename F>
PYG_FAST_INLINE void for_tiles(int64_t dim, int64_t max_vectors, const F& f) {
  constexpr int V = kLanes<T>;
  const int64_t vectors = (dim + V - 1) / V;
  const int64_t tiles = (vectors + max_vectors - 1) / max_vectors;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = vectors * t / tiles * V;
    const int64_t end = vectors * (t + 1) / tiles * V;
    f(Tile{begin, (end < dim ? end : dim) - begin});
  }
}

// Uninitialised memory that grows on demand.
template <typename T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { ::operator delete(data_, kAlign); }

  T* of_size(int64_t size) {
    if (size > size_) {
      ::operator delete(data_, kAlign);
      data_ = nullptr;
      const size_t bytes = static_cast<size_t>(size) * sizeof(T);
      data_ = static_cast<T*>(::operator new(bytes, kAlign));
      size_ = size;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlign{kCacheLine};
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// weight[e - begin] = the value of edge e.
template <typename T, typename Index, typename Acc>
PYG_FAST_INLINE void gather_values(const T* value, const Index* perm, int64_t begin, int64_t end,
                                   Acc* weight) {
  if (perm != nullptr) {
    for (int64_t e = begin; e < end; ++e) weight[e - begin] = load_one(value + perm[e]);
  } else {
    for (int64_t e = begin; e < end; ++e) weight[e - begin] = load_one(value + e);
  }
}

// Calls f(row_begin, row_end, weight) for blocks of rows whose edge weights fit a small buffer; `fill`
// writes the weights of edges [begin, end) there. weight[e] is the weight of edge e.
template <typename Acc, typename Index, typename Fill, typename F>
PYG_FAST_INLINE void for_weighted_blocks(const Index* rowptr, int64_t row_begin, int64_t row_end,
                                         const Fill& fill, const F& f) {
  constexpr int64_t kBlockEdges = 2048;
  Scratch<Acc> scratch;
  while (row_begin < row_end) {
    const int64_t begin = rowptr[row_begin];
    int64_t stop = row_begin + 1;
    while (stop < row_end && rowptr[stop + 1] - begin <= kBlockEdges) ++stop;
    const int64_t end = rowptr[stop];
    Acc* weight = scratch.of_size(end - begin > kBlockEdges ? end - begin : kBlockEdges);
    fill(begin, end, weight);
    f(row_begin, stop, weight - begin);
    row_begin = stop;
  }
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA
