#include "gatv2.cuh"
#include "node_heads.cuh"
#include "params/gatv2.h"

namespace pyg_fast::cuda {
namespace {

constexpr int kNodeLanes = 8;  // maximum threads per (node, head)

// T is the type of grad. LANES threads per (node, head) read VEC channels each.
template <typename T, int VEC, int LANES, bool STRIDED>
__global__ void __launch_bounds__(kThreads, kStreamBlocksPerSm)
    gatv2_stat_kernel(Gatv2Backward p, int64_t nodes) {
  using Acc = acc_t<T>;
  using Channels = Columns<VEC, LANES, STRIDED>;
  const int64_t count = p.csr.num_rows * p.heads;
  NodeHead<LANES> pair(p.heads, nodes);
  for (; pair.first < count; pair.first += pair.step, pair.at += pair.step, pair.node += nodes) {
    const bool valid = pair.active && pair.at < count;
    Pack<Acc, 2> of_softmax = {};
    Acc mean = 0;
    if (valid && pair.part == 0) {  // before the sum, to wait for both at once
      const Acc* softmax = static_cast<const Acc*>(p.softmax) + pair.node * 2 * p.heads + pair.head;
      of_softmax = {softmax[0], softmax[p.heads]};
    }
    if (valid) {
      const int64_t end = (pair.at + 1) * p.channels;
#pragma unroll 1
      for (int64_t c = end - p.channels + Channels::first(pair.part); c < end; c += LANES * VEC) {
        const Channels columns(c, end);
        const auto grad = columns.load(static_cast<const T*>(p.grad) + c);
        Acc y[VEC];
        read_row(columns, p.y, acc_type(p.dtype), c, y);
#pragma unroll
        for (int k = 0; k < VEC; ++k) mean += element(grad, k) * y[k];
      }
    }
    mean = pair.sum(mean);
    if (pair.part != 0 || !valid) continue;
    Acc* stat = static_cast<Acc*>(p.stat) + pair.node * p.stat_size();
    *reinterpret_cast<Pack<Acc, 2>*>(stat + 2 * pair.head) = of_softmax;
    stat[2 * p.heads + pair.head] = mean;
  }
}

template <typename T>
void run_stat(const Gatv2Backward& p, cudaStream_t stream) {
  constexpr int kVecs = kVec<acc_t<T>>;  // those of y have 16 bytes
  const auto with = [&](auto strided) {
    dispatch_lanes<kNodeLanes>((p.channels + kVecs - 1) / kVecs, [&](auto lanes) {
      const NodeHeadShape s = node_head_shape(p.csr.num_rows, p.heads, lanes);
      gatv2_stat_kernel<T, kVecs, lanes, strided><<<s.blocks, kThreads, 0, stream>>>(p, s.nodes);
    });
  };
  if (p.channels % kVecs == 0 && aligned16(p.grad) && aligned16(p.y)) with(std::false_type{});
  else with(std::true_type{});
}

// What an edge needs of its destination and head.
template <typename Acc>
struct Stat {
  Acc max, inverse, mean;

  // `head` is 0 for idle threads.
  __device__ static Stat load(const Gatv2Backward& p, int64_t node, int head) {
    const Acc* stat = static_cast<const Acc*>(p.stat) + node * p.stat_size();
    const auto softmax = pyg_fast::cuda::load<Acc, 2>(stat + 2 * head);
    return {softmax.data[0], softmax.data[1], stat[2 * p.heads + head]};
  }
};

// Over the graph: the gradients of a destination, and its part of the gradient of att.
template <typename T, typename I, int VEC, int LANES, int HEADS, bool STRIDED, bool WIDE>
struct Gatv2DstRow : ScoredTile<T, I, VEC, LANES, HEADS, STRIDED, WIDE> {
  using Acc = acc_t<T>;
  using Tile = ScoredTile<T, I, VEC, LANES, HEADS, STRIDED, WIDE>;
  using Edge = AttentionEdge<I>;
  using Index = I;
  static constexpr int kLanes = LANES, kBlocks = attention_blocks(VEC, WIDE);
  static constexpr Sums kSums = Sums::registers;
  static constexpr int kSlots = 32 / LANES;
  static constexpr int kSteps = 4;

  struct Part {
    Acc slopes[VEC];  // sum of dl * leaky'(s), until `finish` without the inverse of the row
    Acc att[VEC];     // sum of dl * leaky(s), likewise
  };
  struct Sum : Part {
    Acc dst[VEC], grad[VEC];
    Acc max, mean;
    int64_t row;
  };

  const Gatv2Backward& p;
  const Csr& csr;
  bool grad_acc;
  Acc* att_rows;  // [num_rows, heads, channels]

  __device__ Gatv2DstRow(const Gatv2Backward& p, uint32_t threshold, acc_t<T> scale, void* att_rows,
                         int tile)
      : Tile(p, threshold, scale, tile),
        p(p),
        csr(p.csr),
        grad_acc(p.out_acc),
        att_rows(static_cast<Acc*>(att_rows)) {}

  __device__ Sum empty(int64_t row) const {
    Sum sum;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.slopes[c] = sum.att[c] = 0;
    this->load_row(p.x_dst, row, sum.dst);
    this->load_grad(p.grad, grad_acc, row, sum.grad);
    const auto stat = Stat<Acc>::load(p, row, this->active ? this->head : 0);
    sum.max = stat.max;
    sum.mean = stat.mean;
    sum.row = row;
    return sum;
  }

  __device__ void add_edge(const Acc (&src)[VEC], Acc logit, Acc dot, uint32_t bits,
                           Sum& sum) const {
    const Acc dl =
        exponential(logit - sum.max) * (this->dropout.factor(bits, this->head) * dot - sum.mean);
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      const Acc s = src[c] + sum.dst[c];
      const Acc slope = s > 0 ? dl : dl * this->slope;
      sum.slopes[c] += slope;
      sum.att[c] += slope * s;
    }
  }

  __device__ Acc dot(const Acc (&src)[VEC], const Sum& sum) const {
    const Acc d = Tile::part_of_dot(sum.grad, src);
    return this->active ? d : Acc(0);
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    const int slot = (threadIdx.x & 31) / LANES;
    for (int first = 0; first < count; first += kSteps * kSlots) {
      Pack<T, VEC, STRIDED> v[kSteps];
      Col source[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        source[u] = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
      }
#pragma unroll
      for (int u = 0; u < kSteps; ++u)
        v[u] = this->columns.load(static_cast<const T*>(p.x) + this->row_of(source[u]));
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        Acc src[VEC];
#pragma unroll
        for (int c = 0; c < VEC; ++c) src[c] = element(v[u], c);
        Acc logit = this->score(src, sum.dst), d = dot(src, sum);
        if constexpr (WIDE) {
          logit = this->wide_score(logit, p.x, source[u], p.x_dst, sum.row);
          d = this->wide_dot(d, p.grad, grad_acc, sum.row, p.x, source[u]);
        }
        logit = this->over_head(logit);
        d = this->over_head(d);
        const uint32_t bits = this->dropout.on ? __shfl_sync(kWarpMask, edge.bits, e & 31) : 0;
        if (e < count) add_edge(src, logit, d, bits, sum);
      }
    }
  }

  __device__ void reduce(Sum& sum) const {
#pragma unroll
    for (int offset = LANES; offset < 32; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        sum.slopes[c] += __shfl_xor_sync(kWarpMask, sum.slopes[c], offset);
        sum.att[c] += __shfl_xor_sync(kWarpMask, sum.att[c], offset);
      }
    }
  }

  __device__ void merge(Part& sum, const Part& other) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.slopes[c] += other.slopes[c];
      sum.att[c] += other.att[c];
    }
  }

  __device__ void finish(int64_t row, int64_t, Sum& sum) const {
    if (row < p.num_loops) {
      Acc self[VEC];
      this->load_row(p.x, row, self);
      Acc logit = this->score(self, sum.dst), d = dot(self, sum);
      if constexpr (WIDE) {
        logit = this->wide_score(logit, p.x, row, p.x_dst, row);
        d = this->wide_dot(d, p.grad, grad_acc, row, p.x, row);
      }
      logit = this->sum_of_head(logit);
      d = this->sum_of_head(d);
      const uint32_t bits = this->dropout.on ? this->dropout.bits(csr.num_edges + row) : 0;
      add_edge(self, logit, d, bits, sum);
    }
    if (!this->active) return;
    const int64_t at = this->row_of(row);
    const Acc inverse = Stat<Acc>::load(p, row, this->head).inverse;
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.slopes[c] *= this->att[c] * inverse;
      sum.att[c] *= inverse;
    }
    write_row(this->columns, p.grad_x_dst, p.dtype, at, sum.slopes);
    write_row(this->columns, att_rows, acc_type(p.dtype), at, sum.att);
  }
};

// Over the transpose: the gradients of a source.
template <typename T, typename I, int VEC, int LANES, int HEADS, bool STRIDED, bool WIDE>
struct Gatv2SrcRow : ScoredTile<T, I, VEC, LANES, HEADS, STRIDED, WIDE> {
  using Acc = acc_t<T>;
  using Tile = ScoredTile<T, I, VEC, LANES, HEADS, STRIDED, WIDE>;
  using Edge = AttentionEdge<I>;
  using Index = I;
  static constexpr int kLanes = LANES, kBlocks = attention_blocks(VEC, WIDE);
  static constexpr Sums kSums = Sums::registers;
  static constexpr int kSlots = 32 / LANES;
  static constexpr int kSteps = 2;  // two rows each

  struct Part {
    Acc grad[VEC];    // sum of factor * p * grad
    Acc slopes[VEC];  // sum of dl * leaky'(s)
  };
  struct Sum : Part {
    Acc src[VEC];
    int64_t row;
  };

  const Gatv2Backward& p;
  const Csr& csr;
  bool grad_acc;

  __device__ Gatv2SrcRow(const Gatv2Backward& p, uint32_t threshold, acc_t<T> scale, int tile)
      : Tile(p, threshold, scale, tile), p(p), csr(p.t_csr), grad_acc(p.out_acc) {}

  __device__ Sum empty(int64_t row) const {
    Sum sum;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.grad[c] = sum.slopes[c] = 0;
    this->load_row(p.x, row, sum.src);
    sum.row = row;
    return sum;
  }

  __device__ void add_edge(const Acc (&dst)[VEC], const Acc (&grad)[VEC], Acc logit, Acc dot,
                           const Stat<Acc>& stat, uint32_t bits, Sum& sum) const {
    const Acc weight = exponential(logit - stat.max) * stat.inverse;
    const Acc factor = this->dropout.factor(bits, this->head);
    const Acc dl = weight * (factor * dot - stat.mean);
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.grad[c] += weight * factor * grad[c];
      sum.slopes[c] += sum.src[c] + dst[c] > 0 ? dl : dl * this->slope;
    }
  }

  __device__ Acc dot(const Acc (&grad)[VEC], const Sum& sum) const {
    const Acc d = Tile::part_of_dot(grad, sum.src);
    return this->active ? d : Acc(0);
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    const int slot = (threadIdx.x & 31) / LANES;
    for (int first = 0; first < count; first += kSteps * kSlots) {
      Acc dst[kSteps][VEC], grad[kSteps][VEC];
      Stat<Acc> stat[kSteps];
      Col node[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        node[u] = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
      }
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        this->load_row(p.x_dst, node[u], dst[u]);
        this->load_grad(p.grad, grad_acc, node[u], grad[u]);
        stat[u] = Stat<Acc>::load(p, node[u], this->active ? this->head : 0);
      }
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        Acc logit = this->score(sum.src, dst[u]), d = dot(grad[u], sum);
        if constexpr (WIDE) {
          logit = this->wide_score(logit, p.x, sum.row, p.x_dst, node[u]);
          d = this->wide_dot(d, p.grad, grad_acc, node[u], p.x, sum.row);
        }
        logit = this->over_head(logit);
        d = this->over_head(d);
        const uint32_t bits = this->dropout.on ? __shfl_sync(kWarpMask, edge.bits, e & 31) : 0;
        if (e < count) add_edge(dst[u], grad[u], logit, d, stat[u], bits, sum);
      }
    }
  }

  __device__ void reduce(Sum& sum) const {
#pragma unroll
    for (int offset = LANES; offset < 32; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        sum.grad[c] += __shfl_xor_sync(kWarpMask, sum.grad[c], offset);
        sum.slopes[c] += __shfl_xor_sync(kWarpMask, sum.slopes[c], offset);
      }
    }
  }

  __device__ void merge(Part& sum, const Part& other) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.grad[c] += other.grad[c];
      sum.slopes[c] += other.slopes[c];
    }
  }

  __device__ void finish(int64_t row, int64_t, Sum& sum) const {
    if (row < p.num_loops) {
      Acc dst[VEC], grad[VEC];
      this->load_row(p.x_dst, row, dst);
      this->load_grad(p.grad, grad_acc, row, grad);
      Acc logit = this->score(sum.src, dst), d = dot(grad, sum);
      if constexpr (WIDE) {
        logit = this->wide_score(logit, p.x, row, p.x_dst, row);
        d = this->wide_dot(d, p.grad, grad_acc, row, p.x, row);
      }
      logit = this->sum_of_head(logit);
      d = this->sum_of_head(d);
      const auto stat = Stat<Acc>::load(p, row, this->active ? this->head : 0);
      const uint32_t bits = this->dropout.on ? this->dropout.bits(csr.num_edges + row) : 0;
      add_edge(dst, grad, logit, d, stat, bits, sum);
    }
    if (!this->active) return;
    const int64_t at = this->row_of(row);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.grad[c] += this->att[c] * sum.slopes[c];
    write_row(this->columns, p.grad_x, p.dtype, at, sum.grad);
  }
};

// Each destination's part of the gradient of att.
int64_t att_rows_bytes(const Gatv2Backward& p) {
  return aligned(p.csr.num_rows * p.heads * p.channels * acc_bytes(p.dtype));
}

// Calls fn(Row, shape) with the kernel for the rows of `csr`: those of the graph, or of its transpose.
template <typename T, typename I, bool SOURCES, typename Fn>
void with_row(const Gatv2Backward& p, const Fn& fn) {
  const bool vectors = takes_vectors<T>(p, p.x, p.x_dst, p.grad);
  const HeadShape s = head_shape(p, SOURCES ? p.t_csr : p.csr, p.dtype, vectors);
  dispatch_scored<T, I>(p, s, [&](auto vec, auto lanes, auto heads, auto strided, auto wide) {
    if constexpr (SOURCES)
      fn(std::common_type<Gatv2SrcRow<T, I, vec, lanes, heads, strided, wide>>{}, s);
    else fn(std::common_type<Gatv2DstRow<T, I, vec, lanes, heads, strided, wide>>{}, s);
  });
}

}  // namespace

// The gradients of att, and then what one of their sum and the two passes needs.
int64_t gatv2_backward_scratch(const Gatv2Backward& p) {
  int64_t bytes = 0;
  dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const acc_t<T>* rows = nullptr;  // the scratch memory, which is aligned
    bytes = sum_columns_scratch(rows, p.csr.num_rows, p.heads * p.channels);
    const auto at_least = [&](int64_t wanted) { bytes = wanted > bytes ? wanted : bytes; };
    with_row<T, I, false>(p, [&](auto row, const Shape& s) {
      at_least(rows_scratch<typename decltype(row)::type>(p.csr, s));
    });
    with_row<T, I, true>(p, [&](auto row, const Shape& s) {
      at_least(rows_scratch<typename decltype(row)::type>(p.t_csr, s));
    });
    return nullptr;
  });
  return att_rows_bytes(p) + bytes;
}

const char* gatv2_backward(const Gatv2Backward& p, void* scratch, void* stream_) {
  const int64_t size = p.heads * p.channels;
  if (size == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const uint32_t threshold = dropout_threshold(p.dropout);
  const double scale = dropout_scale(p.dropout);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    using Acc = acc_t<T>;
    void* rest = static_cast<char*>(scratch) + att_rows_bytes(p);
    const auto dropout = static_cast<Acc>(scale);
    if (p.csr.num_rows > 0) {
      p.out_acc ? run_stat<Acc>(p, stream) : run_stat<T>(p, stream);
      with_row<T, I, false>(p, [&](auto row, const Shape& s) {
        launch_rows<typename decltype(row)::type>(p.csr, s, rest, stream, p, threshold, dropout,
                                                  scratch);
      });
      sum_columns(static_cast<const Acc*>(scratch), static_cast<Acc*>(p.grad_att), p.csr.num_rows,
                  size, static_cast<Acc*>(rest), stream);
    }
    if (p.t_csr.num_rows > 0) {
      with_row<T, I, true>(p, [&](auto row, const Shape& s) {
        launch_rows<typename decltype(row)::type>(p.t_csr, s, rest, stream, p, threshold, dropout);
      });
    }
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
