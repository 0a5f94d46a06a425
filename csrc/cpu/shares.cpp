#include "shares.h"

namespace pyg_fast::cpu {
namespace {

template <typename Index>
int64_t row_of_share(const Csr& csr, int64_t k, int64_t n) {
  constexpr int64_t kEdgesOfRow = 2;  // cost of a row itself, in edges
  const auto* rowptr = static_cast<const Index*>(csr.rowptr);
  const auto cost = [&](int64_t row) { return rowptr[row] + kEdgesOfRow * row; };
  const int64_t total = cost(csr.num_rows);
  const int64_t wanted = total / n * k + total % n * k / n;
  int64_t low = 0, high = csr.num_rows;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (cost(middle) < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Estimates the cost from a sample of the edges.
template <typename Index>
int64_t source_of_share(const Csr& csr, int64_t k, int64_t n) {
  constexpr int64_t kSamples = 4096, kParts = 256;  // parts: consecutive ranges of the sources
  const auto* col = static_cast<const Col*>(csr.col);
  const int64_t edges = static_cast<const Index*>(csr.rowptr)[csr.num_rows];
  int64_t cost[kParts], total = kParts;
  for (int64_t& part : cost) part = 1;
  for (int64_t e = 0; e < edges; e += edges / kSamples + 1, ++total) {
    ++cost[static_cast<int64_t>(col[e]) * kParts / csr.num_cols];
  }
  int64_t wanted = total * k / n, part = 0;
  for (; wanted >= cost[part]; ++part) wanted -= cost[part];
  return (part * cost[part] + wanted) * csr.num_cols / (kParts * cost[part]);
}

}  // namespace

int64_t row_of_share(const Csr& csr, int64_t k, int64_t n) {
  if (k <= 0) return 0;
  if (k >= n) return csr.num_rows;
  return csr.index64 ? row_of_share<int64_t>(csr, k, n) : row_of_share<int32_t>(csr, k, n);
}

int64_t source_of_share(const Csr& csr, int64_t k, int64_t n) {
  if (k <= 0 || csr.num_cols == 0) return 0;
  if (k >= n) return csr.num_cols;
  return csr.index64 ? source_of_share<int64_t>(csr, k, n) : source_of_share<int32_t>(csr, k, n);
}

}  // namespace pyg_fast::cpu
