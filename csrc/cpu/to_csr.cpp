// Stable counting sort in two passes that both stay in the caches: first spreads edges over buckets of
// consecutive rows, then counts and sorts every bucket at its output position.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

#include "params/to_csr.h"

namespace pyg_fast::cpu {
namespace {

// Runs f(k) for k in [0, n) through the caller's ParallelFor.
template <typename F>
void parallel(ParallelFor parallel_for, int64_t n, const F& f) {
  if (n == 1) return f(0);
  parallel_for(
      n, [](void* ctx, int64_t k) { (*static_cast<const F*>(ctx))(k); }, const_cast<F*>(&f));
}

// An edge between the two passes: with its position in the input, or (void) without.
template <typename Position>
struct Edge {
  Col row, col;
  Position position;
};
template <>
struct Edge<void> {
  Col row, col;
};

template <typename In, typename Out, bool kPerm>
class CsrSort {
 public:
  CsrSort(const ToCsr& p, int num_threads, ParallelFor parallel_for)
      : p_(p),
        row_(static_cast<const In*>(p.row)),
        col_(static_cast<const In*>(p.col)),
        rowptr_(static_cast<Out*>(p.rowptr)),
        sorted_col_(p.sorted_col),
        perm_(static_cast<Out*>(p.perm)),
        parallel_for_(parallel_for) {
    constexpr int64_t kEdgesOfThread = 16384, kEdgesOfBucket = 8192, kMaxBuckets = 1024;
    const int64_t threads = p.num_edges / kEdgesOfThread;
    shares_ = threads < 1 ? 1 : threads < num_threads ? threads : num_threads;
    int64_t wanted = p.num_edges / kEdgesOfBucket;
    wanted = wanted < 1 ? 1 : wanted < kMaxBuckets ? wanted : kMaxBuckets;
    while ((p.num_rows - 1) >> shift_ >= wanted) ++shift_;
    buckets_ = p.num_rows == 0 ? 0 : ((p.num_rows - 1) >> shift_) + 1;
  }

  void run() {
    int64_t* memory = new int64_t[static_cast<size_t>((shares_ + 1) * buckets_ + 1 + shares_)];
    first_ = memory;                          // [buckets_ + 1]: where each bucket begins
    cursor_ = first_ + buckets_ + 1;          // [shares_, buckets_]
    invalid_ = cursor_ + shares_ * buckets_;  // [shares_]
    parallel(parallel_for_, shares_, [this](int64_t k) { count(k); });
    const int64_t invalid = place_buckets();
    if (p_.invalid) *p_.invalid = invalid;
    const int64_t total = first_[buckets_];
    spread_ = static_cast<Spread*>(::operator new(static_cast<size_t>(total) * sizeof(Spread)));
    parallel(parallel_for_, shares_, [this](int64_t k) { spread(k); });
    parallel(parallel_for_, shares_, [this](int64_t) {
      for (int64_t b; (b = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED)) < buckets_;) sort(b);
    });
    rowptr_[p_.num_rows] = static_cast<Out>(total);
    for (int64_t e = total; e < p_.num_edges; ++e) {
      sorted_col_[e] = 0;
      if constexpr (kPerm) perm_[e] = 0;
    }
    ::operator delete(spread_);
    delete[] memory;
  }

 private:
  using Spread = Edge<std::conditional_t<kPerm, Out, void>>;

  bool valid(int64_t row, int64_t col) const {
    return static_cast<uint64_t>(row) < static_cast<uint64_t>(p_.num_rows) &&
           static_cast<uint64_t>(col) < static_cast<uint64_t>(p_.num_cols);
  }
  bool kept(int64_t row, int64_t col) const {
    return valid(row, col) && !(p_.drop_loops && row == col);
  }
  int64_t begin_of(int64_t share) const { return p_.num_edges / shares_ * share; }
  int64_t end_of(int64_t share) const {
    return share + 1 < shares_ ? begin_of(share + 1) : p_.num_edges;
  }

  void count(int64_t share) {
    int64_t* count = cursor_ + share * buckets_;
    for (int64_t b = 0; b < buckets_; ++b) count[b] = 0;
    int64_t invalid = 0;
    for (int64_t e = begin_of(share), end = end_of(share); e < end; ++e) {
      if (kept(row_[e], col_[e])) {
        ++count[row_[e] >> shift_];
      } else {
        invalid += !valid(row_[e], col_[e]);
      }
    }
    invalid_[share] = invalid;
  }

  // Turns counts into the output positions of each share's edges of a bucket, in input order.
  int64_t place_buckets() {
    int64_t place = 0, invalid = 0;
    for (int64_t b = 0; b < buckets_; ++b) {
      first_[b] = place;
      for (int64_t k = 0; k < shares_; ++k) {
        const int64_t count = cursor_[k * buckets_ + b];
        cursor_[k * buckets_ + b] = place;
        place += count;
      }
    }
    first_[buckets_] = place;
    for (int64_t k = 0; k < shares_; ++k) invalid += invalid_[k];
    return invalid;
  }

  void spread(int64_t share) {
    int64_t* cursor = cursor_ + share * buckets_;
    for (int64_t e = begin_of(share), end = end_of(share); e < end; ++e) {
      const In row = row_[e], col = col_[e];
      if (!kept(row, col)) continue;
      Spread& edge = spread_[cursor[row >> shift_]++];
      edge.row = static_cast<Col>(row);
      edge.col = static_cast<Col>(col);
      if constexpr (kPerm) edge.position = static_cast<Out>(e);
    }
  }

  // rowptr is first the counter, then the cursor, and finally the result.
  void sort(int64_t bucket) {
    const int64_t row_begin = bucket << shift_;
    const int64_t row_end = bucket + 1 < buckets_ ? (bucket + 1) << shift_ : p_.num_rows;
    const int64_t begin = first_[bucket], end = first_[bucket + 1];
    for (int64_t row = row_begin; row < row_end; ++row) rowptr_[row] = 0;
    for (int64_t e = begin; e < end; ++e) ++rowptr_[spread_[e].row];
    Out place = static_cast<Out>(begin);
    for (int64_t row = row_begin; row < row_end; ++row) {
      const Out count = rowptr_[row];
      rowptr_[row] = place;
      place += count;
    }
    for (int64_t e = begin; e < end; ++e) {
      const Out at = rowptr_[spread_[e].row]++;
      sorted_col_[at] = spread_[e].col;
      if constexpr (kPerm) perm_[at] = spread_[e].position;
    }
    for (int64_t row = row_end - 1; row > row_begin; --row) rowptr_[row] = rowptr_[row - 1];
    rowptr_[row_begin] = static_cast<Out>(begin);
  }

  const ToCsr& p_;
  const In* row_;
  const In* col_;
  Out* rowptr_;
  Col* sorted_col_;
  Out* perm_;
  ParallelFor parallel_for_;
  int64_t shares_ = 1, buckets_ = 0, next_ = 0;
  int shift_ = 0;
  int64_t* first_ = nullptr;
  int64_t* cursor_ = nullptr;
  int64_t* invalid_ = nullptr;
  Spread* spread_ = nullptr;
};

template <typename In, typename Out>
void sort(const ToCsr& p, int num_threads, ParallelFor parallel_for) {
  if (p.perm) CsrSort<In, Out, true>(p, num_threads, parallel_for).run();
  else CsrSort<In, Out, false>(p, num_threads, parallel_for).run();
}

template <typename I>
void rows(const Csr& csr, int64_t begin, int64_t end, Col* out) {
  const I* rowptr = static_cast<const I*>(csr.rowptr);
  int64_t row =
      std::upper_bound(rowptr, rowptr + csr.num_rows + 1, static_cast<I>(begin)) - rowptr - 1;
  if (row < 0) row = 0;
  for (int64_t e = begin; e < end; ++e) {
    while (row < csr.num_rows && rowptr[row + 1] <= e) ++row;
    out[e - begin] = static_cast<Col>(row);
  }
}

}  // namespace

void to_csr(const ToCsr& p, int num_threads, ParallelFor parallel_for) {
  if (p.in64) {
    p.out64 ? sort<int64_t, int64_t>(p, num_threads, parallel_for)
            : sort<int64_t, int32_t>(p, num_threads, parallel_for);
  } else {
    p.out64 ? sort<int32_t, int64_t>(p, num_threads, parallel_for)
            : sort<int32_t, int32_t>(p, num_threads, parallel_for);
  }
}

void csr_rows(const Csr& csr, int64_t begin, int64_t end, Col* out) {
  csr.index64 ? rows<int64_t>(csr, begin, end, out) : rows<int32_t>(csr, begin, end, out);
}

}  // namespace pyg_fast::cpu
