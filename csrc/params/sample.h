// Selects the sampled edges of a row by arithmetic on its degree: any kernel can repeat it.
#pragma once
#include <type_traits>

#include "random.h"

namespace pyg_fast {

// Which edges to sample: the first of a row; evenly spread; at random; like the authors of ES-SpMM, by
// multiples of 577, which can repeat edges.
enum class Strategy : int8_t { bucket, fastrand, unbiased, paper };

constexpr int64_t kMostSamples = 4096;

// Samples at most num_samples edges of each row.
struct Sampling {
  int64_t num_samples = 0;
  Strategy strategy = Strategy::bucket;
  const int64_t* seed = nullptr;  // [1], on the graph's device; for `unbiased`
};

// For a row with more than `num_samples` edges, the k-th sampled edge is (offset + k * stride) mod
// degree; a shorter row keeps all edges.
template <typename I>
struct alignas(2 * sizeof(I)) RowSample {
  I offset;
  I stride;
};

constexpr int kPaperStride = 577;

// An upper bound on the sampled edges of all rows.
inline int64_t most_edges(const Csr& csr, const Sampling& s) {
  const int64_t samples = csr.num_rows * s.num_samples;
  return samples < csr.num_edges ? samples : csr.num_edges;
}

// The number of trailing zero bits.
PYG_FAST_DEVICE inline int trailing_zeros(uint64_t v) {
#ifdef __CUDA_ARCH__
  return __ffsll(static_cast<long long>(v)) - 1;
#else
  return __builtin_ctzll(v);
#endif
}

// Binary algorithm: shifts and subtractions are several times as fast as division.
template <typename U>
PYG_FAST_DEVICE inline bool coprime(U a, U b) {
  if (((a | b) & 1) == 0) return false;
  if (a == 0 || b == 0) return a + b == 1;
  a >>= trailing_zeros(a);
  while (b != 0) {
    b >>= trailing_zeros(b);
    const U smaller = a < b ? a : b;
    b = a < b ? b - a : a - b;
    a = smaller;
  }
  return a == 1;
}

// The number coprime to `degree` that is nearest to its golden section. Any number of its multiples is
// evenly spread.
template <typename U>
PYG_FAST_DEVICE inline U golden_stride(U degree) {
  constexpr uint64_t kGoldenSection = 0x9e3779b97f4a7c15u;  // of 2^64
  const U middle = static_cast<U>(high_of_product(degree, kGoldenSection));
  for (U step = 0;; ++step) {
    if (middle + step < degree && coprime<U>(degree, middle + step)) return middle + step;
    if (step < middle && coprime<U>(degree, middle - step)) return middle - step;
  }
}

// A uniform number below `degree`, and a uniform one coprime to it.
template <typename U>
PYG_FAST_DEVICE inline RowSample<U> random_sample(uint64_t seed, uint64_t row, U degree) {
  const uint64_t bits = mixed64(mixed64(seed) + row * 0x9e3779b97f4a7c15u);
  const U offset = static_cast<U>(high_of_product(bits, degree));
  U stride = 1 + static_cast<U>(high_of_product(mixed64(bits), degree - 1));
  while (!coprime<U>(degree, stride)) stride = stride + 1 < degree ? stride + 1 : 1;
  return {offset, stride};
}

// For a row with more edges than samples. Only `unbiased` reads `seed`.
template <typename I>
PYG_FAST_DEVICE inline RowSample<I> row_sample(Strategy strategy, const int64_t* seed, int64_t row,
                                               I degree) {
  using U = std::make_unsigned_t<I>;
  const U d = static_cast<U>(degree);
  switch (strategy) {
    case Strategy::fastrand: return {0, static_cast<I>(golden_stride(d))};
    case Strategy::unbiased: {
      const auto s = random_sample(static_cast<uint64_t>(*seed), static_cast<uint64_t>(row), d);
      return {static_cast<I>(s.offset), static_cast<I>(s.stride)};
    }
    case Strategy::paper: return {0, kPaperStride};
    case Strategy::bucket: break;
  }
  return {0, 1};
}

template <typename I>
PYG_FAST_DEVICE inline I sampled_position(RowSample<I> sample, I k, I degree) {
  if (sample.stride == 1 && sample.offset == 0) return k;
  // Below this, the products (less than kMostSamples times a degree) fit 32 bits.
  constexpr I kSmall = 1 << 20;
  static_assert(kMostSamples <= (1 << 12), "4096 * 2^20 = 2^32");
  if (degree <= kSmall) {
    return static_cast<I>((static_cast<uint32_t>(sample.offset) +
                           static_cast<uint32_t>(sample.stride) * static_cast<uint32_t>(k)) %
                          static_cast<uint32_t>(degree));
  }
  return static_cast<I>((static_cast<uint64_t>(sample.offset) +
                         static_cast<uint64_t>(sample.stride) * static_cast<uint64_t>(k)) %
                        static_cast<uint64_t>(degree));
}

}  // namespace pyg_fast
