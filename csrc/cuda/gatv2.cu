// GATv2: its scores pass all channels through the leaky ReLU, so that each pass over the edges
// works them out again from the features at both ends. Nothing of an edge is stored.
#include "attention.cuh"
#include "columns.cuh"
#include "cuda.h"

namespace pyg_fast::cuda {
namespace {

constexpr float kSlack = 16;   // see GatRow
constexpr int kNodeLanes = 8;  // threads of a (node, head)

// What the three passes share. T is what the features are stored as; WIDE heads have more channels
// than a tile.
template <typename T, typename I, int VEC, int LANES, int HEADS, bool WIDE>
struct ScoredTile : HeadTile<VEC, LANES, HEADS> {
  using Acc = acc_t<T>;
  using Base = HeadTile<VEC, LANES, HEADS>;
  Dropout<Acc> dropout;
  bool names_edges;
  Acc slope;
  Acc att[VEC];
  const T* att_of_head;
  int64_t channels, node_size;

  template <typename P>
  __device__ ScoredTile(const P& p, uint32_t threshold, acc_t<T> scale, int tile)
      : Base(p, tile), dropout(p, threshold, scale), channels(p.channels) {
    names_edges = dropout.on;
    slope = static_cast<Acc>(p.negative_slope);
    node_size = p.heads * p.channels;
    const int head = this->head < p.heads ? this->head : this->first_head;
    att_of_head = static_cast<const T*>(p.att) + head * p.channels;
#pragma unroll
    for (int c = 0; c < VEC; ++c)
      att[c] = this->active ? to_acc(att_of_head[this->channel + c]) : Acc(0);
  }

  __device__ int64_t row_of(int64_t node) const { return node * node_size + this->at; }

  __device__ void load_row(const void* x, int64_t node, Acc (&v)[VEC]) const {
    const auto pack = pyg_fast::cuda::load<T, VEC>(static_cast<const T*>(x) + row_of(node));
#pragma unroll
    for (int c = 0; c < VEC; ++c) v[c] = element(pack, c);
  }

  __device__ void load_grad(const void* grad, bool grad_acc, int64_t node, Acc (&v)[VEC]) const {
    if (!grad_acc) return load_row(grad, node, v);
    constexpr int kPart = VEC < kVec<Acc> ? VEC : kVec<Acc>;
    const Acc* from = static_cast<const Acc*>(grad) + row_of(node);
#pragma unroll
    for (int c = 0; c < VEC; c += kPart) {
      const auto pack = pyg_fast::cuda::load<Acc, kPart>(from + c);
#pragma unroll
      for (int k = 0; k < kPart; ++k) v[c + k] = pack.data[k];
    }
  }

  // This thread's part of the logit.
  __device__ Acc score(const Acc (&src)[VEC], const Acc (&dst)[VEC]) const {
    Acc sum = 0;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum += att[c] * leaky(src[c] + dst[c], slope);
    return this->active ? sum : Acc(0);  // others read of another head, where a NaN may be
  }

  // fn(channel of the head) for what this thread has of the other tiles of a wide head.
  template <typename Fn>
  __device__ void for_other_channels(const Fn& fn) const {
    for (int64_t base = threadIdx.x % LANES * VEC; base < channels; base += LANES * VEC) {
      if (this->active && base == this->channel) continue;
      for (int c = 0; c < VEC; ++c) fn(base + c);
    }
  }

  // The same for them.
  __device__ Acc score_of_others(const void* src, int64_t source, const void* dst,
                                 int64_t node) const {
    Acc sum = 0;
    const int64_t first = static_cast<int64_t>(this->first_head) * channels;
    const T* from = static_cast<const T*>(src) + source * node_size + first;
    const T* to = static_cast<const T*>(dst) + node * node_size + first;
    for_other_channels([&](int64_t c) {
      sum += to_acc(att_of_head[c]) * leaky(to_acc(from[c]) + to_acc(to[c]), slope);
    });
    return sum;
  }

  __device__ Acc dot_of_others(const void* grad, bool grad_acc, int64_t node, const void* src,
                               int64_t source) const {
    Acc sum = 0;
    const int64_t first = static_cast<int64_t>(this->first_head) * channels;
    const T* from = static_cast<const T*>(src) + source * node_size + first;
    const int64_t at = node * node_size + first;
    for_other_channels([&](int64_t c) {
      const Acc g = grad_acc ? static_cast<const Acc*>(grad)[at + c]
                             : to_acc(static_cast<const T*>(grad)[at + c]);
      sum += g * to_acc(from[c]);
    });
    return sum;
  }

  // The sum over the threads of a head, for all threads of a warp.
  __device__ Acc over_head(Acc v) const {
#pragma unroll
    for (int offset = 1; offset < Base::kHeadLanes; offset <<= 1)
      v += __shfl_xor_sync(kWarpMask, v, offset);
    return v;
  }
};

// Forward ----------------------------------------------------------------------------------------

template <typename T, typename I, int VEC, int LANES, int HEADS, bool WIDE>
struct Gatv2Row : ScoredTile<T, I, VEC, LANES, HEADS, WIDE> {
  using Acc = acc_t<T>;
  using Tile = ScoredTile<T, I, VEC, LANES, HEADS, WIDE>;
  using Edge = AttentionEdge<I>;
  static constexpr bool kSharedSums = false;
  static constexpr int kSlots = 32 / LANES;
  static constexpr int kSteps = 4;

  // Every slot of a warp has a maximum and a mass of its own until `reduce`.
  struct Sum {
    Acc out[VEC];
    Acc dst[VEC];
    Acc max, mass;
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
      Pack<T, VEC> v[kSteps];
      I source[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots;
        source[u] = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
        v[u] = pyg_fast::cuda::load<T, VEC>(static_cast<const T*>(p.x) + this->row_of(source[u]));
      }
      Acc logit[kSteps];
      Acc top = negative_infinity(Acc{});
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        Acc src[VEC];
#pragma unroll
        for (int c = 0; c < VEC; ++c) src[c] = element(v[u], c);
        logit[u] = this->score(src, sum.dst);
        if constexpr (WIDE) logit[u] += this->score_of_others(p.x, source[u], p.x_dst, sum.row);
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
        if (this->dropout.on) w *= this->dropout.kept(bits, this->head);
#pragma unroll
        for (int c = 0; c < VEC; ++c) sum.out[c] += w * element(v[u], c);
      }
    }
  }

  // Brings `sum` to the larger of both maxima, and returns what brings the other there.
  __device__ Acc rebase(Sum& sum, Acc other_max) const {
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
      Sum other;
      other.max = __shfl_xor_sync(kWarpMask, sum.max, offset);
      other.mass = __shfl_xor_sync(kWarpMask, sum.mass, offset);
#pragma unroll
      for (int c = 0; c < VEC; ++c) other.out[c] = __shfl_xor_sync(kWarpMask, sum.out[c], offset);
      merge(sum, other);
    }
  }

  __device__ void merge(Sum& sum, const Sum& other) const {
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
      if constexpr (WIDE) logit += this->score_of_others(p.x, row, p.x_dst, row);
      logit = this->sum_of_head(logit);
      rebase(sum, logit);
      Acc w = exponential(logit - sum.max);  // of infinite ones NaN, as of an edge
      sum.mass += w;
      if (this->dropout.on)
        w *= this->dropout.kept(this->dropout.bits(csr.num_edges + row), this->head);
#pragma unroll
      for (int c = 0; c < VEC; ++c) sum.out[c] += w * self[c];
    }
    if (!this->active) return;
    const Acc inverse = inverse_mass(sum.mass, has_edges);
    const int64_t at = this->row_of(row);
    const DType type = out_type(p);
    Acc bias[VEC];
    if (p.bias) read_row(p.bias, type, this->at, bias);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.out[c] *= inverse;
    if (p.y) write_row(p.y, acc_type(p.dtype), at, sum.out);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.out[c] += p.bias ? bias[c] : Acc(0);
    write_row(p.out, type, at, sum.out);
    if (p.lse && this->channel == 0) {
      static_cast<Acc*>(p.lse)[row * p.heads + this->head] =
          has_edges ? sum.max + log(sum.mass) : Acc(0);
    }
  }
};

template <typename T, typename I, int VEC, int LANES, int HEADS, bool WIDE>
__global__ void __launch_bounds__(kThreads, attention_blocks(VEC, WIDE))
    gatv2_kernel(Gatv2 p, HeadShape s, uint32_t threshold, acc_t<T> scale) {
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    Gatv2Row<T, I, VEC, LANES, HEADS, WIDE> row(p, threshold, scale, tile);
    for_each_row<I, LANES>(p.csr, s, row);
  }
}

// Backward ---------------------------------------------------------------------------------------

template <typename Acc>
__global__ void __launch_bounds__(kThreads) gatv2_stat_kernel(Gatv2Backward p) {
  const int64_t count = p.csr.num_rows * p.heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (kThreads / kNodeLanes);
  const int part = threadIdx.x % kNodeLanes;
  constexpr int kNodes = kThreads / kNodeLanes;
  int64_t at = static_cast<int64_t>(blockIdx.x) * kNodes + threadIdx.x / kNodeLanes;
  for (; __any_sync(kWarpMask, at < count); at += step) {
    Acc mean = 0;
    if (at < count) {
      for (int64_t c = at * p.channels + part; c < (at + 1) * p.channels; c += kNodeLanes)
        mean += read<Acc>(p.grad, out_type(p), c) * static_cast<const Acc*>(p.y)[c];
    }
#pragma unroll
    for (int offset = 1; offset < kNodeLanes; offset <<= 1)
      mean += __shfl_xor_sync(kWarpMask, mean, offset);
    if (part != 0 || at >= count) continue;
    const int64_t node = at / p.heads, head = at % p.heads;
    Acc* stat = static_cast<Acc*>(p.stat) + node * 2 * p.heads + head;
    stat[0] = static_cast<const Acc*>(p.lse)[at];
    stat[p.heads] = mean;
  }
}

// Over the graph: the gradients of a destination, and its part of that of att.
template <typename T, typename I, int VEC, int LANES, int HEADS, bool WIDE>
struct Gatv2DstRow : ScoredTile<T, I, VEC, LANES, HEADS, WIDE> {
  using Acc = acc_t<T>;
  using Tile = ScoredTile<T, I, VEC, LANES, HEADS, WIDE>;
  using Edge = AttentionEdge<I>;
  static constexpr bool kSharedSums = false;
  static constexpr int kSlots = 32 / LANES;
  static constexpr int kSteps = 4;

  struct Sum {
    Acc slopes[VEC];  // sum of dl * leaky'(s)
    Acc att[VEC];     // sum of dl * leaky(s)
    Acc dst[VEC], grad[VEC];
    Acc lse, mean;
    int64_t row;
  };

  const Gatv2Backward& p;
  const Csr& csr;
  bool grad_acc;
  Acc* att_rows;  // [num_rows, heads, channels]

  __device__ Gatv2DstRow(const Gatv2Backward& p, uint32_t threshold, acc_t<T> scale, void* att_rows,
                         int tile)
      : Tile(p, threshold, scale, tile), p(p), csr(p.csr), grad_acc(p.out_acc),
        att_rows(static_cast<Acc*>(att_rows)) {}

  __device__ Sum empty(int64_t row) const {
    Sum sum;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.slopes[c] = sum.att[c] = 0;
    this->load_row(p.x_dst, row, sum.dst);
    this->load_grad(p.grad, grad_acc, row, sum.grad);
    const Acc* stat = static_cast<const Acc*>(p.stat) + row * 2 * p.heads +
                      (this->active ? this->head : 0);
    sum.lse = stat[0];
    sum.mean = stat[p.heads];
    sum.row = row;
    return sum;
  }

  __device__ void add_edge(const Acc (&src)[VEC], Acc logit, Acc dot, uint32_t bits,
                           Sum& sum) const {
    const Acc dl = exponential(logit - sum.lse) *
                   (this->dropout.kept(bits, this->head) * dot - sum.mean);
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      const Acc s = src[c] + sum.dst[c];
      const Acc slope = s > 0 ? dl : dl * this->slope;
      sum.slopes[c] += slope;
      sum.att[c] += slope * s;
    }
  }

  __device__ Acc dot(const Acc (&src)[VEC], const Sum& sum) const {
    Acc d = 0;
#pragma unroll
    for (int c = 0; c < VEC; ++c) d += this->active ? sum.grad[c] * src[c] : Acc(0);
    return d;
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    const int slot = (threadIdx.x & 31) / LANES;
    for (int first = 0; first < count; first += kSteps * kSlots) {
      Pack<T, VEC> v[kSteps];
      I source[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        source[u] = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
        v[u] = pyg_fast::cuda::load<T, VEC>(static_cast<const T*>(p.x) + this->row_of(source[u]));
      }
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        Acc src[VEC];
#pragma unroll
        for (int c = 0; c < VEC; ++c) src[c] = element(v[u], c);
        Acc logit = this->score(src, sum.dst), d = dot(src, sum);
        if constexpr (WIDE) {
          logit += this->score_of_others(p.x, source[u], p.x_dst, sum.row);
          d += this->dot_of_others(p.grad, grad_acc, sum.row, p.x, source[u]);
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

  __device__ void merge(Sum& sum, const Sum& other) const {
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
        logit += this->score_of_others(p.x, row, p.x_dst, row);
        d += this->dot_of_others(p.grad, grad_acc, row, p.x, row);
      }
      logit = this->sum_of_head(logit);
      d = this->sum_of_head(d);
      const uint32_t bits = this->dropout.on ? this->dropout.bits(csr.num_edges + row) : 0;
      add_edge(self, logit, d, bits, sum);
    }
    if (!this->active) return;
    const int64_t at = this->row_of(row);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.slopes[c] *= this->att[c];
    write_row(p.grad_x_dst, p.dtype, at, sum.slopes);
    write_row(att_rows, acc_type(p.dtype), at, sum.att);
  }
};

// Over the transpose: the gradients of a source.
template <typename T, typename I, int VEC, int LANES, int HEADS, bool WIDE>
struct Gatv2SrcRow : ScoredTile<T, I, VEC, LANES, HEADS, WIDE> {
  using Acc = acc_t<T>;
  using Tile = ScoredTile<T, I, VEC, LANES, HEADS, WIDE>;
  using Edge = AttentionEdge<I>;
  static constexpr bool kSharedSums = false;
  static constexpr int kSlots = 32 / LANES;
  static constexpr int kSteps = 2;  // of two rows each

  struct Sum {
    Acc grad[VEC];    // sum of kept * p * grad
    Acc slopes[VEC];  // sum of dl * leaky'(s)
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
                           Acc lse, Acc mean, uint32_t bits, Sum& sum) const {
    const Acc weight = exponential(logit - lse);
    const Acc kept = this->dropout.kept(bits, this->head);
    const Acc dl = weight * (kept * dot - mean);
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.grad[c] += weight * kept * grad[c];
      sum.slopes[c] += sum.src[c] + dst[c] > 0 ? dl : dl * this->slope;
    }
  }

  __device__ Acc dot(const Acc (&grad)[VEC], const Sum& sum) const {
    Acc d = 0;
#pragma unroll
    for (int c = 0; c < VEC; ++c) d += this->active ? grad[c] * sum.src[c] : Acc(0);
    return d;
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    const int slot = (threadIdx.x & 31) / LANES;
    for (int first = 0; first < count; first += kSteps * kSlots) {
      Acc dst[kSteps][VEC], grad[kSteps][VEC], lse[kSteps], mean[kSteps];
      I node[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        node[u] = __shfl_sync(kWarpMask, edge.source, e < count ? e : count - 1);
        this->load_row(p.x_dst, node[u], dst[u]);
        this->load_grad(p.grad, grad_acc, node[u], grad[u]);
        const Acc* stat = static_cast<const Acc*>(p.stat) +
                          static_cast<int64_t>(node[u]) * 2 * p.heads +
                          (this->active ? this->head : 0);
        lse[u] = stat[0];
        mean[u] = stat[p.heads];
      }
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int e = first + u * kSlots + slot;
        Acc logit = this->score(sum.src, dst[u]), d = dot(grad[u], sum);
        if constexpr (WIDE) {
          logit += this->score_of_others(p.x, sum.row, p.x_dst, node[u]);
          d += this->dot_of_others(p.grad, grad_acc, node[u], p.x, sum.row);
        }
        logit = this->over_head(logit);
        d = this->over_head(d);
        const uint32_t bits = this->dropout.on ? __shfl_sync(kWarpMask, edge.bits, e & 31) : 0;
        if (e < count) add_edge(dst[u], grad[u], logit, d, lse[u], mean[u], bits, sum);
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

  __device__ void merge(Sum& sum, const Sum& other) const {
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
        logit += this->score_of_others(p.x, row, p.x_dst, row);
        d += this->dot_of_others(p.grad, grad_acc, row, p.x, row);
      }
      logit = this->sum_of_head(logit);
      d = this->sum_of_head(d);
      const Acc* stat = static_cast<const Acc*>(p.stat) + row * 2 * p.heads +
                        (this->active ? this->head : 0);
      const uint32_t bits = this->dropout.on ? this->dropout.bits(csr.num_edges + row) : 0;
      add_edge(dst, grad, logit, d, stat[0], stat[p.heads], bits, sum);
    }
    if (!this->active) return;
    const int64_t at = this->row_of(row);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.grad[c] += this->att[c] * sum.slopes[c];
    write_row(p.grad_x, p.dtype, at, sum.grad);
  }
};

template <typename T, typename I, int VEC, int LANES, int HEADS, bool WIDE>
__global__ void __launch_bounds__(kThreads, attention_blocks(VEC, WIDE))
    gatv2_dst_kernel(Gatv2Backward p, HeadShape s, uint32_t threshold, acc_t<T> scale,
                     void* att_rows) {
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    Gatv2DstRow<T, I, VEC, LANES, HEADS, WIDE> row(p, threshold, scale, att_rows, tile);
    for_each_row<I, LANES>(p.csr, s, row);
  }
}

template <typename T, typename I, int VEC, int LANES, int HEADS, bool WIDE>
__global__ void __launch_bounds__(kThreads, attention_blocks(VEC, WIDE))
    gatv2_src_kernel(Gatv2Backward p, HeadShape s, uint32_t threshold, acc_t<T> scale) {
  for (int tile = blockIdx.y; tile < s.tiles; tile += gridDim.y) {
    Gatv2SrcRow<T, I, VEC, LANES, HEADS, WIDE> row(p, threshold, scale, tile);
    for_each_row<I, LANES>(p.t_csr, s, row);
  }
}

// fn(VEC, LANES, HEADS, WIDE)
template <typename T, typename I, typename Fn>
void dispatch_scored(const Attention& p, const HeadShape& s, const Fn& fn) {
  dispatch_heads<T, I>(s, [&](auto vec, auto lanes, auto heads) {
    if constexpr (heads == 1 && (vec == 1 || lanes == (sizeof(T) == 4 ? 16 : 8))) {
      if (p.channels > vec * lanes) return fn(vec, lanes, heads, std::true_type{});
    }
    fn(vec, lanes, heads, std::false_type{});
  });
}

}  // namespace

const char* gatv2(const Gatv2& p, void* stream_) {
  if (p.csr.num_rows == 0 || p.heads * p.channels == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const uint32_t threshold = dropout_threshold(p.dropout);
  const double scale = dropout_scale(p.dropout);
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const bool vectors = takes_vectors<T, I>(p, p.x, p.x_dst, p.bias, p.out);
    const HeadShape s = head_shape(p, p.csr, p.dtype, vectors);
    dispatch_scored<T, I>(p, s, [&](auto vec, auto lanes, auto heads, auto wide) {
      gatv2_kernel<T, I, vec, lanes, heads, wide><<<s.grid(p.csr.num_rows), kThreads, 0, stream>>>(
          p, s, threshold, static_cast<acc_t<T>>(scale));
    });
    return last_error();
  });
}

int64_t gatv2_backward_scratch(const Gatv2Backward& p) {
  return (p.csr.num_rows + column_blocks(p.csr.num_rows)) * p.heads * p.channels * acc_bytes(p.dtype);
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
    const bool vectors = takes_vectors<T, I>(p, p.x, p.x_dst, p.grad);
    if (p.csr.num_rows > 0) {
      const unsigned blocks = blocks_for(p.csr.num_rows * p.heads * kNodeLanes);
      gatv2_stat_kernel<Acc><<<blocks, kThreads, 0, stream>>>(p);
      const HeadShape s = head_shape(p, p.csr, p.dtype, vectors);
      dispatch_scored<T, I>(p, s, [&](auto vec, auto lanes, auto heads, auto wide) {
        const dim3 grid = s.grid(p.csr.num_rows);
        gatv2_dst_kernel<T, I, vec, lanes, heads, wide><<<grid, kThreads, 0, stream>>>(
            p, s, threshold, static_cast<acc_t<T>>(scale), scratch);
      });
      Acc* rows = static_cast<Acc*>(scratch);
      Acc* parts = rows + p.csr.num_rows * size;
      const int64_t count = column_blocks(p.csr.num_rows);
      const dim3 grid(static_cast<unsigned>((size + 31) / 32), static_cast<unsigned>(count));
      sum_columns_kernel<Acc><<<grid, kThreads, 0, stream>>>(rows, parts, p.csr.num_rows, size);
      sum_columns_kernel<Acc><<<dim3(grid.x, 1), kThreads, 0, stream>>>(
          parts, static_cast<Acc*>(p.grad_att), count, size);
    }
    if (p.t_csr.num_rows > 0) {
      const HeadShape s = head_shape(p, p.t_csr, p.dtype, vectors);
      dispatch_scored<T, I>(p, s, [&](auto vec, auto lanes, auto heads, auto wide) {
        const dim3 grid = s.grid(p.t_csr.num_rows);
        gatv2_src_kernel<T, I, vec, lanes, heads, wide><<<grid, kThreads, 0, stream>>>(
            p, s, threshold, static_cast<acc_t<T>>(scale));
      });
    }
    return last_error();
  });
}

}  // namespace pyg_fast::cuda
