// Code that the attention kernels share: the mapping of threads to heads and channels, and dropout.
#pragma once
#include "params/attention.h"
#include "params/dropout.h"
#include "rows.cuh"

namespace pyg_fast::cuda {

// Rounds the product separately before any subtraction: equal logits stay equal.
__device__ inline float leaky(float s, float slope) { return s > 0 ? s : __fmul_rn(s, slope); }
__device__ inline double leaky(double s, double slope) { return s > 0 ? s : __dmul_rn(s, slope); }

__device__ inline float exponential(float v) { return __expf(v); }
__device__ inline double exponential(double v) { return exp(v); }

__device__ inline float negative_infinity(float) { return -__int_as_float(0x7f800000); }
__device__ inline double negative_infinity(double) {
  return -__longlong_as_double(0x7ff0000000000000LL);
}

// The start of running maxima. It is finite: a logit of minus infinity (a row can begin with many) is
// infinitely far below it and has weight 0. No finite logit is smaller.
__device__ inline float lowest(float) { return -__int_as_float(0x7f7fffff); }
__device__ inline double lowest(double) { return -__longlong_as_double(0x7fefffffffffffffLL); }

// The factor for sums of weights. If a row has edges but all weights are 0, the result is NaN, as in a
// softmax.
template <typename Acc>
__device__ inline Acc inverse_mass(Acc mass, bool has_edges) {
  return has_edges ? 1 / mass : Acc(0);
}

// Writes a row's part of `softmax`, see Attention.
template <typename Acc>
__device__ inline void write_softmax(void* softmax, int64_t row, int64_t heads, int head, Acc max,
                                     Acc inverse, bool has_edges) {
  Acc* to = static_cast<Acc*>(softmax) + row * 2 * heads + head;
  to[0] = has_edges ? max : Acc(0);
  to[heads] = inverse;
}

// Reads a thread's columns from `at` on with streaming loads: no other thread reads or writes them soon, and
// L2 should hold the gathered features. Tests the type only once.
template <int VEC, int LANES, bool STRIDED, typename Acc>
__device__ inline void read_row(const Columns<VEC, LANES, STRIDED>& columns, const void* p,
                                DType type, int64_t at, Acc (&v)[VEC]) {
  const auto as = [&](auto element_type) {
    using T = decltype(element_type);
    const T* from = static_cast<const T*>(p) + at;
    Pack<T, VEC, STRIDED> pack;
    if constexpr (STRIDED) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) pack.data[c] = columns.has(c) ? __ldcs(from + c * LANES) : T{};
    } else if constexpr (sizeof(pack) == 16) {
      *reinterpret_cast<uint4*>(&pack) = __ldcs(reinterpret_cast<const uint4*>(from));
    } else {
      pack = *reinterpret_cast<const Pack<T, VEC>*>(from);
    }
#pragma unroll
    for (int c = 0; c < VEC; ++c) v[c] = static_cast<Acc>(to_acc(pack.data[c]));
  };
  if constexpr (std::is_same_v<Acc, double>) return as(double{});
  else if (type == DType::f16) as(__half{});
  else if (type == DType::bf16) as(__nv_bfloat16{});
  else as(float{});
}

template <int VEC, int LANES, bool STRIDED, typename Acc>
__device__ inline void write_row(const Columns<VEC, LANES, STRIDED>& columns, void* p, DType type,
                                 int64_t at, const Acc (&v)[VEC]) {
  const auto as = [&](auto element_type) {
    using T = decltype(element_type);
    Pack<T, VEC, STRIDED> pack;
#pragma unroll
    for (int c = 0; c < VEC; ++c) pack.data[c] = from_acc<T>(v[c]);
    columns.store(static_cast<T*>(p) + at, pack);
  };
  if constexpr (std::is_same_v<Acc, double>) return as(double{});
  else if (type == DType::f16) as(__half{});
  else if (type == DType::bf16) as(__nv_bfloat16{});
  else as(float{});
}

inline __host__ __device__ DType acc_type(DType type) {
  return type == DType::f64 ? DType::f64 : DType::f32;
}

inline __host__ __device__ DType out_type(const Attention& p) {
  return p.out_acc ? acc_type(p.dtype) : p.dtype;
}

template <typename Acc>
struct Dropout {
  uint64_t seed = 0;
  uint32_t threshold = 0;
  Acc scale = 1;
  bool on = false;

  __device__ Dropout(const Attention& p, uint32_t threshold, Acc scale)
      : threshold(threshold), scale(scale), on(p.dropout > 0) {
    if (on) seed = static_cast<uint64_t>(*p.seed);
  }

  __device__ uint32_t bits(int64_t id) const { return edge_bits(seed, static_cast<uint64_t>(id)); }
  // The dropout factor for an edge with these bits.
  __device__ Acc factor(uint32_t bits, int head) const {
    return !on || keeps(bits, static_cast<uint32_t>(head), threshold) ? scale : Acc(0);
  }
};

// A thread's edge of the 32 that its warp reads at once.
template <typename I>
struct AttentionEdge {
  Col source = 0;
  I id = 0;
  uint32_t bits = 0;

  template <typename Row>
  __device__ void load(const Row& row, I e, I end) {
    if (e >= end) return;
    source = load_once(static_cast<const Col*>(row.csr.col) + e);
    if (row.names_edges) {
      id = row.csr.perm ? load_once(static_cast<const I*>(row.csr.perm) + e) : e;
      if (row.dropout.on) bits = row.dropout.bits(id);
    }
  }
};

// A warp reads the channels of 32 / LANES edges at once. The LANES threads of an edge are divided among
// the HEADS heads of a tile, LANES / HEADS each; a head too wide for LANES threads has several tiles.
template <int VEC, int LANES, int HEADS, bool STRIDED>
struct HeadTile {
  static constexpr int kHeadLanes = LANES / HEADS;
  using Channels = Columns<VEC, kHeadLanes, STRIDED>;
  int first_head;
  int in_tile;  // this thread's head within the tile
  int head;
  int64_t channel;  // this thread's first channel
  int64_t at;       // its index among all channels of a node; valid for idle threads too
  bool active;
  Channels columns{0, 0};  // this thread's channels

  __device__ HeadTile(const Attention& p, int tile) {
    const int lane = threadIdx.x % LANES;
    constexpr int kChannels = LANES * VEC;
    const int tiles = HEADS > 1 ? 1 : static_cast<int>((p.channels + kChannels - 1) / kChannels);
    first_head = tile / tiles * HEADS;
    in_tile = lane / kHeadLanes;
    head = first_head + in_tile;
    channel = Channels::first(tile % tiles, lane % kHeadLanes);  // several tiles only if HEADS is 1
    active = head < p.heads && channel < p.channels;
    if (active) columns = Channels(channel, p.channels);
    at = active ? head * p.channels + channel : first_head * p.channels;
  }

  // The sum over the threads of a head. All LANES threads must call it and get the sum.
  template <typename Acc>
  __device__ Acc sum_of_head(Acc v) const {
    constexpr unsigned kMask = LANES == 32 ? kWarpMask : (1u << LANES) - 1;
#pragma unroll
    for (int offset = 1; offset < kHeadLanes; offset <<= 1) v += __shfl_xor_sync(kMask, v, offset);
    return v;
  }
};

// Blocks per SM: eight channels per thread, or channels of other tiles, need more registers.
constexpr int attention_blocks(int vec, bool wide = false) { return vec > 4 || wide ? 2 : 3; }

struct HeadShape : Shape {
  int heads = 1;          // heads per tile
  int tiles_of_head = 1;  // more than 1 only if a tile has one head
};

// The threads per edge with 16-byte vectors: 128 bytes of fp16 or bf16, up to 256 of floats, but at most
// four heads (with four channels: eight), whose weights a thread keeps in registers. Strided channels have
// the threads of the next multiple of a vector. int64 graphs and doubles are rare and use scalars.
inline HeadShape head_shape(const Attention& p, const Csr& csr, DType gathered, bool vectors) {
  HeadShape s;
  const bool half = gathered == DType::f16 || gathered == DType::bf16;
  s.vec = gathered == DType::f64 || csr.index64 ? 1 : half ? 8 : 4;
  s.strided = s.vec > 1 && !vectors;
  const int64_t head_lanes = (p.channels + s.vec - 1) / s.vec;
  s.lanes = s.vec == 1 ? 32 : half || head_lanes <= 2 || p.heads * head_lanes <= 8 ? 8 : 16;
  int lanes = 1;
  while (lanes < s.lanes && lanes < head_lanes) lanes *= 2;
  s.heads = s.lanes / lanes;
  if (s.vec == 1) s.heads = s.heads >= 4 && !csr.index64 ? 4 : 1;
  const int channels = s.lanes * s.vec;
  s.tiles_of_head = s.heads > 1 ? 1 : static_cast<int>((p.channels + channels - 1) / channels);
  s.tiles = static_cast<int>((p.heads + s.heads - 1) / s.heads) * s.tiles_of_head;
  share_rows(s, csr);
  return s;
}

// 16-byte vectors must not cross a head. The sums of eight fp16 or bf16 take 32 bytes.
template <typename T, typename... Pointers>
bool takes_vectors(const Attention& p, Pointers... features) {
  return p.channels % kVec<T> == 0 && (((reinterpret_cast<uintptr_t>(features) & 31) == 0) && ...);
}

// Calls fn(VEC, LANES, HEADS, STRIDED) with compile-time constants, for the shapes of head_shape.
template <typename T, typename I, typename Fn>
void dispatch_heads(const HeadShape& s, Fn&& fn) {
  using std::integral_constant;
  constexpr integral_constant<int, 1> one;
  if constexpr (sizeof(T) <= 4 && sizeof(I) == 4) {
    constexpr integral_constant<int, kVec<T>> vec;
    const auto with = [&](auto lanes, auto heads) {
      if (s.strided) fn(vec, lanes, heads, std::true_type{});
      else fn(vec, lanes, heads, std::false_type{});
    };
    const auto with_heads = [&](auto lanes) {
      if (s.heads == 1) return with(lanes, one);
      if (s.heads == 2) return with(lanes, integral_constant<int, 2>{});
      if constexpr (lanes == 8) {  // 16 lanes are for heads of more than two threads
        if (s.heads == 8) return with(lanes, integral_constant<int, 8>{});
      }
      with(lanes, integral_constant<int, 4>{});
    };
    if constexpr (sizeof(T) == 4) {
      if (s.lanes == 16) return with_heads(integral_constant<int, 16>{});
    }
    with_heads(integral_constant<int, 8>{});
  } else {
    constexpr integral_constant<int, 32> lanes;
    if constexpr (sizeof(I) == 4) {
      if (s.heads == 4) return fn(one, lanes, integral_constant<int, 4>{}, std::false_type{});
    }
    fn(one, lanes, one, std::false_type{});
  }
}

}  // namespace pyg_fast::cuda
