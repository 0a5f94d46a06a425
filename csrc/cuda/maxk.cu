// The k largest entries of each row.
#include <cmath>

#include "cbsr.cuh"
#include "params/maxk.h"

namespace pyg_fast::cuda {
namespace {

// Unsigned integers in the order of the numbers: both zeros are equal, NaN is largest, padding is 0.
template <typename T>
using key_t = std::conditional_t<std::is_same_v<T, double>, unsigned long long, uint32_t>;

__device__ inline uint32_t key_of(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
  const uint32_t key =
      bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return v == v ? key : 0xffffffffu;
}
__device__ inline unsigned long long key_of(double v) {
  const long long bits = __double_as_longlong(v + 0.0);
  const unsigned long long key =
      static_cast<unsigned long long>(bits ^ (bits >> 63 | static_cast<long long>(1ull << 63)));
  return v == v ? key : ~0ull;
}

// Sum over the LANES threads that share a row.
template <int LANES, typename N>
__device__ inline N sum_of(N v) {
#if __CUDA_ARCH__ >= 800
  if constexpr (LANES == 32 && std::is_same_v<N, int>) return __reduce_add_sync(kWarpMask, v);
  else
#endif
  {
#pragma unroll
    for (int offset = 1; offset < LANES; offset <<= 1) v += __shfl_xor_sync(kWarpMask, v, offset);
    return v;
  }
}

// Exclusive prefix sum over the threads that share a row.
template <int LANES>
__device__ inline int sum_before(int v) {
  int sum = v;
#pragma unroll
  for (int offset = 1; offset < LANES; offset <<= 1) {
    // The shuffle's predicate tells which threads must add.
    asm volatile(
        "{ .reg .s32 other; .reg .pred p;\n"
        "  shfl.sync.up.b32 other|p, %0, %1, %2, 0xffffffff;\n"
        "  @p add.s32 %0, %0, other; }"
        : "+r"(sum)
        : "r"(offset), "n"((32 - LANES) << 8));
  }
  return sum - v;
}

__device__ inline unsigned or_of(unsigned bits) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(kWarpMask, bits);
#else
  for (int offset = 1; offset < 32; offset <<= 1) bits |= __shfl_xor_sync(kWarpMask, bits, offset);
  return bits;
#endif
}

// The k-th largest entry of a normally distributed row: `z` standard deviations above the mean, and the
// spacing of neighbours there, in deviations. Only a first guess.
struct Guess {
  float z, spacing;
  float inverse_dim;
};

Guess guess_of(int64_t k, int64_t dim) {
  double low = -6, high = 6;
  const double share = (k - 0.5) / static_cast<double>(dim);
  for (int i = 0; i < 24; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(middle / std::sqrt(2.0)) > 2 * share ? low : high) = middle;
  }
  const double density = std::exp(-low * low / 2) / std::sqrt(2 * 3.14159265358979);
  return {static_cast<float>(low), static_cast<float>(1 / (dim * density)), 1.0f / dim};
}

// A warp selects from 32 / LANES rows at once. Each thread holds ELEMS of a row's columns, 16 bytes of
// adjacent columns at a time; missing columns hold -inf (the key 0).
template <typename T, int LANES, int ELEMS>
struct Selection {
  using Acc = acc_t<T>;
  using Key = key_t<T>;
  static constexpr int kVecs = ELEMS / kVec<T>;

  Pack<T, kVec<T>> raw[kVecs];
  Acc x[ELEMS];
  unsigned dim;
  int k;

  // The column of a thread's element c, and the column of a `code`.
  __device__ static unsigned column_of(unsigned c, unsigned lane) {
    return (c / kVec<T> * LANES + lane) * kVec<T> + c % kVec<T>;
  }
  __device__ static unsigned column_of(unsigned c) { return column_of(c, threadIdx.x % LANES); }
  __device__ static unsigned column_of_code(unsigned code) {
    return column_of(code % ELEMS, code / ELEMS);
  }

  // Loads a row; `full`: it fills all threads.
  __device__ void load(const T* row, bool full) {
    if (full) {
#pragma unroll
      for (int m = 0; m < kVecs; ++m)
        raw[m] = pyg_fast::cuda::load<T, kVec<T>>(row + column_of(m * kVec<T>));
    } else {
#pragma unroll
      for (int c = 0; c < ELEMS; ++c)
        raw[c / kVec<T>].data[c % kVec<T>] =
            column_of(c) < dim ? row[column_of(c)] : from_acc<T>(-Acc(INFINITY));
    }
  }

  // Widens the row and computes its moments over the threads that share it.
  template <bool FULL>
  __device__ void open(Acc& sum, Acc& squares) {
    sum = squares = 0;
#pragma unroll
    for (int c = 0; c < ELEMS; ++c) {
      x[c] = element(raw[c / kVec<T>], c % kVec<T>);
      if (FULL || column_of(c) < dim) {
        sum += x[c];
        squares += x[c] * x[c];
      }
    }
    if constexpr (LANES == 32) {  // Each half of the threads continues with one sum.
      const bool upper = threadIdx.x & 16;
      const Acc other = __shfl_xor_sync(kWarpMask, upper ? sum : squares, 16);
      Acc mine = (upper ? squares : sum) + other;
#pragma unroll
      for (int offset = 1; offset < 16; offset <<= 1)
        mine += __shfl_xor_sync(kWarpMask, mine, offset);
      sum = __shfl_sync(kWarpMask, mine, 0);
      squares = __shfl_sync(kWarpMask, mine, 16);
    } else {
      sum = sum_of<LANES>(sum);
      squares = sum_of<LANES>(squares);
    }
  }

  __device__ int count(Acc pivot) const {
    float n = 0;
#pragma unroll
    for (int c = 0; c < ELEMS; ++c) n += at_least(x[c], pivot);
    return sum_of<LANES>(static_cast<int>(n));
  }

  // 1 if x >= y, else 0.
  __device__ static float at_least(float x, float y) {
    float one;
    asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(one) : "f"(x), "f"(y));
    return one;
  }
  __device__ static float at_least(double x, double y) { return x >= y ? 1.0f : 0.0f; }

  // The largest element below `bound`.
  __device__ Acc below(Acc bound) const {
    Acc best = -Acc(INFINITY);
#pragma unroll
    for (int c = 0; c < ELEMS; ++c) best = x[c] < bound ? fmax(best, x[c]) : best;
#pragma unroll
    for (int offset = 1; offset < LANES; offset <<= 1)
      best = fmax(best, __shfl_xor_sync(kWarpMask, best, offset));
    return best;
  }

  // The first `left` elements, by column, that equal the threshold, as bits.
  template <typename Equal>
  __device__ uint32_t first_of_equal(int left, const Equal& equal) const {
    uint32_t bits = 0;
#pragma unroll
    for (int m = 0; m < kVecs; ++m) {
      int here = 0;
#pragma unroll
      for (int v = 0; v < kVec<T>; ++v) here += equal(m * kVec<T> + v);
      int rank = sum_before<LANES>(here);
#pragma unroll
      for (int v = 0; v < kVec<T>; ++v) {
        if (equal(m * kVec<T> + v) && rank++ < left) bits |= 1u << (m * kVec<T> + v);
      }
      left -= sum_of<LANES>(here);
    }
    return bits;
  }

  // This thread's elements among the k largest of the row, as bits.
  __device__ uint32_t select(bool full, const Guess& guess) {
    constexpr int kGuesses = 6, kRounds = 24;
    Acc sum, squares;
    if (full) open<true>(sum, squares);
    else open<false>(sum, squares);
    const Acc mean = sum * guess.inverse_dim;
    const Acc variance = fmax(squares * guess.inverse_dim - mean * mean, Acc(0));
    const Acc deviation =
        variance * static_cast<Acc>(rsqrtf(fmaxf(static_cast<float>(variance), 1e-30f)));
    const Acc spacing = guess.spacing * deviation;
    // Invariant: at least k elements are >= `low`, fewer than k are >= `high`.
    Acc low = -Acc(INFINITY), high = Acc(INFINITY), pivot = mean + guess.z * deviation;
    const auto inside = [&] { return pivot > low && pivot < high; };
    // Rows with NaN, infinity or overflowing sums use the keys.
    const bool ordinary = squares < Acc(INFINITY);
    bool found = false, tied = false;
    const auto row_done = [&] { return found || tied || !ordinary; };
    const auto all_of_warp = [](bool done) {
      return LANES == 32 ? done : static_cast<bool>(__all_sync(kWarpMask, done));
    };
    const auto narrow = [&](bool step) {
      const int n = count(pivot);
      if (row_done()) return;
      if (n >= k) low = pivot;
      else high = pivot;
      found = n == k;
      tied = step && n > k;
      // A Newton step with the slope of the normal distribution.
      pivot += (n - k) * spacing;
      if (!inside()) pivot = low + (high - low) / 2;
    };
    // Guesses, while they fall inside the interval: with an infinite bound they may not.
#pragma unroll 1
    for (int round = 0; round < kGuesses && !all_of_warp(row_done()); ++round) {
      if (!all_of_warp(row_done() || inside())) break;
      narrow(false);
    }
    // Afterwards, every second step takes the next smaller element.
#pragma unroll 1
    for (int round = kGuesses; round < kRounds && !all_of_warp(row_done()); ++round) {
      const bool step = round % 2 == 0 || !inside();
      if (__any_sync(kWarpMask, step)) {
        const Acc next = below(high);
        pivot = step ? next : pivot;
      }
      narrow(step);
    }
    uint32_t bits = 0;
#pragma unroll
    for (int c = 0; c < ELEMS; ++c) {
      if (x[c] >= low) bits |= 1u << c;
    }
    if (__any_sync(kWarpMask, tied)) {
      uint32_t other = 0;
#pragma unroll
      for (int c = 0; c < ELEMS; ++c) other |= static_cast<uint32_t>(x[c] > low) << c;
      const int above = sum_of<LANES>(__popc(other));
      other |= first_of_equal(tied ? k - above : 0, [&](int c) { return tied && x[c] == low; });
      if (tied) bits = other;
    }
    // Accepts exactly k elements; otherwise the keys decide.
    const int selected = sum_of<LANES>(__popc(bits));
    const bool right = (found || tied) && selected == k;
    if (!__all_sync(kWarpMask, right)) {
      const uint32_t other = select_by_keys();
      if (!right) bits = other;
    }
    return bits;
  }

  // The same for any row content: by the bits of the keys.
  __device__ uint32_t select_by_keys() const {
    Key threshold = 0;
    const auto key = [&](int c) { return column_of(c) < dim ? key_of(x[c]) : Key(0); };
    const auto count_of = [&](auto&& holds) {
      int n = 0;
#pragma unroll
      for (int c = 0; c < ELEMS; ++c) n += holds(key(c));
      return sum_of<LANES>(n);
    };
#pragma unroll 1
    for (int bit = 8 * sizeof(Key) - 1; bit >= 0; --bit) {
      const Key tried = threshold | Key(1) << bit;
      if (count_of([&](Key key) { return key >= tried; }) >= k) threshold = tried;
    }
    const int above = count_of([&](Key key) { return key > threshold; });
    uint32_t bits = first_of_equal(k - above, [&](int c) { return key(c) == threshold; });
#pragma unroll
    for (int c = 0; c < ELEMS; ++c) bits |= static_cast<uint32_t>(key(c) > threshold) << c;
    return bits;
  }
};

// Writes the entries of up to 32 / LANES rows, whose codes are in shared memory.
//
// Writes 32 entries at a time: of one row, or of several if k is a power of two. Among a row's entries
// whose columns are `c` modulo 8, the `rank`-th goes to place 8 * rank + c; entries without a free place
// fill the gaps. Entries read in one step then rarely share a bank.
template <typename T, typename C, int LANES, int ELEMS>
struct Writer {
  const T* x;
  T* values;
  C* columns;
  unsigned dim, k;
  const uint16_t* codes;
  uint8_t* gaps;
  Storage<kMostSteps<T>> storage;

  __device__ void write(unsigned rows) const {
    // Readers use dense rows if k is this large: the order of entries does not matter.
    if (3 * k > dim) return write_as_found(rows);
    if (32 / LANES > 1 && k < 32 && (k & (k - 1)) == 0) return write_rows(rows);
    for (unsigned row = 0; row < rows; ++row) {
      for (unsigned base = 0; base < k; base += 32) {
        const unsigned n = k - base < 32 ? k - base : 32;
        write_entries(row, base, n, threadIdx.x & 31, n == 32 ? kWarpMask : (1u << n) - 1, 0);
      }
    }
  }

  // k threads for each row.
  __device__ void write_rows(unsigned rows) const {
    const unsigned lane = threadIdx.x & 31, at = lane % k;
    for (unsigned first = 0; first < rows; first += 32 / k) {
      const unsigned row = first + lane / k;
      write_entries(row < rows ? row : 0, 0, row < rows ? k : 0, at, ((1u << k) - 1) << (lane - at),
                    lane - at);
    }
  }

  // Writes entries base, ..., base + n - 1 of a row with the threads of `group`. `at` is the thread's
  // index in the group, `begin` that of the group's first thread.
  __device__ void write_entries(unsigned row, unsigned base, unsigned n, unsigned at,
                                unsigned group, unsigned begin) const {
    const unsigned lane = threadIdx.x & 31, before = ((1u << lane) - 1) & group;
    const bool valid = at < n;
    const unsigned column =
        valid ? Selection<T, LANES, ELEMS>::column_of_code(codes[row * k + base + at]) : 0;
    const T value = x[row * dim + column];
    unsigned alike = before;
#pragma unroll
    for (unsigned bit = 1; bit < 8; bit *= 2) {
      const unsigned set = __ballot_sync(kWarpMask, column & bit);
      alike &= column & bit ? set : ~set;
    }
    const unsigned place = 8 * __popc(alike) + column % 8;
    const bool fits = valid && place < n;
    const unsigned late = __ballot_sync(kWarpMask, !fits);
    const unsigned gap = ~or_of(fits ? 1u << (begin + place) : 0u);
    if (valid && gap >> lane & 1) gaps[begin + __popc(gap & before)] = static_cast<uint8_t>(at);
    __syncwarp();
    if (valid) {
      const unsigned rank = base + (fits ? place : gaps[begin + __popc(late & before)]);
      columns[row * k + storage.at(rank)] = static_cast<C>(column);
      values[row * k + storage.at(rank)] = value;
    }
    __syncwarp();
  }

  __device__ void write_as_found(unsigned rows) const {
    for (unsigned row = 0; row < rows; ++row) {
      for (unsigned at = threadIdx.x & 31; at < k; at += 32) {
        const unsigned column = Selection<T, LANES, ELEMS>::column_of_code(codes[row * k + at]);
        columns[row * k + at] = static_cast<C>(column);
        values[row * k + at] = x[row * dim + column];
      }
    }
    __syncwarp();
  }
};

template <typename T, typename C, int LANES, int ELEMS>
__global__ void __launch_bounds__(kThreads)
    maxk_kernel(MaxK p, bool full, Guess guess, Storage<kMostSteps<T>> storage) {
  constexpr int kRows = 32 / LANES;
  extern __shared__ uint16_t shared_codes[];
  __shared__ uint8_t gaps[kWarps][32];
  const int warp = threadIdx.x / 32, k = static_cast<int>(p.k);
  uint16_t* codes = shared_codes + warp * kRows * k;
  const int in_warp = (threadIdx.x & 31) / LANES;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps * kRows;
  Selection<T, LANES, ELEMS> selection;
  selection.dim = static_cast<unsigned>(p.dim);
  selection.k = k;
  const auto load = [&](int64_t first) {
    const int64_t row = first + in_warp < p.num_rows ? first + in_warp : p.num_rows - 1;
    selection.load(static_cast<const T*>(p.x) + row * p.dim, full);
  };
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kRows;
  if (first < p.num_rows) load(first);
  for (; first < p.num_rows; first += step) {
    uint32_t bits = selection.select(full, guess);
    if (first + step < p.num_rows) load(first + step);  // prefetches while this one is written
    uint16_t* to = codes + in_warp * k + sum_before<LANES>(__popc(bits));
    for (; bits != 0; bits &= bits - 1)
      *to++ = static_cast<uint16_t>(threadIdx.x % LANES * ELEMS + __ffs(bits) - 1);
    __syncwarp();
    Writer<T, C, LANES, ELEMS>{static_cast<const T*>(p.x) + first * p.dim,
                               static_cast<T*>(p.values) + first * k,
                               static_cast<C*>(p.columns) + first * k,
                               selection.dim,
                               static_cast<unsigned>(k),
                               codes,
                               gaps[warp],
                               storage}
        .write(static_cast<unsigned>(p.num_rows - first < kRows ? p.num_rows - first : kRows));
  }
}

// Rows too long for registers: one block each, which reads the row once per bit of the threshold.
template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) maxk_long_kernel(MaxK p) {
  using Key = key_t<T>;
  __shared__ long long counts[kWarps][2];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  for (int64_t row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(p.x) + row * p.dim;
    const auto key_at = [&](int64_t f) { return key_of(to_acc(x[f])); };
    const auto count = [&](auto&& holds) {
      long long n = 0;
      for (int64_t f = threadIdx.x; f < p.dim; f += kThreads) n += holds(key_at(f));
      for (int offset = 1; offset < 32; offset <<= 1) n += __shfl_xor_sync(kWarpMask, n, offset);
      __syncthreads();
      if (lane == 0) counts[warp][0] = n;
      __syncthreads();
      n = 0;
      for (int w = 0; w < kWarps; ++w) n += counts[w][0];
      return n;
    };
    Key threshold = 0;
    for (int bit = 8 * sizeof(Key) - 1; bit >= 0; --bit) {
      const Key tried = threshold | Key(1) << bit;
      if (count([&](Key key) { return key >= tried; }) >= p.k) threshold = tried;
    }
    const long long ties = p.k - count([&](Key key) { return key > threshold; });
    long long written = 0, tied = 0;
    for (int64_t base = 0; base < p.dim; base += kThreads) {
      const int64_t f = base + threadIdx.x;
      const Key key = f < p.dim ? key_at(f) : Key(0);
      const unsigned before = (1u << lane) - 1;
      const unsigned equal = __ballot_sync(kWarpMask, f < p.dim && key == threshold);
      __syncthreads();
      if (lane == 0) counts[warp][0] = __popc(equal);
      __syncthreads();
      long long rank = tied + __popc(equal & before);
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) rank += counts[w][0];
        tied += counts[w][0];
      }
      const bool taken = f < p.dim && (key > threshold || (key == threshold && rank < ties));
      const unsigned chosen = __ballot_sync(kWarpMask, taken);
      if (lane == 0) counts[warp][1] = __popc(chosen);
      __syncthreads();
      long long at = written + __popc(chosen & before);
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) at += counts[w][1];
        written += counts[w][1];
      }
      if (taken) {
        static_cast<T*>(p.values)[row * p.k + at] = x[f];
        static_cast<C*>(p.columns)[row * p.k + at] = static_cast<C>(f);
      }
    }
  }
}

// One thread for each group of columns that are equal modulo k.
template <typename T, typename C>
__global__ void __launch_bounds__(kThreads)
    balanced_kernel(MaxK p, Storage<kMostSteps<T>> storage) {
  const int64_t total = p.num_rows * p.k, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < total;
       at += step) {
    const int64_t row = at / p.k, group = at - row * p.k;
    const T* x = static_cast<const T*>(p.x) + row * p.dim;
    int64_t best = group;
    T value = x[group];
    key_t<T> best_key = 0;
#pragma unroll 8
    for (int64_t f = group; f < p.dim; f += p.k) {
      const T other = x[f];
      const key_t<T> key = key_of(to_acc(other));
      if (key > best_key) {
        best_key = key;
        best = f;
        value = other;
      }
    }
    const int64_t out = row * p.k + storage.at(static_cast<unsigned>(group));
    static_cast<T*>(p.values)[out] = value;
    static_cast<C*>(p.columns)[out] = static_cast<C>(best);
  }
}

template <typename T, typename C, int LANES, int ELEMS>
const char* launch_maxk(const MaxK& p, cudaStream_t stream) {
  const bool full = p.dim == LANES * ELEMS && aligned16(p.x);
  const int bytes = kWarps * (32 / LANES) * static_cast<int>(p.k * sizeof(uint16_t));
  // Limits the blocks: each then has rows to prefetch.
  const unsigned all = blocks_for(p.num_rows * LANES), most = 2048;
  const unsigned blocks = all < most ? all : most;
  maxk_kernel<T, C, LANES, ELEMS><<<blocks, kThreads, bytes, stream>>>(
      p, full, guess_of(p.k, p.dim), Storage<kMostSteps<T>>(p.k));
  return last_error();
}

}  // namespace

const char* maxk(const MaxK& p, void* stream_) {
  if (p.num_rows == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  return dispatch_entries(p.dtype, p.column_type, [&](auto element, auto column) -> const char* {
    using T = decltype(element);
    using C = decltype(column);
    if (p.balanced) {
      balanced_kernel<T, C>
          <<<blocks_for(p.num_rows * p.k), kThreads, 0, stream>>>(p, Storage<kMostSteps<T>>(p.k));
      return last_error();
    }
    if constexpr (sizeof(C) == 1) {
      if (p.dim <= 64) return launch_maxk<T, C, 4, 16>(p, stream);
      if (p.dim <= 128) return launch_maxk<T, C, 8, 16>(p, stream);
      return launch_maxk<T, C, 32, 8>(p, stream);
    } else if constexpr (sizeof(C) == 2) {
      if (p.dim <= 512) return launch_maxk<T, C, 32, 16>(p, stream);
      if (p.dim <= 1024) return launch_maxk<T, C, 32, 32>(p, stream);
    }
    maxk_long_kernel<T, C><<<static_cast<unsigned>(p.num_rows < (1 << 20) ? p.num_rows : 1 << 20),
                             kThreads, 0, stream>>>(p);
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
