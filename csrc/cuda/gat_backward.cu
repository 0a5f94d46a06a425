// Gradients of graph attention. The first kernel processes destinations, node by node. Then one pass over
// the edges of each source gathers the gradients of its destinations, without atomics. It also writes the
// gradients of the scores of edges and loops if one tile has all channels of a head; otherwise a third
// kernel does.
#include "gat.cuh"
#include "node_heads.cuh"

namespace pyg_fast::cuda {
namespace {

constexpr int kNodeLanes = 8;  // maximum threads per (node, head), or per edge
// The largest average row length for wide tiles: they are faster at 14 edges per row, slower at 380. With
// gradients of scores they are faster at both.
constexpr int kShortRows = 32;

// Eight heads of eight float32 channels, or similar.
constexpr bool is_wide_tile(int lanes, int heads) { return lanes == 16 && heads == 8; }

// Blocks per SM, by measurement: gradients of scores and heads of two threads profit from registers.
constexpr int backward_blocks(int vec, int lanes, int heads, bool scores) {
  return (scores && heads > 1) || lanes == 2 * heads ? 2 : attention_blocks(vec);
}

// What the pass over the edges needs of a destination and head: one load of 16 bytes.
template <typename Acc>
struct alignas(16) Stat {
  Acc dst, max, inverse, mean;

  // The weight of an edge of this score, as the forward computed it.
  __device__ Acc weight(Acc score, Acc slope) const {
    return exponential(leaky(score, slope) - max) * inverse;
  }
};

// stat and grad_alpha_dst: see GatBackward. LANES threads per (node, head) read VEC channels each.
template <typename T, int VEC, int LANES, bool STRIDED>
__global__ void __launch_bounds__(kThreads, kStreamBlocksPerSm)
    gat_backward_dst_kernel(GatBackward p, int64_t nodes) {
  using Acc = acc_t<T>;
  using Channels = Columns<VEC, LANES, STRIDED>;
  const int64_t count = p.csr.num_cols * p.heads;
  NodeHead<LANES> pair(p.heads, nodes);
  for (; pair.first < count; pair.first += pair.step, pair.at += pair.step, pair.node += nodes) {
    const bool valid = pair.active && pair.at < count;
    Stat<Acc> stat = {};
    Acc mass_plus = 0, all = 0, plus = 0;
    if (valid && pair.part == 0) {  // before the sums, to wait for both at once
      const Acc* softmax = static_cast<const Acc*>(p.softmax) + pair.node * 2 * p.heads + pair.head;
      stat = {static_cast<const Acc*>(p.alpha_dst)[pair.at], softmax[0], softmax[p.heads], 0};
      mass_plus = static_cast<const Acc*>(p.mass_plus)[pair.at];
    }
    if (valid) {
      const int64_t end = (pair.at + 1) * p.channels;
#pragma unroll 1
      for (int64_t c = end - p.channels + Channels::first(pair.part); c < end; c += LANES * VEC) {
        const Channels columns(c, end);
        const auto grad = columns.load(static_cast<const T*>(p.grad) + c);
        Acc y[VEC], y_plus[VEC];
        read_row(columns, p.y, acc_type(p.dtype), c, y);
        read_row(columns, p.y_plus, acc_type(p.dtype), c, y_plus);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
          const Acc g = element(grad, k);
          all += g * y[k];
          plus += g * y_plus[k];
        }
      }
    }
    stat.mean = all = pair.sum(all);
    plus = pair.sum(plus);
    if (pair.part != 0 || !valid) continue;
    static_cast<Stat<Acc>*>(p.stat)[pair.at] = stat;
    static_cast<Acc*>(p.grad_alpha_dst)[pair.at] =
        static_cast<Acc>(1 - p.negative_slope) * (plus - all * mass_plus);
  }
}

// For a source, as GatRow for a destination: weights of (edge, head) pairs, then gradients of (edge,
// channels). T is the type of grad. SCORES: writes grad_alpha_edge, and grad_alpha_loop
// if set; a head has one tile.
template <typename T, typename I, int VEC, int LANES, int HEADS, bool STRIDED, bool SCORES>
struct GatBackwardRow : PairTile<T, I, VEC, LANES, HEADS, STRIDED> {
  using Base = PairTile<T, I, VEC, LANES, HEADS, STRIDED>;
  using Base::csr;
  using Base::dropout;
  using Base::kGroup;
  using Base::kSlots;
  using Base::kSteps;
  using Base::kStepsOfGroup;
  using Base::pair_head;
  using Base::pairs;
  using Base::slope;
  using Base::tile;
  using typename Base::Acc;
  using typename Base::Edge;
  static constexpr int kBlocks = backward_blocks(VEC, LANES, HEADS, SCORES);
  // Pairs whose numbers a thread loads before it waits for them, where it has the registers.
  static constexpr int kAhead = kBlocks > 2 ? 1 : HEADS < 4 ? HEADS : 4;

  // `all` holds weights of negative scores with a minus sign, `plus` omits them. `mean` is the sum of p *
  // leaky'(s) * G: before `reduce` over this thread's pairs, then for the head of its channels.
  struct Part {
    Acc all[VEC];
    Acc plus[VEC];
    Acc mean;
  };
  struct PartAndSource : Part {
    Acc src;
  };
  struct PartAndX : PartAndSource {
    Acc x[VEC];  // of the source
  };
  using Sum = std::conditional_t<SCORES, PartAndX, PartAndSource>;

  const GatBackward& p;
  const Stat<Acc>* stat;  // at pair_head
  Acc* grad_alpha_src;

  // If a head has several tiles, each writes its part of grad_alpha_src to `partial`.
  __device__ GatBackwardRow(const GatBackward& p, uint32_t threshold, acc_t<T> scale, void* partial,
                            int tiles_of_head, int tile_index)
      : Base(p, p.grad, p.alpha_edge, threshold, scale, tile_index),
        p(p),
        stat(static_cast<const Stat<Acc>*>(p.stat) + (pairs ? pair_head : 0)),
        grad_alpha_src(static_cast<Acc*>(tiles_of_head > 1 ? partial : p.grad_alpha_src)) {
    if (tiles_of_head > 1) grad_alpha_src += tile_index % tiles_of_head * p.csr.num_rows * p.heads;
  }

  __device__ Sum empty(int64_t row) const {
    Sum sum;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.all[c] = sum.plus[c] = 0;
    sum.mean = 0;
    sum.src = pairs ? static_cast<const Acc*>(p.alpha_src)[row * p.heads + pair_head] : Acc(0);
    if constexpr (SCORES)
      read_row(tile.columns, p.x, p.dtype, row * p.heads * p.channels + tile.at, sum.x);
    return sum;
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    if (count == 32) add_edges<true>(edge, count, sum);
    else add_edges<false>(edge, count, sum);
  }

  template <bool FULL>
  __device__ void add_edges(const Edge& edge, int count, Sum& sum) const {
    // The gradient of a pair's score is weight * leaky'(s) * <grad, x> - rest.
    Acc weight[HEADS], rest[SCORES ? HEADS : 1], dot = 0;
    const auto weights = [&] {
      weigh<FULL>(edge, count, weight, sum, [&](int g, Acc mean) {
        if constexpr (SCORES) rest[g] = mean;
      });
    };
    const auto add_features = [&](Acc w, const auto& v, bool valid, int step) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        const Acc term = element(v, c);
        sum.all[c] += valid ? w * term : Acc(0);
        sum.plus[c] += valid ? (w > 0 ? w : Acc(0)) * term : Acc(0);
      }
      if constexpr (SCORES) {
        Acc part = 0;
#pragma unroll
        for (int c = 0; c < VEC; ++c) part += element(v, c) * sum.x[c];
        if (!tile.active) part = 0;
#pragma unroll
        for (int offset = 1; offset < kStepsOfGroup; offset <<= 1)
          part += __shfl_xor_sync(kWarpMask, part, offset);
        // A head has as many threads as a group has steps: each keeps one edge.
        if (threadIdx.x % kStepsOfGroup == step % kStepsOfGroup) dot = part;
        constexpr int kWritten = kSteps < kStepsOfGroup ? kSteps : kStepsOfGroup;
        if (step % kWritten == kWritten - 1)
          write_edges<FULL, kWritten>(edge, count, step, dot, weight, rest);
      }
    };
    this->template for_edges<FULL>(edge, count, weight, weights, add_features);
  }

  // The gradients of scores of the last STEPS steps, by the threads that computed the weights.
  template <bool FULL, int STEPS>
  __device__ void write_edges(const Edge& edge, int count, int step, Acc dot,
                              const Acc (&weight)[HEADS], const Acc (&rest)[HEADS]) const {
    const int lane = threadIdx.x & 31, of_group = lane / HEADS, own_step = of_group / kSlots;
    dot = __shfl_sync(kWarpMask, dot,
                      of_group % kSlots * LANES + lane % HEADS * kStepsOfGroup + own_step);
    const int group = step / kStepsOfGroup, e = group * kGroup + of_group;
    const I id = __shfl_sync(kWarpMask, edge.id, e);
    const bool done = own_step / STEPS == step % kStepsOfGroup / STEPS;
    if (!done || !pairs || !(FULL || e < count)) return;
    const Acc w = weight[group];
    __stcs(static_cast<Acc*>(p.grad_alpha_edge) + static_cast<int64_t>(id) * p.heads + pair_head,
           (w > 0 ? w : -slope * w) * dot - rest[group]);
  }

  // Calls note(g, its term of sum.mean) for each pair.
  template <bool FULL, typename Note>
  __device__ void weigh(const Edge& edge, int count, Acc (&weight)[HEADS], Sum& sum,
                        const Note& note) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int first = 0; first < HEADS; first += kAhead) {
      if (!FULL && first * kGroup >= count) break;
      Stat<Acc> of_node[kAhead];
      Acc of_edge[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int e = (first + u) * kGroup + lane / HEADS;
        const int from = FULL || e < count ? e : count - 1;
        const Col node = __shfl_sync(kWarpMask, edge.source, from);
        of_node[u] = stat[static_cast<int64_t>(node) * p.heads];
        if (p.alpha_edge) {
          const I id = __shfl_sync(kWarpMask, edge.id, from);
          of_edge[u] = this->of_pair(p.alpha_edge, id, p.heads);
        }
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int e = (first + u) * kGroup + lane / HEADS;
        const bool valid = pairs && (FULL || e < count);
        Acc s = sum.src + of_node[u].dst;
        if (p.alpha_edge) s += of_edge[u];
        Acc w = valid ? of_node[u].weight(s, slope) : Acc(0);
        const Acc mean = valid ? w * (s > 0 ? of_node[u].mean : slope * of_node[u].mean) : Acc(0);
        sum.mean += mean;
        note(first + u, mean);
        if (dropout.on) {
          const int from = FULL || e < count ? e : count - 1;
          w *= dropout.factor(__shfl_sync(kWarpMask, edge.bits, from), pair_head);
        }
        weight[first + u] = s > 0 ? w : -w;
      }
    }
  }

  __device__ void reduce(Sum& sum) const {
#pragma unroll
    for (int offset = LANES; offset < 32; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        sum.all[c] += __shfl_xor_sync(kWarpMask, sum.all[c], offset);
        sum.plus[c] += __shfl_xor_sync(kWarpMask, sum.plus[c], offset);
      }
    }
#pragma unroll
    for (int offset = HEADS; offset < 32; offset <<= 1)
      sum.mean += __shfl_xor_sync(kWarpMask, sum.mean, offset);
    sum.mean = __shfl_sync(kWarpMask, sum.mean, tile.in_tile);
  }

  __device__ void merge(Part& sum, const Part& other) const {
    sum.mean += other.mean;
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.all[c] += other.all[c];
      sum.plus[c] += other.plus[c];
    }
  }

  // Returns this thread's part of the gradient of the loop's score.
  __device__ Acc add_loop(int64_t row, Sum& sum) const {
    const Stat<Acc> of_node = static_cast<const Stat<Acc>*>(p.stat)[row * p.heads + tile.head];
    Acc s = static_cast<const Acc*>(p.alpha_src)[row * p.heads + tile.head] + of_node.dst;
    if (p.alpha_loop) s += static_cast<const Acc*>(p.alpha_loop)[row * p.heads + tile.head];
    Acc w = of_node.weight(s, slope);
    const Acc mean = w * (s > 0 ? of_node.mean : slope * of_node.mean);
    sum.mean += mean;
    if (dropout.on) w *= dropout.factor(dropout.bits(csr.num_edges + row), tile.head);
    const auto self =
        tile.columns.load(static_cast<const T*>(p.grad) + row * p.heads * p.channels + tile.at);
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      const Acc term = w * element(self, c);
      if (s > 0) sum.plus[c] += term;
      sum.all[c] += s > 0 ? term : -term;
    }
    Acc part = 0;
    if constexpr (SCORES) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) part += element(self, c) * sum.x[c];
      part *= s > 0 ? w : slope * w;
      if (tile.channel == 0) part -= mean;
    }
    return part;
  }

  __device__ void finish(int64_t row, int64_t, Sum& sum) const {
    Acc dot = 0, of_loop = 0;
    if (tile.active) {
      if (row < p.num_loops) of_loop = add_loop(row, sum);
      const int64_t at = row * p.heads * p.channels + tile.at;
      Acc x[VEC];
      if constexpr (!SCORES) read_row(tile.columns, p.x, p.dtype, at, x);
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        if constexpr (SCORES) x[c] = sum.x[c];
        const Acc minus = sum.plus[c] - sum.all[c];
        dot += (sum.plus[c] + slope * minus) * x[c];
        sum.all[c] = sum.plus[c] + minus;
      }
      write_row(tile.columns, p.grad_x, p.dtype, at, sum.all);
    }
    dot = tile.sum_of_head(dot);
    if constexpr (SCORES) of_loop = tile.sum_of_head(of_loop);
    if (!tile.active || threadIdx.x % LANES % tile.kHeadLanes != 0) return;
    if constexpr (SCORES) {
      if (row < p.num_loops && p.grad_alpha_loop)
        static_cast<Acc*>(p.grad_alpha_loop)[row * p.heads + tile.head] = of_loop;
    }
    if (tile.channel == 0) dot -= sum.mean;
    grad_alpha_src[row * p.heads + tile.head] = dot;
  }
};

// out[k] = sum over parts of partial[part, k]
template <typename Acc>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const Acc* partial, Acc* out, int64_t count, int64_t parts) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t k = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; k < count; k += step) {
    Acc sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += partial[part * count + k];
    out[k] = sum;
  }
}

// The row of edge e, from `low` to `high`.
template <typename I>
__device__ inline int64_t row_of(const I* rowptr, int64_t low, int64_t high, int64_t e) {
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (rowptr[middle] <= e) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Gradients of the edge and loop terms of the scores, by themselves: one dot product of channels each. A
// block takes kThreads edges or loops at a time, finds their ends, then LANES threads read VEC channels
// each of an (edge, head).
template <typename T, typename I, int VEC, int LANES, bool STRIDED>
__global__ void __launch_bounds__(kThreads)
    gat_backward_edge_kernel(GatBackward p, uint32_t threshold, acc_t<T> scale) {
  using Acc = acc_t<T>;
  using Channels = Columns<VEC, LANES, STRIDED>;
  constexpr int kPairs = kThreads / LANES;  // of an edge and a head, at a time
  __shared__ Col sources[kThreads], nodes[kThreads];
  __shared__ I ids[kThreads];
  __shared__ int64_t rows[2];
  const auto* rowptr = static_cast<const I*>(p.csr.rowptr);
  const int64_t listed = rowptr[p.csr.num_rows];
  const int64_t first_loop = p.grad_alpha_edge ? listed : 0;
  const int64_t count = first_loop + (p.grad_alpha_loop ? p.num_loops : 0);
  const Dropout<Acc> dropout(p, threshold, scale);
  const Acc slope = static_cast<Acc>(p.negative_slope);
  const int heads = static_cast<int>(p.heads), part = threadIdx.x % LANES;
  const int first_edge = threadIdx.x / LANES / heads, first_head = threadIdx.x / LANES % heads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kThreads; begin < count; begin += step) {
    const int size = count - begin < kThreads ? static_cast<int>(count - begin) : kThreads;
    const int64_t end = begin + size < first_loop ? begin + size : first_loop;
    __syncthreads();
    if (threadIdx.x < 2 && begin < first_loop)
      rows[threadIdx.x] = row_of(rowptr, 0, p.csr.num_rows - 1, threadIdx.x == 0 ? begin : end - 1);
    __syncthreads();
    const int64_t k = begin + threadIdx.x;
    if (k < end) {
      sources[threadIdx.x] = static_cast<Col>(row_of(rowptr, rows[0], rows[1], k));
      nodes[threadIdx.x] = static_cast<const Col*>(p.csr.col)[k];
      ids[threadIdx.x] = p.csr.perm ? static_cast<const I*>(p.csr.perm)[k] : static_cast<I>(k);
    } else if (k < count) {
      sources[threadIdx.x] = nodes[threadIdx.x] = static_cast<Col>(k - first_loop);
    }
    __syncthreads();
    // All threads of a warp continue: they exchange sums.
    const int64_t pairs = static_cast<int64_t>(size) * heads;
    int e = first_edge, head = first_head;
    for (int64_t done = 0; done < pairs; done += kPairs) {
      const bool valid = e < size;
      const int64_t source = valid ? sources[e] : 0, node = valid ? nodes[e] : 0;
      Acc dot = 0;
      if (valid) {
        const int64_t from = (source * heads + head) * p.channels;
        const auto* grad = static_cast<const T*>(p.grad) + (node * heads + head) * p.channels;
        for (int64_t c = Channels::first(part); c < p.channels; c += LANES * VEC) {
          const Channels columns(c, p.channels);
          const auto g = columns.load(grad + c);
          Acc x[VEC];
          read_row(columns, p.x, p.dtype, from + c, x);
#pragma unroll
          for (int v = 0; v < VEC; ++v) dot += element(g, v) * x[v];
        }
      }
#pragma unroll
      for (int offset = 1; offset < LANES; offset <<= 1)
        dot += __shfl_xor_sync(kWarpMask, dot, offset);
      if (valid && part == 0) {
        const bool loop = begin + e >= first_loop;
        const int64_t at = (loop ? node : static_cast<int64_t>(ids[e])) * heads + head;
        const auto* extra = static_cast<const Acc*>(loop ? p.alpha_loop : p.alpha_edge);
        const Stat<Acc> stat = static_cast<const Stat<Acc>*>(p.stat)[node * heads + head];
        Acc s = static_cast<const Acc*>(p.alpha_src)[source * heads + head] + stat.dst;
        if (extra) s += extra[at];
        const int64_t id = loop ? p.csr.num_edges + node : static_cast<int64_t>(ids[e]);
        const Acc factor = dropout.on ? dropout.factor(dropout.bits(id), head) : dropout.scale;
        const Acc ds = stat.weight(s, slope) * (factor * dot - stat.mean);
        static_cast<Acc*>(loop ? p.grad_alpha_loop : p.grad_alpha_edge)[at] =
            s > 0 ? ds : slope * ds;
      }
      head += kPairs % heads;
      e += kPairs / heads + (head >= heads);
      if (head >= heads) head -= heads;
    }
  }
}

DType grad_type(const GatBackward& p) { return out_type(p); }

template <typename T, typename I>
HeadShape shape_of_backward(const GatBackward& p) {
  HeadShape s = head_shape(p, p.csr, grad_type(p), takes_vectors<T>(p, p.grad, p.x, p.grad_x));
  // A tile of four heads uses half of each sector of stat, and its fixed cost matters for short rows.
  // There eight heads form one tile, although less of it stays in L2.
  if (sizeof(T) == 4 && s.vec > 1 && s.lanes == 8 && s.heads == 4 && p.heads > 4 &&
      (p.grad_alpha_edge || p.csr.num_edges <= kShortRows * p.csr.num_rows)) {
    s.lanes = 16;
    s.heads = 8;
    s.tiles = static_cast<int>((p.heads + 7) / 8);
    s.block_rows = kWarps;
    share_rows(s, p.csr);
  }
  return s;
}

// Calls fn(VEC, LANES, HEADS, STRIDED), as dispatch_heads.
template <typename T, typename I, typename Fn>
void dispatch_backward(const HeadShape& s, Fn&& fn) {
  if constexpr (std::is_same_v<T, float> && sizeof(I) == 4) {
    if (is_wide_tile(s.lanes, s.heads)) {
      const auto with = [&](auto strided) {
        using std::integral_constant;
        fn(integral_constant<int, 4>{}, integral_constant<int, 16>{}, integral_constant<int, 8>{},
           strided);
      };
      return s.strided ? with(std::true_type{}) : with(std::false_type{});
    }
  }
  dispatch_heads<T, I>(s, fn);
}

// Calls fn(LANES, STRIDED) for kernels whose LANES threads read kVec<T> channels each of a head. RARE types
// have one kernel.
template <typename T, bool RARE, typename Fn>
void dispatch_channels(int64_t channels, bool vectors, const Fn& fn) {
  if constexpr (RARE) {
    fn(std::integral_constant<int, kNodeLanes>{}, std::true_type{});
  } else {
    dispatch_lanes<kNodeLanes>((channels + kVec<T> - 1) / kVec<T>, [&](auto lanes) {
      if (vectors) fn(lanes, std::false_type{});
      else fn(lanes, std::true_type{});
    });
  }
}

template <typename T>
void run_dst(const GatBackward& p, cudaStream_t stream) {
  const bool vectors = takes_vectors<T>(p, p.grad, p.y, p.y_plus);
  dispatch_channels<T, sizeof(T) == 8>(p.channels, vectors, [&](auto lanes, auto strided) {
    const NodeHeadShape s = node_head_shape(p.csr.num_cols, p.heads, lanes);
    gat_backward_dst_kernel<T, kVec<T>, lanes, strided>
        <<<s.blocks, kThreads, 0, stream>>>(p, s.nodes);
  });
}

template <typename T, typename I>
void run_edges(const GatBackward& p, int64_t count, uint32_t threshold, acc_t<T> scale,
               cudaStream_t stream) {
  const bool vectors = takes_vectors<T>(p, p.grad, p.x);
  dispatch_channels<T, sizeof(T) == 8 || sizeof(I) == 8>(
      p.channels, vectors, [&](auto lanes, auto strided) {
        gat_backward_edge_kernel<T, I, kVec<T>, lanes, strided>
            <<<blocks_for(count), kThreads, 0, stream>>>(p, threshold, scale);
      });
}

// Writes gradients of the scores of edges in the pass over the sources.
bool has_scores(const GatBackward& p, const HeadShape& s) {
  return p.grad_alpha_edge && s.tiles_of_head == 1;
}

// Calls fn(Row, shape, T, I) with the row kernel for `p`.
template <typename Fn>
const char* with_row(const GatBackward& p, const Fn& fn) {
  return dispatch(grad_type(p), p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const HeadShape s = shape_of_backward<T, I>(p);
    dispatch_backward<T, I>(s, [&](auto vec, auto lanes, auto heads, auto strided) {
      if (has_scores(p, s))
        fn(std::common_type<GatBackwardRow<T, I, vec, lanes, heads, strided, true>>{}, s, element,
           index);
      else
        fn(std::common_type<GatBackwardRow<T, I, vec, lanes, heads, strided, false>>{}, s, element,
           index);
    });
    return last_error();
  });
}

// One sum of grad_alpha_src for each tile of a head.
int64_t partial_bytes(const GatBackward& p, const HeadShape& s) {
  return s.tiles_of_head > 1
             ? aligned(s.tiles_of_head * p.csr.num_rows * p.heads * acc_bytes(p.dtype))
             : 0;
}

}  // namespace

int64_t gat_backward_scratch(const GatBackward& p) {
  int64_t bytes = 0;
  with_row(p, [&](auto row, const HeadShape& s, auto, auto) {
    bytes = partial_bytes(p, s) + rows_scratch<typename decltype(row)::type>(p.csr, s);
  });
  return bytes;
}

const char* gat_backward(const GatBackward& p, void* scratch, void* stream_) {
  if (p.heads * p.channels == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const uint32_t threshold = dropout_threshold(p.dropout);
  return with_row(p, [&](auto row, const HeadShape& s, auto element, auto index) {
    using T = decltype(element);
    using I = decltype(index);
    using Acc = acc_t<T>;
    const auto scale = static_cast<Acc>(dropout_scale(p.dropout));
    if (p.csr.num_cols > 0) run_dst<T>(p, stream);
    if (p.csr.num_rows == 0) return;
    void* of_rows = static_cast<char*>(scratch) + partial_bytes(p, s);
    launch_rows<typename decltype(row)::type>(p.csr, s, of_rows, stream, p, threshold, scale,
                                              scratch, s.tiles_of_head);
    if (s.tiles_of_head > 1) {
      const int64_t count = p.csr.num_rows * p.heads;
      sum_parts_kernel<Acc><<<blocks_for(count), kThreads, 0, stream>>>(
          static_cast<const Acc*>(scratch), static_cast<Acc*>(p.grad_alpha_src), count,
          s.tiles_of_head);
    }
    const int64_t edges =
        (p.grad_alpha_edge ? p.csr.num_edges : 0) + (p.grad_alpha_loop ? p.num_loops : 0);
    if (edges > 0 && !has_scores(p, s)) run_edges<T, I>(p, edges, threshold, scale, stream);
  });
}

}  // namespace pyg_fast::cuda
