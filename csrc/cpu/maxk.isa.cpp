// The k largest entries of each row: bisects an interval that contains the smallest of them.
#include "params/maxk.h"
#include "vec.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// Maps numbers to integers of the same order: -0 is 0, all NaN are ~kLeast, padding is kLeast.
template <typename Acc, int V>
PYG_FAST_INLINE Vec<mask_t<Acc>, V> keys_of(Vec<Acc, V> x) {
  using Key = mask_t<Acc>;
  const auto bits = bit_cast<Vec<Key, V>>(x + Acc{0});
  const auto keys = bits ^ (bits >> (8 * sizeof(Key) - 1) & ~kLeast<Key>);
  return x == x ? keys : (keys & 0) + ~kLeast<Key>;
}

template <typename Acc>
PYG_FAST_INLINE mask_t<Acc> key_of(Acc x) {
  return keys_of<Acc, 1>(Vec<Acc, 1>{x})[0];
}

template <typename Acc>
PYG_FAST_INLINE Acc number_of(mask_t<Acc> key) {
  using Key = mask_t<Acc>;
  return bit_cast<Acc>(static_cast<Key>(key ^ (key >> (8 * sizeof(Key) - 1) & ~kLeast<Key>)));
}

// Bit i is 1 if keys[i] >= bound.
template <int V, typename Key>
PYG_FAST_INLINE uint64_t at_least(const Key* keys, Key bound) {
#if defined(__AVX512F__)
  if constexpr (V == 16) {
    return _mm512_cmpge_epi32_mask(_mm512_load_si512(keys), _mm512_set1_epi32(bound));
  } else if constexpr (V == 8 && sizeof(Key) == 8) {
    return _mm512_cmpge_epi64_mask(_mm512_load_si512(keys), _mm512_set1_epi64(bound));
  }
#elif defined(__AVX2__)
  const __m256i v = _mm256_load_si256(reinterpret_cast<const __m256i*>(keys));
  if constexpr (V == 8) {
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(bound), v);
    return ~_mm256_movemask_ps(_mm256_castsi256_ps(below)) & 0xffu;
  } else if constexpr (V == 4) {
    const __m256i below = _mm256_cmpgt_epi64(_mm256_set1_epi64x(bound), v);
    return ~_mm256_movemask_pd(_mm256_castsi256_pd(below)) & 0xfu;
  }
#endif
  uint64_t bits = 0;
  PYG_FAST_UNROLL
  for (int i = 0; i < V; ++i) bits |= uint64_t{keys[i] >= bound} << i;
  return bits;
}

// The keys of a row, followed by at least 64 keys kLeast.
template <typename Acc>
struct Keys {
  using Key = mask_t<Acc>;
  static constexpr int V = kVectorBytes / sizeof(Key);
  Key* data;
  int64_t dim;

  // Compares the 64 keys from `first` on.
  PYG_FAST_INLINE uint64_t word_at_least(int64_t first, Key bound) const {
    uint64_t bits = 0;
    PYG_FAST_UNROLL
    for (int i = 0; i < 64; i += V) bits |= at_least<V>(data + first + i, bound) << i;
    return bits;
  }

  int64_t count(Key bound) const {
    int64_t count = 0;
    for (int64_t first = 0; first < dim; first += 64) {
      count += __builtin_popcountll(word_at_least(first, bound));
    }
    return count;
  }

  // Describes the k largest keys: all above `key`, and the first `ties` of those equal to it.
  struct Bound {
    Key key;
    int64_t ties;
  };

  Bound largest(int64_t k) const {
    Key low = data[0], high = data[0];
    range(low, high);
    if (k == dim) return {low, dim};
    if (k == 1) return {high, 1};
    // Invariant: at least k keys are >= `low`, fewer than k are > `high`. Bisecting the numbers takes
    // fewest steps for most data; otherwise bisecting the keys ends soon.
    constexpr int kStepsByNumber = 12;
    int64_t above = 0;
    for (int step = 0; low < high; ++step) {
      const Acc a = number_of<Acc>(low), b = number_of<Acc>(high), number = a / 2 + b / 2;
      Key middle;
      if (step < kStepsByNumber && number > a && number <= b) {
        middle = key_of(number);
      } else {
        const uint64_t gap = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
        middle = static_cast<Key>(static_cast<uint64_t>(low) + gap / 2 + gap % 2);
      }
      const int64_t found = count(middle);
      if (found == k) return {middle, dim};
      if (found > k) {
        low = middle;
      } else {
        high = middle - 1;
        above = found;
      }
    }
    return {low, k - above};
  }

 private:
  void range(Key& low, Key& high) const {
    Vec<Key, V> least = {}, most;
    least += low;
    most = least;
    int64_t f = 0;
    for (; f + V <= dim; f += V) {
      Vec<Key, V> v;
      __builtin_memcpy(&v, data + f, sizeof(v));
      least = v < least ? v : least;
      most = v > most ? v : most;
    }
    for (; f < dim; ++f) {
      low = data[f] < low ? data[f] : low;
      high = data[f] > high ? data[f] : high;
    }
    for (int i = 0; i < V; ++i) {
      low = least[i] < low ? least[i] : low;
      high = most[i] > high ? most[i] : high;
    }
  }
};

template <typename T, typename C>
void maxk_row(const Keys<acc_t<T>>& keys, const T* x, int64_t k, T* values, C* columns) {
  using Key = mask_t<acc_t<T>>;
  const auto bound = keys.largest(k);
  int64_t ties_left = bound.ties;
  for (int64_t first = 0; first < keys.dim; first += 64) {
    uint64_t chosen = keys.word_at_least(first, bound.key);
    if (bound.ties < keys.dim) {
      const uint64_t above =
          bound.key == ~kLeast<Key> ? 0 : keys.word_at_least(first, bound.key + 1);
      uint64_t ties = chosen & ~above;
      int64_t count = __builtin_popcountll(ties);
      for (; count > ties_left; --count) ties ^= uint64_t{1} << (63 - __builtin_clzll(ties));
      ties_left -= count;
      chosen = above | ties;
    }
    for (; chosen != 0; chosen &= chosen - 1) {
      const int64_t f = first + __builtin_ctzll(chosen);
      *values++ = x[f];
      *columns++ = static_cast<C>(f);
    }
  }
}

template <typename T, typename C>
void maxk_row_balanced(const Keys<acc_t<T>>& keys, const T* x, int64_t k, T* values, C* columns) {
  using Key = mask_t<acc_t<T>>;
  constexpr int V = Keys<acc_t<T>>::V;
  Vec<Key, V> lane;
  for (int i = 0; i < V; ++i) lane[i] = i;
  for (int64_t c = 0; c < k; c += V) {
    Vec<Key, V> best, at = lane + static_cast<Key>(c);
    __builtin_memcpy(&best, keys.data + c, sizeof(best));
    for (int64_t f = c + k; f < keys.dim; f += k) {
      Vec<Key, V> v;
      __builtin_memcpy(&v, keys.data + f, sizeof(v));
      at = v > best ? lane + static_cast<Key>(f) : at;
      best = v > best ? v : best;
    }
    for (int i = 0; i < V && c + i < k; ++i) {
      values[c + i] = x[at[i]];
      columns[c + i] = static_cast<C>(at[i]);
    }
  }
}

template <typename T, typename C>
void maxk_rows(const MaxK& p, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  using Key = mask_t<Acc>;
  const int64_t padded = (p.dim + 63) / 64 * 64 + 64;
  Scratch<Key> scratch;
  const Keys<Acc> keys{scratch.of_size(padded), p.dim};
  for (int64_t f = p.dim; f < padded; ++f) keys.data[f] = kLeast<Key>;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.dim;
    T* values = static_cast<T*>(p.values) + row * p.k;
    C* columns = static_cast<C*>(p.columns) + row * p.k;
    for_chunks<kLanes<T>>(0, p.dim, [&](auto v, int64_t f) PYG_FAST_ALWAYS {
      constexpr int V = decltype(v)::value;
      const auto chunk = keys_of<Acc, V>(load<V>(x + f));
      __builtin_memcpy(keys.data + f, &chunk, sizeof(chunk));
    });
    if (p.balanced) {
      maxk_row_balanced(keys, x, p.k, values, columns);
    } else {
      maxk_row(keys, x, p.k, values, columns);
    }
  }
}

void maxk(const MaxK& p, int64_t row_begin, int64_t row_end) {
  with_types(p.dtype, false, [&](auto type, auto) {
    with_columns(p.column_type, [&](auto column) {
      maxk_rows<typename decltype(type)::type, typename decltype(column)::type>(p, row_begin,
                                                                                row_end);
    });
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(maxk, (const MaxK& p, int64_t row_begin, int64_t row_end), (p, row_begin, row_end))
