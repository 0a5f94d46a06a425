// GATv2: the scores apply the leaky ReLU to all channels. Each pass over the edges recomputes them from
// the features at both ends; no kernel stores per-edge data.
#pragma once
#include "attention.cuh"

namespace pyg_fast::cuda {

// Code that the three passes share. T is the type of the features; WIDE heads have more channels than a
// tile.
template <typename T, typename I, int VEC, int LANES, int HEADS, bool STRIDED, bool WIDE>
struct ScoredTile : HeadTile<VEC, LANES, HEADS, STRIDED> {
  using Acc = acc_t<T>;
  using Base = HeadTile<VEC, LANES, HEADS, STRIDED>;
  using typename Base::Channels;
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
    for (int c = 0; c < VEC; ++c) {
      const bool exists = this->active && this->columns.has(c);
      att[c] = exists ? to_acc(att_of_head[this->channel + c * Channels::kStep]) : Acc(0);
    }
  }

  __device__ int64_t row_of(int64_t node) const { return node * node_size + this->at; }

  __device__ void load_row(const void* x, int64_t node, Acc (&v)[VEC]) const {
    this->columns.read(static_cast<const T*>(x) + row_of(node), v);
  }

  __device__ void load_grad(const void* grad, bool grad_acc, int64_t node, Acc (&v)[VEC]) const {
    // A branch that is not needed would make the loads wait for each other.
    if constexpr (!std::is_same_v<T, Acc>) {
      if (grad_acc) return this->columns.read(static_cast<const Acc*>(grad) + row_of(node), v);
    }
    load_row(grad, node, v);
  }

  // This thread's part of the logit. All tiles of a wide head call it: the logit is the same in all.
  __device__ static Acc part_of_score(const Acc (&att)[VEC], const Acc (&src)[VEC],
                                      const Acc (&dst)[VEC], Acc slope) {
    Acc sum = 0;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum += att[c] * leaky(src[c] + dst[c], slope);
    return sum;
  }

  __device__ static Acc part_of_dot(const Acc (&grad)[VEC], const Acc (&src)[VEC]) {
    Acc sum = 0;
#pragma unroll
    for (int c = 0; c < VEC; ++c) sum += grad[c] * src[c];
    return sum;
  }

  __device__ Acc score(const Acc (&src)[VEC], const Acc (&dst)[VEC]) const {
    const Acc sum = part_of_score(att, src, dst, slope);
    return this->active ? sum : Acc(0);  // inactive threads read another head, which may hold NaN
  }

  // The sum of part_of(first channel, channels) over this thread's channels in all tiles of a wide head;
  // `own` is that of this tile. The tiles add in the same order.
  template <typename Part>
  __device__ Acc over_tiles(Acc own, const Part& part_of) const {
    Acc sum = 0;
#pragma unroll 1
    for (int64_t base = Channels::first(threadIdx.x % LANES); base < channels; base += LANES * VEC)
      sum += base == this->channel ? own : part_of(base, Channels(base, channels));
    return sum;
  }

  // This thread's part of the logit from all channels of a wide head.
  __device__ Acc wide_score(Acc own, const void* src, int64_t source, const void* dst,
                            int64_t node) const {
    const int64_t first = static_cast<int64_t>(this->first_head) * channels;
    const T* from = static_cast<const T*>(src) + source * node_size + first;
    const T* to = static_cast<const T*>(dst) + node * node_size + first;
    return over_tiles(own, [&](int64_t base, const Channels& others) {
      Acc a[VEC], s[VEC], d[VEC];
      others.read(from + base, s);
      others.read(to + base, d);
      others.read(att_of_head + base, a);
      return part_of_score(a, s, d, slope);
    });
  }

  __device__ Acc wide_dot(Acc own, const void* grad, bool grad_acc, int64_t node, const void* src,
                          int64_t source) const {
    const int64_t first = static_cast<int64_t>(this->first_head) * channels;
    const T* from = static_cast<const T*>(src) + source * node_size + first;
    const int64_t at = node * node_size + first;
    return over_tiles(own, [&](int64_t base, const Channels& others) {
      Acc g[VEC], s[VEC];
      others.read(from + base, s);
      if (grad_acc) others.read(static_cast<const Acc*>(grad) + at + base, g);
      else others.read(static_cast<const T*>(grad) + at + base, g);
      return part_of_dot(g, s);
    });
  }

  // The sum over the threads of a head; all threads of a warp must call it.
  __device__ Acc over_head(Acc v) const {
#pragma unroll
    for (int offset = 1; offset < Base::kHeadLanes; offset <<= 1)
      v += __shfl_xor_sync(kWarpMask, v, offset);
    return v;
  }
};

// Calls fn(VEC, LANES, HEADS, STRIDED, WIDE).
template <typename T, typename I, typename Fn>
void dispatch_scored(const Attention& p, const HeadShape& s, const Fn& fn) {
  dispatch_heads<T, I>(s, [&](auto vec, auto lanes, auto heads, auto strided) {
    if constexpr (heads == 1 && (vec == 1 || lanes == (sizeof(T) == 4 ? 16 : 8))) {
      if (p.channels > vec * lanes) return fn(vec, lanes, heads, strided, std::true_type{});
    }
    fn(vec, lanes, heads, strided, std::false_type{});
  });
}

}  // namespace pyg_fast::cuda
