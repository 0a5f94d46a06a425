// Sums over a sample of each row's edges, the sample itself, and 8-bit features.
#include "params/sampled.h"
#include "spmm.h"

namespace pyg_fast::cpu::PYG_FAST_ISA {

// Calls f(k, e) for the k-th sampled edge e of a row.
template <typename Index, typename F>
PYG_FAST_INLINE void for_sampled(const Sampling& s, const Index* rowptr, int64_t row, const F& f) {
  const Index begin = rowptr[row], degree = rowptr[row + 1] - begin;
  const auto most = static_cast<Index>(s.num_samples);
  if (degree <= most) {
    for (Index k = 0; k < degree; ++k) f(k, begin + k);
    return;
  }
  const RowSample<Index> sample = row_sample<Index>(s, row, degree);
  if (sample.offset < 0) {
    for (Index k = 0; k < most; ++k) f(k, begin + position_in_runs(sample, k, degree - most));
    return;
  }
  const Index stride = sample.stride % degree;
  Index position = sample.offset;  // like sampled_position, without a division per edge
  for (Index k = 0; k < most; ++k) {
    f(k, begin + position);
    position = position < degree - stride ? position + stride : position - (degree - stride);
  }
}

// Copies the samples of a block of rows into small arrays, which spmm reads as a graph.
template <typename T, typename Index>
void sampled_rows(const SampledSpmm& p, int64_t row_begin, int64_t row_end) {
  using Acc = acc_t<T>;
  constexpr int64_t kBlockEdges = 1 << 15;
  const auto* rowptr = static_cast<const Index*>(p.csr.rowptr);
  const auto* col = static_cast<const Col*>(p.csr.col);
  const auto* perm = static_cast<const Index*>(p.csr.perm);
  const bool weighs = scales_sums(p.sampling) && !p.mean;
  const int64_t most = p.sampling.num_samples;
  const int64_t block_rows = kBlockEdges / most + 1;

  Scratch<Index> ptr_scratch, perm_scratch;
  Scratch<Col> col_scratch;
  Scratch<Acc> scale_scratch;
  Spmm block = p;
  for (int64_t from = row_begin; from < row_end; from += block_rows) {
    const int64_t rows = row_end - from < block_rows ? row_end - from : block_rows;
    Index* block_ptr = ptr_scratch.of_size(rows + 1);
    Col* block_col = col_scratch.of_size(rows * most);
    Index* block_perm = p.value ? perm_scratch.of_size(rows * most) : nullptr;
    Acc* block_scale = weighs ? scale_scratch.of_size(rows) : nullptr;
    Index count = 0;
    for (int64_t r = 0; r < rows; ++r) {
      block_ptr[r] = count;
      for_sampled<Index>(p.sampling, rowptr, from + r, [&](Index, Index e) PYG_FAST_ALWAYS {
        block_col[count] = col[e];
        if (block_perm) block_perm[count] = perm ? perm[e] : e;
        ++count;
      });
      if (weighs) {
        const auto degree = static_cast<int64_t>(rowptr[from + r + 1] - rowptr[from + r]);
        const Acc scale = p.row_scale ? static_cast<const Acc*>(p.row_scale)[from + r] : Acc{1};
        block_scale[r] = degree > most ? scale * sum_scale<Acc>(p.sampling, degree) : scale;
      }
    }
    block_ptr[rows] = count;
    block.csr.rowptr = block_ptr - from;
    block.csr.col = block_col;
    block.csr.perm = block_perm;
    if (weighs) block.row_scale = block_scale - from;
    if constexpr (std::is_same_v<T, int8_t>) {
      spmm_rows<T, Index>(block, from, from + rows);
    } else {
      spmm(block, from, from + rows);
    }
  }
}

void sampled_spmm(const SampledSpmm& p, int64_t row_begin, int64_t row_end) {
  if (row_begin >= row_end || p.dim == 0) return;
  if (p.quantized) {
    p.csr.index64 ? sampled_rows<int8_t, int64_t>(p, row_begin, row_end)
                  : sampled_rows<int8_t, int32_t>(p, row_begin, row_end);
    return;
  }
  with_types(p.dtype, p.csr.index64, [&](auto type, auto index) {
    sampled_rows<typename decltype(type)::type, typename decltype(index)::type>(p, row_begin,
                                                                                row_end);
  });
}

template <typename Index>
void sample_rows(const SampleEdges& p, int64_t row_begin, int64_t row_end) {
  const auto* col = static_cast<const Col*>(p.csr.col);
  const auto* perm = static_cast<const Index*>(p.csr.perm);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const Index at = static_cast<const Index*>(p.rowptr)[row];
    for_sampled<Index>(p.sampling, static_cast<const Index*>(p.csr.rowptr), row,
                       [&](Index k, Index e) PYG_FAST_ALWAYS {
                         p.row[at + k] = static_cast<Col>(row);
                         p.col[at + k] = col[e];
                         static_cast<Index*>(p.perm)[at + k] = perm ? perm[e] : e;
                       });
  }
}

void sample_edges(const SampleEdges& p, int64_t row_begin, int64_t row_end) {
  p.csr.index64 ? sample_rows<int64_t>(p, row_begin, row_end)
                : sample_rows<int32_t>(p, row_begin, row_end);
}

// Small loops that compilers vectorize.
template <typename T>
void quantized_rows(const QuantizeRows& p, int64_t row_begin, int64_t row_end) {
  constexpr float kRounds = 0x1.8p23f;  // adding and subtracting it rounds to an integer
  Scratch<float> scratch;
  float* v = scratch.of_size(p.dim);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.dim;
    int8_t* out = p.out + row * p.dim;
    for (int64_t c = 0; c < p.dim; ++c) v[c] = static_cast<float>(load_one(x + c));
    uint32_t most = 0;  // bits of magnitudes; NaN has the largest
    for (int64_t c = 0; c < p.dim; ++c) {
      const uint32_t bits = bit_cast<uint32_t>(v[c]) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    const float largest = bit_cast<float>(most), inverse = quantization_of(largest);
    p.scale[row] = largest / 127;
    if (inverse == 0) {
      __builtin_memset(out, 0, static_cast<size_t>(p.dim));
      continue;
    }
    // A separate loop: the product must be rounded before the sum.
    for (int64_t c = 0; c < p.dim; ++c) v[c] *= inverse;
    for (int64_t c = 0; c < p.dim; ++c) out[c] = static_cast<int8_t>((v[c] + kRounds) - kRounds);
  }
}

void quantize_rows(const QuantizeRows& p, int64_t row_begin, int64_t row_end) {
  with_types(p.dtype, false, [&](auto type, auto) {
    quantized_rows<typename decltype(type)::type>(p, row_begin, row_end);
  });
}

}  // namespace pyg_fast::cpu::PYG_FAST_ISA

PYG_FAST_KERNEL(sampled_spmm, (const SampledSpmm& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(sample_edges, (const SampleEdges& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
PYG_FAST_KERNEL(quantize_rows, (const QuantizeRows& p, int64_t row_begin, int64_t row_end),
                (p, row_begin, row_end))
