// Selects the sampled edges of a row by arithmetic on its degree: any kernel can repeat it.
#pragma once
#include <type_traits>

#include "random.h"

namespace pyg_fast {

// Which edges of a row to sample. bucket: the first ones; fastrand: evenly spread; unbiased: at random;
// paper: multiples of 577, like the authors of ES-SpMM, which can repeat edges; adaptive: evenly spread runs
// of consecutive edges, longer runs in longer rows.
enum class Strategy : int8_t { bucket, fastrand, unbiased, paper, adaptive };

constexpr int64_t kMostSamples = 4096;

// Samples at most num_samples edges of each row.
struct Sampling {
  int64_t num_samples = 0;
  Strategy strategy = Strategy::bucket;
  const int64_t* seed = nullptr;  // [1], on the graph's device; for `unbiased`
};

// Whether sum_scale multiplies the sums of rows with unsampled edges, to estimate the sum of all edges.
PYG_FAST_DEVICE inline bool scales_sums(const Sampling& s) {
  return s.strategy == Strategy::unbiased || s.strategy == Strategy::adaptive;
}

// `adaptive` counts one more edge, of value zero: a smaller factor, since it also multiplies the noise.
template <typename Acc>
PYG_FAST_DEVICE inline Acc sum_scale(const Sampling& s, int64_t degree) {
  const int zeros = s.strategy == Strategy::adaptive;
  return static_cast<Acc>(degree + zeros) / static_cast<Acc>(s.num_samples + zeros);
}

// For a row with more than `num_samples` edges, the k-th sampled edge is (offset + k * stride) mod
// degree; a shorter row keeps all edges. A negative offset means runs, see adaptive_sample.
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

// Runs of 2^n edges: offset is -1 - n, stride holds ceil(2^31 / number of runs) as bits.
// The edges of a run share a sector of memory, so long runs are fast, but many runs sample more evenly:
// longer rows have longer runs, but at least 16 of them, or runs of one edge.
template <typename I>
PYG_FAST_DEVICE inline RowSample<I> adaptive_sample(I num_samples, I degree) {
  constexpr I kFewestRuns = 16;
  constexpr int kLongest = 3;  // 8 indices fill a sector
  int log_run = 0;
  while (log_run < kLongest && num_samples >> (log_run + 1) >= kFewestRuns &&
         degree >> (log_run + 1) >= num_samples)
    ++log_run;
  const uint32_t runs = (static_cast<uint32_t>(num_samples) + (1u << log_run) - 1) >> log_run;
  return {static_cast<I>(-1 - log_run), static_cast<I>(0x7fffffffu / runs + 1)};
}

// The position of the k-th sampled edge, in a row with `left_out` unsampled edges. Of these,
// (b + 1/2) / n lie before the b-th of n runs, so that the sample is symmetric.
template <typename I>
PYG_FAST_DEVICE inline I position_in_runs(RowSample<I> sample, I k, I left_out) {
  const uint32_t run = static_cast<uint32_t>(k) >> (-1 - sample.offset);
  const uint32_t share = (2 * run + 1) * static_cast<uint32_t>(sample.stride);  // of 2^32
  if constexpr (sizeof(I) == 4) {
    return k + static_cast<I>(static_cast<uint64_t>(share) * static_cast<uint32_t>(left_out) >> 32);
  } else {
    return k + static_cast<I>(high_of_product(static_cast<uint64_t>(share) << 32,
                                              static_cast<uint64_t>(left_out)));
  }
}

// For a row with more edges than samples.
template <typename I>
PYG_FAST_DEVICE inline RowSample<I> row_sample(const Sampling& s, int64_t row, I degree) {
  using U = std::make_unsigned_t<I>;
  const U d = static_cast<U>(degree);
  switch (s.strategy) {
    case Strategy::fastrand: return {0, static_cast<I>(golden_stride(d))};
    case Strategy::unbiased: {
      const auto r = random_sample(static_cast<uint64_t>(*s.seed), static_cast<uint64_t>(row), d);
      return {static_cast<I>(r.offset), static_cast<I>(r.stride)};
    }
    case Strategy::paper: return {0, kPaperStride};
    case Strategy::adaptive: return adaptive_sample(static_cast<I>(s.num_samples), degree);
    case Strategy::bucket: break;
  }
  return {0, 1};
}

template <typename I>
PYG_FAST_DEVICE inline I sampled_position(RowSample<I> sample, I k, I degree, I count) {
  if (sample.offset < 0) return position_in_runs(sample, k, degree - count);
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
