// Code that the kernels share: vectors of features, dispatch over types, the shape of a launch.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "params/common.h"

namespace pyg_fast::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Maximum rows per block; the warps take rows one by one: no warp waits for another.
constexpr int kMaxBlockRows = 64;

template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
constexpr int kVec = 16 / static_cast<int>(sizeof(T));  // elements of a 16-byte load

// Elements of a thread that loads them one by one: more would take too many registers.
template <typename T>
constexpr int kStridedVec = kVec<T> < 4 ? kVec<T> : 4;

__device__ inline float to_acc(float v) { return v; }
__device__ inline double to_acc(double v) { return v; }
__device__ inline float to_acc(__half v) { return __half2float(v); }
__device__ inline float to_acc(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float to_acc(int8_t v) { return v; }  // quantized features

template <typename T>
__device__ inline T from_acc(acc_t<T> v) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(v);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(v);
  else return v;
}

// VEC elements of a thread: consecutive ones, loaded and stored as one word where VEC > 1; or STRIDED ones,
// each loaded and stored by itself.
template <typename T, int VEC, bool STRIDED = false>
struct alignas(STRIDED ? alignof(T) : sizeof(T) * VEC) Pack {
  T data[VEC];
};

// Element c of a pack, converted for sums. Converting two bfloat16 of a word costs one instruction each.
template <typename T, int VEC, bool STRIDED>
__device__ inline acc_t<T> element(const Pack<T, VEC, STRIDED>& pack, int c) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && VEC > 1 && !STRIDED) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(&pack)[c / 2];
    return __uint_as_float(c % 2 ? word & 0xffff0000u : word << 16);
  } else {
    return to_acc(pack.data[c]);
  }
}

// Kernels read features many times and indices once: L1 and L2 should hold the features.
template <typename T, int VEC>
__device__ inline Pack<T, VEC> load(const T* p) {
  Pack<T, VEC> pack;
  if constexpr (sizeof(T) * VEC == 16) {
    *reinterpret_cast<uint4*>(&pack) = __ldg(reinterpret_cast<const uint4*>(p));
  } else {
    pack = *reinterpret_cast<const Pack<T, VEC>*>(p);
  }
  return pack;
}

template <typename T, int VEC>
__device__ inline void store(T* p, const Pack<T, VEC>& pack) {
  if constexpr (sizeof(T) * VEC == 16) {
    __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<const uint4*>(&pack));
  } else {
    *reinterpret_cast<Pack<T, VEC>*>(p) = pack;
  }
}

// Adds VEC aligned sums, with one 16-byte reduction if the GPU supports it.
template <typename Acc, int VEC>
__device__ inline void add_to(Acc* out, const Acc (&v)[VEC]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (std::is_same_v<Acc, float> && VEC % 4 == 0) {
#pragma unroll
    for (int c = 0; c < VEC; c += 4) {
      atomicAdd(reinterpret_cast<float4*>(out + c),
                make_float4(v[c], v[c + 1], v[c + 2], v[c + 3]));
    }
  } else if constexpr (std::is_same_v<Acc, float> && VEC == 2) {
    atomicAdd(reinterpret_cast<float2*>(out), make_float2(v[0], v[1]));
  } else
#endif
  {
#pragma unroll
    for (int c = 0; c < VEC; ++c) atomicAdd(out + c, v[c]);
  }
}

// The columns of a thread, one of LANES that share VEC * LANES columns of a row: VEC consecutive ones, which
// are one word, or, if STRIDED, every LANES-th from its first on. STRIDED rows may have any width and place:
// the threads load consecutive elements, VEC times.
template <int VEC, int LANES, bool STRIDED>
struct Columns {
  static constexpr int kStep = STRIDED ? LANES : 1;  // from one column of a thread to its next
  int count;  // how many of VEC exist; without STRIDED all or none

  // The first column of a lane, in the first VEC * LANES columns or in those of a tile.
  __device__ static int first(int lane) { return STRIDED ? lane : lane * VEC; }
  __device__ static int64_t first(int64_t tile, int lane) {
    return STRIDED ? tile * (VEC * LANES) + lane : (tile * LANES + lane) * VEC;
  }

  // Those of a thread whose first column is `begin`; they exist before `end`.
  __device__ Columns(int64_t begin, int64_t end) : count(begin < end ? VEC : 0) {
    if constexpr (STRIDED) {
      const int64_t left = end - begin;
      if (left > 0 && left <= (VEC - 1) * LANES)
        count = (static_cast<int>(left) + LANES - 1) / LANES;
    }
  }

  // Whether column c of VEC exists. Without STRIDED only for threads that have columns.
  __device__ bool has(int c) const { return !STRIDED || c < count; }

  // The elements of a row, `p` at the first. If STRIDED, those that do not exist are not read but 0. Load
  // several rows one after the other, with no exchange between threads in between: then each load is one
  // instruction, and none waits for another.
  template <typename T>
  __device__ Pack<T, VEC, STRIDED> load(const T* p) const {
    if constexpr (STRIDED) {
      asm("" : "+l"(p));  // one address for all
      Pack<T, VEC, true> pack;
#pragma unroll
      for (int c = 0; c < VEC; ++c) pack.data[c] = has(c) ? __ldg(p + c * LANES) : T{};
      return pack;
    } else {
      return pyg_fast::cuda::load<T, VEC>(p);
    }
  }

  // The same, converted for sums.
  template <typename T>
  __device__ void read(const T* p, acc_t<T> (&v)[VEC]) const {
    constexpr int kPart = VEC < kVec<T> ? VEC : kVec<T>;
    if constexpr (STRIDED || kPart == VEC) {
      const auto pack = load(p);
#pragma unroll
      for (int c = 0; c < VEC; ++c) v[c] = element(pack, c);
    } else {
#pragma unroll
      for (int c = 0; c < VEC; c += kPart) {
        const auto pack = pyg_fast::cuda::load<T, kPart>(p + c);
#pragma unroll
        for (int k = 0; k < kPart; ++k) v[c + k] = element(pack, k);
      }
    }
  }

  template <typename T>
  __device__ void store(T* p, const Pack<T, VEC, STRIDED>& pack) const {
    if constexpr (STRIDED) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        if (has(c)) p[c * LANES] = pack.data[c];
      }
    } else {
      pyg_fast::cuda::store<T, VEC>(p, pack);
    }
  }

  // The same for sums, converted.
  template <typename T>
  __device__ void write(T* p, const acc_t<T> (&v)[VEC]) const {
    constexpr int kPart = STRIDED || VEC < kVec<T> ? VEC : kVec<T>;
#pragma unroll
    for (int at = 0; at < VEC; at += kPart) {
      Pack<T, kPart, STRIDED> part;
#pragma unroll
      for (int c = 0; c < kPart; ++c) part.data[c] = from_acc<T>(v[at + c]);
      if constexpr (STRIDED) store(p, part);
      else pyg_fast::cuda::store<T, kPart>(p + at, part);
    }
  }

  // Adds sums to memory.
  template <typename Acc>
  __device__ void add_to(Acc* p, const Acc (&v)[VEC]) const {
    if constexpr (STRIDED) {
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        if (has(c)) atomicAdd(p + c * LANES, v[c]);
      }
    } else {
      pyg_fast::cuda::add_to<Acc, VEC>(p, v);
    }
  }
};

template <typename I>
__device__ inline I load_once(const I* p) {
  if constexpr (sizeof(I) == 8) {
    return static_cast<I>(__ldcs(reinterpret_cast<const long long*>(p)));
  } else {
    return __ldcs(p);
  }
}

// The address of row `source` at the column of `base`: one wide multiply-add.
__device__ inline const char* row_at(const char* base, int32_t source, uint32_t row_bytes) {
  return base + static_cast<uint64_t>(static_cast<uint32_t>(source)) * row_bytes;
}
__device__ inline const char* row_at(const char* base, int64_t source, uint32_t row_bytes) {
  return base + static_cast<uint64_t>(source) * row_bytes;
}

constexpr unsigned kWarpMask = 0xffffffffu;

// How a launch covers rows and columns. A warp works on one row; `lanes` of its threads read one edge's
// features, 32 / lanes edges at once. Wide rows are cut into `tiles` of columns; the launch completes
// each tile over the whole graph: a tile of x can stay in L2.
struct Shape {
  int vec = 1;           // elements a thread reads at once
  bool strided = false;  // see Columns
  int lanes = 32;
  int tiles = 1;
  int block_rows = kWarps;

  dim3 grid(int64_t num_rows) const {
    return dim3(static_cast<unsigned>((num_rows + block_rows - 1) / block_rows),
                tiles < 65535 ? tiles : 65535);
  }
};

// Rounds up to the offset of the next array in one piece of scratch memory.
inline int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

inline bool aligned16(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

// Tiles of at most 256 bytes: wider tiles are not faster and fit L2 worse, narrower ones read the indices
// more often.
inline int tiles_of(DType dtype, int64_t dim) {
  const int64_t bytes = dim * (dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2);
  return static_cast<int>((bytes + 255) / 256);
}

// Divides the rows among blocks and warps, once the tiles are known.
inline void share_rows(Shape& s, const Csr& csr) {
  // Many rows per block balance its warps, enough blocks fill the GPU.
  while (s.block_rows < kMaxBlockRows && csr.num_rows * s.tiles / s.block_rows >= 2400)
    s.block_rows *= 2;
}

inline Shape shape_of(const Csr& csr, int64_t dim, int vec) {
  Shape s;
  s.vec = vec;
  const int64_t vectors = (dim + vec - 1) / vec;
  if (vec == 1) s.lanes = vectors == 1 ? 1 : 32;
  else s.lanes = vectors <= 4 ? 4 : vectors <= 8 ? 8 : 16;
  s.tiles = static_cast<int>((vectors + s.lanes - 1) / s.lanes);
  share_rows(s, csr);
  return s;
}

// For rows of type T. Without `vectors` they have another width than a multiple of 16 bytes, or another place.
template <typename T>
Shape shape_of(const Csr& csr, int64_t dim, bool vectors) {
  Shape s = shape_of(csr, dim, vectors ? kVec<T> : dim == 1 ? 1 : kStridedVec<T>);
  s.strided = !vectors && dim > 1;
  return s;
}

// Calls fn(VEC, LANES, STRIDED) with compile-time constants, for the shapes of shape_of<T>.
template <typename T, typename Fn>
void dispatch_shape(const Shape& s, Fn&& fn) {
  using std::integral_constant;
  const auto with = [&](auto vec, auto strided) {
    if (s.lanes == 4) fn(vec, integral_constant<int, 4>{}, strided);
    else if (s.lanes == 8) fn(vec, integral_constant<int, 8>{}, strided);
    else fn(vec, integral_constant<int, 16>{}, strided);
  };
  if (s.lanes == 1) fn(integral_constant<int, 1>{}, integral_constant<int, 1>{}, std::false_type{});
  else if (s.strided) with(integral_constant<int, kStridedVec<T>>{}, std::true_type{});
  else with(integral_constant<int, kVec<T>>{}, std::false_type{});
}

// Bytes of one sum over `dtype`.
inline int64_t acc_bytes(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

// The number of blocks for a grid-stride loop over `threads` threads.
inline unsigned blocks_for(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < (1 << 20) ? blocks : 1 << 20);
}

inline const char* last_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Calls fn(T{}, I{}) with the element and index types.
template <typename Fn>
const char* dispatch(DType dtype, bool index64, Fn&& fn) {
  const auto with_index = [&](auto element) {
    return index64 ? fn(element, int64_t{}) : fn(element, int32_t{});
  };
  switch (dtype) {
    case DType::f32: return with_index(float{});
    case DType::f64: return with_index(double{});
    case DType::f16: return with_index(__half{});
    case DType::bf16: return with_index(__nv_bfloat16{});
  }
  return "unknown dtype";
}

}  // namespace pyg_fast::cuda
