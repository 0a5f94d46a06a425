// Graph attention: scores, softmax, dropout and aggregation in one pass over the edges.
#include "gat.cuh"

namespace pyg_fast::cuda {
namespace {

// Threads that represent (edge, head) pairs compute the weights of 32 edges, 32 / HEADS edges at once.
// Threads that represent (edge, channels) then use these weights.
//
// The softmax subtracts a running maximum. It changes only if a logit exceeds it by kSlack: exponentials
// stay far from overflow, and rescaling is rare.
//
// EDGES: the scores may have terms of edges.
template <typename T, typename I, int VEC, int LANES, int HEADS, bool STRIDED, bool TRAINING,
          bool EDGES>
struct GatRow : PairTile<T, I, VEC, LANES, HEADS, STRIDED> {
  using Base = PairTile<T, I, VEC, LANES, HEADS, STRIDED>;
  using Base::csr;
  using Base::dropout;
  using Base::kGroup;
  using Base::pair_head;
  using Base::pairs;
  using Base::slope;
  using Base::tile;
  using typename Base::Acc;
  using typename Base::Edge;
  static constexpr int kBlocks = attention_blocks(VEC);
  static constexpr float kSlack = 16;

  // Before `reduce`, max, mass and mass_plus belong to the head of an (edge, head) pair, afterwards to
  // this thread's channels. In training, `out` holds weights of negative scores with a minus sign, and
  // `plus` omits them: 2 * plus - out is the sum of all.
  struct Part {
    Acc out[VEC];
    Acc plus[TRAINING ? VEC : 1];
    Acc max, mass, mass_plus;
  };
  struct Sum : Part {
    Acc dst;
  };

  const Gat& p;
  const Acc* alpha_src;  // at pair_head

  __device__ GatRow(const Gat& p, uint32_t threshold, acc_t<T> scale, int tile_index)
      : Base(p, p.x, p.alpha_edge, threshold, scale, tile_index),
        p(p),
        alpha_src(static_cast<const Acc*>(p.alpha_src) + (pairs ? pair_head : 0)) {}

  __device__ Sum empty(int64_t row) const {
    Sum sum;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.out[c] = 0;
#pragma unroll
    for (int c = 0; c < (TRAINING ? VEC : 1); ++c) sum.plus[c] = 0;
    sum.max = lowest(Acc{});
    sum.mass = sum.mass_plus = 0;
    sum.dst = pairs ? static_cast<const Acc*>(p.alpha_dst)[row * p.heads + pair_head] : Acc(0);
    return sum;
  }

  __device__ void add(const Edge& edge, I, int count, Sum& sum) const {
    if (count == 32) add_edges<true>(edge, count, sum);
    else add_edges<false>(edge, count, sum);
  }

  template <bool FULL>
  __device__ void add_edges(const Edge& edge, int count, Sum& sum) const {
    Acc weight[HEADS];
    const auto weights = [&] { weigh<FULL>(edge, count, weight, sum); };
    const auto add_features = [&](Acc w, const auto& v, bool valid, int) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        const Acc term = element(v, c);
        sum.out[c] += valid ? w * term : Acc(0);
        if (TRAINING) sum.plus[c] += valid ? (w > 0 ? w : Acc(0)) * term : Acc(0);
      }
    };
    this->template for_edges<FULL>(edge, count, weight, weights, add_features);
  }

  template <bool FULL>
  __device__ void weigh(const Edge& edge, int count, Acc (&weight)[HEADS], Sum& sum) const {
    const int lane = threadIdx.x & 31;
    const int groups = FULL ? HEADS : (count + kGroup - 1) / kGroup;
    uint32_t positive = 0;
    bool above = false;
    Acc score[HEADS];
#pragma unroll
    for (int g = 0; g < HEADS; ++g) {
      if (!FULL && g >= groups) break;
      const int e = g * kGroup + lane / HEADS;
      const Col source = __shfl_sync(kWarpMask, edge.source, FULL || e < count ? e : count - 1);
      score[g] = alpha_src[static_cast<int64_t>(source) * p.heads];
    }
    const bool edges = EDGES && p.alpha_edge;
    if (edges) {  // (src + dst) + edge, as in the backward
      Acc of_edge[HEADS];
#pragma unroll
      for (int g = 0; g < HEADS; ++g) {  // all loads before the first is waited for
        if (!FULL && g >= groups) break;
        const int e = g * kGroup + lane / HEADS;
        const I id = __shfl_sync(kWarpMask, edge.id, FULL || e < count ? e : count - 1);
        of_edge[g] = this->of_pair(p.alpha_edge, id, p.heads);
      }
#pragma unroll
      for (int g = 0; g < HEADS; ++g) {
        if (!FULL && g >= groups) break;
        score[g] = score[g] + sum.dst + of_edge[g];
      }
    }
    const Acc dst = edges ? Acc(0) : sum.dst;
#pragma unroll
    for (int g = 0; g < HEADS; ++g) {
      weight[g] = negative_infinity(Acc{});
      if (!FULL && g >= groups) continue;
      const Acc s = score[g] + dst;
      positive |= static_cast<uint32_t>(s > 0) << g;
      const bool valid = pairs && (FULL || g * kGroup + lane / HEADS < count);
      if (valid) weight[g] = leaky(s, slope);
      above |= weight[g] > sum.max + Acc(kSlack);
    }
    if (__any_sync(kWarpMask, above)) raise(weight, sum);
#pragma unroll
    for (int g = 0; g < HEADS; ++g) {
      if (!FULL && g >= groups) break;
      Acc w = exponential(weight[g] - sum.max);
      const bool plus = positive >> g & 1;
      sum.mass += w;
      if (TRAINING) sum.mass_plus += plus ? w : Acc(0);
      if (dropout.on) {
        const uint32_t bits = __shfl_sync(kWarpMask, edge.bits, g * kGroup + lane / HEADS);
        w *= dropout.factor(bits, pair_head);
      }
      weight[g] = TRAINING && !plus ? -w : w;
    }
  }

  __device__ void raise(const Acc (&logit)[HEADS], Sum& sum) const {
    Acc top = logit[0];
#pragma unroll
    for (int g = 1; g < HEADS; ++g) top = logit[g] > top ? logit[g] : top;
#pragma unroll
    for (int offset = HEADS; offset < 32; offset <<= 1) {
      const Acc other = __shfl_xor_sync(kWarpMask, top, offset);
      top = other > top ? other : top;
    }
    top = sum.max > top ? sum.max : top;
    const Acc factor = sum.max == top ? Acc(1) : exponential(sum.max - top);
    sum.max = top;
    sum.mass *= factor;
    sum.mass_plus *= factor;
    scale_features(sum, __shfl_sync(kWarpMask, factor, tile.in_tile));
  }

  __device__ void scale_features(Part& sum, Acc factor) const {
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.out[c] *= factor;
      if (TRAINING) sum.plus[c] *= factor;
    }
  }

  __device__ void reduce(Sum& sum) const {
#pragma unroll
    for (int offset = LANES; offset < 32; offset <<= 1) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        sum.out[c] += __shfl_xor_sync(kWarpMask, sum.out[c], offset);
        if (TRAINING) sum.plus[c] += __shfl_xor_sync(kWarpMask, sum.plus[c], offset);
      }
    }
#pragma unroll
    for (int offset = HEADS; offset < 32; offset <<= 1) {
      sum.mass += __shfl_xor_sync(kWarpMask, sum.mass, offset);
      if (TRAINING) sum.mass_plus += __shfl_xor_sync(kWarpMask, sum.mass_plus, offset);
    }
    sum.max = __shfl_sync(kWarpMask, sum.max, tile.in_tile);
    sum.mass = __shfl_sync(kWarpMask, sum.mass, tile.in_tile);
    if (TRAINING) sum.mass_plus = __shfl_sync(kWarpMask, sum.mass_plus, tile.in_tile);
  }

  // Changes `sum` to the larger of both maxima; returns the factor that rescales the other sum.
  __device__ Acc rebase(Part& sum, Acc other_max) const {
    const Acc top = sum.max > other_max ? sum.max : other_max;
    const Acc factor = sum.max == top ? Acc(1) : exponential(sum.max - top);
    sum.max = top;
    sum.mass *= factor;
    sum.mass_plus *= factor;
    scale_features(sum, factor);
    return other_max == top ? Acc(1) : exponential(other_max - top);
  }

  __device__ void merge(Part& sum, const Part& other) const {
    const Acc factor = rebase(sum, other.max);
    sum.mass += factor * other.mass;
    sum.mass_plus += factor * other.mass_plus;
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      sum.out[c] += factor * other.out[c];
      if (TRAINING) sum.plus[c] += factor * other.plus[c];
    }
  }

  __device__ void add_loop(int64_t row, Sum& sum) const {
    const int64_t at = row * p.heads + tile.head;
    Acc s = static_cast<const Acc*>(p.alpha_src)[at] + static_cast<const Acc*>(p.alpha_dst)[at];
    if (p.alpha_loop) s += static_cast<const Acc*>(p.alpha_loop)[at];
    const Acc logit = leaky(s, slope);
    rebase(sum, logit);
    Acc w = exponential(logit - sum.max);  // NaN for infinite logits, as for an edge
    sum.mass += w;
    if (s > 0) sum.mass_plus += w;
    if (dropout.on) w *= dropout.factor(dropout.bits(csr.num_edges + row), tile.head);
    const auto self =
        tile.columns.load(static_cast<const T*>(p.x) + row * p.heads * p.channels + tile.at);
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      const Acc term = w * element(self, c);
      if (TRAINING && s > 0) sum.plus[c] += term;
      sum.out[c] += TRAINING && !(s > 0) ? -term : term;
    }
  }

  __device__ void finish(int64_t row, int64_t degree, Sum& sum) const {
    if (!tile.active) return;
    const bool loop = row < p.num_loops, has_edges = degree > 0 || loop;
    if (loop) add_loop(row, sum);
    const Acc inverse = inverse_mass(sum.mass, has_edges);
    const int64_t at = row * p.heads * p.channels + tile.at;
    const DType type = out_type(p);
    Acc bias[VEC];
    if (p.bias) read_row(tile.columns, p.bias, type, tile.at, bias);
#pragma unroll
    for (int c = 0; c < VEC; ++c) {
      const Acc plus = TRAINING ? sum.plus[c] * inverse : Acc(0);
      sum.out[c] = TRAINING ? 2 * plus - sum.out[c] * inverse : sum.out[c] * inverse;
      if (TRAINING) sum.plus[c] = plus;
    }
    if constexpr (TRAINING) {
      write_row(tile.columns, p.y, acc_type(p.dtype), at, sum.out);
      write_row(tile.columns, p.y_plus, acc_type(p.dtype), at, sum.plus);
    }
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum.out[c] += p.bias ? bias[c] : Acc(0);
    write_row(tile.columns, p.out, type, at, sum.out);
    if (TRAINING && tile.channel == 0) {
      const int64_t of_head = row * p.heads + tile.head;
      write_softmax(p.softmax, row, p.heads, tile.head, sum.max, inverse, has_edges);
      static_cast<Acc*>(p.mass_plus)[of_head] = sum.mass_plus * inverse;
    }
  }
};

// Calls fn(Row, shape, dropout scale) with the row kernel for `p`.
template <typename Fn>
const char* with_row(const Gat& p, const Fn& fn) {
  return dispatch(p.dtype, p.csr.index64, [&](auto element, auto index) -> const char* {
    using T = decltype(element);
    using I = decltype(index);
    const HeadShape s = head_shape(p, p.csr, p.dtype, takes_vectors<T>(p, p.x, p.bias, p.out));
    const auto scale = static_cast<acc_t<T>>(dropout_scale(p.dropout));
    dispatch_heads<T, I>(s, [&](auto vec, auto lanes, auto heads, auto strided) {
      const auto with = [&](auto edges) {
        if (p.y)
          fn(std::common_type<GatRow<T, I, vec, lanes, heads, strided, true, edges>>{}, s, scale);
        else
          fn(std::common_type<GatRow<T, I, vec, lanes, heads, strided, false, edges>>{}, s, scale);
      };
      // Without the code for edges, kernels of several heads are faster, but others slower; strided channels of
      // fp16 and bf16 have only these others, for a shorter build.
      if constexpr (vec > 1 && heads >= 4 && !(strided && sizeof(T) == 2)) {
        if (!p.alpha_edge) return with(std::false_type{});
      }
      with(std::true_type{});
    });
    return last_error();
  });
}

}  // namespace

int64_t gat_scratch(const Gat& p) {
  int64_t bytes = 0;
  with_row(p, [&](auto row, const Shape& s, auto) {
    bytes = rows_scratch<typename decltype(row)::type>(p.csr, s);
  });
  return bytes;
}

const char* gat(const Gat& p, void* scratch, void* stream_) {
  if (p.csr.num_rows == 0 || p.heads * p.channels == 0) return nullptr;
  const auto stream = static_cast<cudaStream_t>(stream_);
  const uint32_t threshold = dropout_threshold(p.dropout);
  return with_row(p, [&](auto row, const Shape& s, auto scale) {
    launch_rows<typename decltype(row)::type>(p.csr, s, scratch, stream, p, threshold, scale);
  });
}

}  // namespace pyg_fast::cuda
