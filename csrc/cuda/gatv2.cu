#include "gatv2.cuh"
#include "params/gatv2.h"

namespace pyg_fast::cuda {
namespace {

constexpr float kSlack = 16;  // see GatRow

template <typename T, typename I, int VEC, int LANES, int HEADS, bool STRIDED, bool WIDE>
struct Gatv2Row : ScoredTile<T, I, VEC, LANES, HEADS, STRIDED, WIDE> {
  using Acc = acc_t<T>;
  using Tile = ScoredTile<T, I, VEC, LANES, HEADS, STRIDED, WIDE>;
  using Edge = AttentionEdge<I>;
  using Index = I;
  static constexpr int kLanes = LANES;
  static constexpr int kBlocks = VEC == 1 && !WIDE ? 4 : attention_blocks(VEC, WIDE);
  static constexpr Sums kSums = Sums::registers;
  static constexpr int kSlots = 32 / LANES;
  static constexpr int kSteps = 4;

  // Until `reduce`, every slot of a warp has its own maximum and mass.
  struct Part {
    Acc out[VEC];
    Acc max, mass;
  };
  struct Sum : Part {
    Acc dst[VEC];
    int64_t row;
  };

  const Gatv2& p;
  const Csr& csr;

  __device__ Gatv2Row(const Gatv2& p, uint32_t threshold, acc_t<T> scale, int tile)
      : Tile(p, threshold, scale, tile), p(p), csr(p.csr) {}

  __device__ Sum empty(int64_t row) const {
    Sum sum;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.out[c] = 0;
    this->load_row(p.x_dst, row, sum.dst);
    sum.max = lowest(Acc{});
    sum.mass = 0;
    sum.row = row;
    return sum;
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    const int slot = (threadIdx.x & 31) / LANES;
    for (int first = slot; first - slot < count; first += kSteps * kSlots) {
      Pack<T, VEC, STRIDED> v[kSteps];
      Col source[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots;
        source[u] = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
      }
#pragma unroll
      for (int u = 0; u < kSteps; ++u)
        v[u] = this->columns.load(static_cast<const T*>(p.x) + this->row_of(source[u]));
      Acc logit[kSteps];
      Acc top = negative_infinity(Acc{});
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        Acc src[VEC];
#pragma unroll
        for (int c = 0; c < VEC; ++c) src[c] = element(v[u], c);
        logit[u] = this->score(src, sum.dst);
        if constexpr (WIDE) logit[u] = this->wide_score(logit[u], p.x, source[u], p.x_dst, sum.row);
        logit[u] = this->over_head(logit[u]);
        if (first + u * kSlots < count && logit[u] > top) top = logit[u];
      }
      if (__any_sync(kWarpMask, top > sum.max + Acc(kSlack))) rebase(sum, top);
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots;
        const uint32_t bits = this->dropout.on ? __shfl_sync(kWarpMask, edge.bits, e & 31) : 0;
        if (e >= count) continue;
        Acc w = exponential(logit[u] - sum.max);
        sum.mass += w;
        if (this->dropout.on) w *= this->dropout.factor(bits, this->head);
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum.out[c] += w * element(v[u], c);
      }
    }
  }

  // Changes `sum` to the larger of both maxima; returns the factor that rescales the other sum.
  __device__ Acc rebase(Part& sum, Acc other_max) const {
    const Acc top = sum.max > other_max ? sum.max : other_max;
    const Acc factor = sum.max == top ? Acc(1) : exponential(sum.max - top);
    sum.max = top;
    sum.mass *= factor;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.out[c] *= factor;
    return other_max == top ? Acc(1) : exponential(other_max - top);
  }

  __device__ void reduce(Sum& sum) const {
#pragma unroll
    for (int offset = LANES; offset < 32; offset <<= 1) {
      Part other;
      other.max = __shfl_xor_sync(kWarpMask, sum.max, offset);
      other.mass = __shfl_xor_sync(kWarpMask, sum.mass, offset);
#pragma unroll
      for (int c = 0; c < VEC; ++c) other.out[c] = __shfl_xor_sync(kWarpMask, sum.out[c], offset);
      merge(sum, other);
    }
  }

  __device__ void merge(Part& sum, const Part& other) const {
    const Acc factor = rebase(sum, other.max);
    sum.mass += factor * other.mass;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.out[c] += factor * other.out[c];
  }

  __device__ void finish(int64_t row, int64_t degree, Sum& sum) const {
    const bool loop = row < p.num_loops, has_edges = degree > 0 || loop;
    if (loop) {
      Acc self[VEC];
      this->load_row(p.x, row, self);
      Acc logit = this->score(self, sum.dst);
      if constexpr (WIDE) logit = this->wide_score(logit, p.x, row, p.x_dst, row);
      logit = this->sum_of_head(logit);
      rebase(sum, logit);
      Acc w = exponential(logit - sum.max);  // NaN for infinite logits, as for an edge
      sum.mass += w;
      if (this->dropout.on)
        w *= this->dropout.factor(this->dropout.bits(csr.num_edges + row), this->head);
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum.out[c] += w * self[c];
    }
    if (!this->active) return;
    const Acc inverse = inverse_mass(sum.mass, has_edges);
    const int64_t at = this->row_of(row);
    const DType type = out_type(p);
    Acc bias[VEC];
    if (p.bias) read_row(this->columns, p.bias, type, this->at, bias);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.out[c] *= inverse;
    if (p.y) write_row(this->columns, p.y, acc_type(p.dtype), at, sum.out);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.out[c] += p.bias ? bias[c] : Acc(0);
    write_row(this->columns, p.out, type, at, sum.out);
    if (p.softmax && this->channel == 0)
      write_softmax(p.softmax, row, p.heads, this->head, sum.max, inverse, has_edges);
  }
};

// Calls fn(Row, shape, dropout scale) with the row kernel for `p`.
template <typename Fn>
const char* with_row(const Gatv2& p, const Fn& fn) {
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const bool vectors = takes_vectors<T>(p, p.x, p.x_dst, p.bias, p.out);
    const HeadShape s = head_shape(p, p.csr, p.dtype, vectors);
    dispatch_scored<T, I>(p, s, [&](auto vec, auto lanes, auto heads, auto strided, auto wide) {
      fn(std::common_type<Gatv2Row<T, I, vec, lanes, heads, strided, wide>>{}, s,
         static_cast<acc_t<T>>(dropout_scale(p.dropout)));
    });
    return last_error();
  });
}

}  // namespace

int64_t gatv2_scratch(const Gatv2& p) {
  int64_t bytes = 0;
  with_row(p, [&](auto row, const Shape& s, auto) {
    bytes = rows_scratch<typename decltype(row)::type>(p.csr, s);
  });
  return bytes;
}

const char* gatv2(const Gatv2& p, void* scratch, void* stream_) {
  if (p.csr.num_rows == 0 || p.heads * p.channels == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const uint32_t threshold = dropout_threshold(p.dropout);
  return with_row(p, [&](auto row, const Shape& s, auto scale) {
    launch_rows<typename decltype(row)::type>(p.csr, s, scratch, stream, p, threshold, scale);
  });
}

}  // namespace pyg_fast::cuda
