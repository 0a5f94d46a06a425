// How a warp reads CBSR entries, and the order in which the top-k kernel stores them for it.
//
// A warp reads a row's k entries in blocks of up to 8 * kMostSteps. kEntryLanes threads read a block,
// each `steps` consecutive entries at once: a warp reads kEntrySlots edges. In one step, the threads of
// an edge use the columns of entries `steps` apart: these columns should differ modulo 8, to be in
// different shared memory banks.
#pragma once
#include "common.cuh"

namespace pyg_fast::cuda {

constexpr int kEntryLanes = 8;
constexpr int kEntrySlots = 32 / kEntryLanes;

template <typename T>
constexpr int kMostSteps = sizeof(T) == 8 ? 2 : 4;

inline int steps_of(int64_t entries, int most) {
  int steps = 1;
  while (steps < most && kEntryLanes * steps < entries) steps *= 2;
  return steps;
}

// The position of an entry in its row. One step reads the entries of rank 0 to 7, another those of rank 8
// to 15, ... in a block.
template <int MOST>
struct Storage {
  unsigned tail, steps, lanes, reciprocal;  // last block: first entry, steps, threads

  explicit Storage(int64_t k) {
    const int64_t left = (k - 1) % (kEntryLanes * MOST) + 1;
    tail = static_cast<unsigned>(k - left);
    steps = steps_of(left, MOST);
    if (left % steps != 0) steps = 1;  // reads one entry at a time, in order
    lanes = static_cast<unsigned>(left) / steps;
    reciprocal = 65536 / lanes + 1;
  }

  __device__ unsigned at(unsigned rank) const {
    constexpr unsigned kBlock = kEntryLanes * MOST;
    const bool last = rank >= tail;
    const unsigned in_block = rank % kBlock;  // the tail starts a new block, too
    const unsigned step = in_block * (last ? reciprocal : 65536 / kEntryLanes + 1) >> 16;
    return rank - in_block +
           (in_block - step * (last ? lanes : kEntryLanes)) * (last ? steps : MOST) + step;
  }
};

// STEPS entries of a thread: one load if PACKED; otherwise kEntryLanes apart.
template <typename E, int STEPS, bool PACKED>
__device__ inline Pack<E, STEPS> load_entries(const E* row, int lane, int entries) {
  Pack<E, STEPS> pack;
  if constexpr (PACKED) {
    pack = load<E, STEPS>(row + lane * STEPS);
  } else {
#pragma unroll
    for (int t = 0; t < STEPS; ++t) {
      const int at = t * kEntryLanes + lane;
      pack.data[t] = row[at < entries ? at : 0];
    }
  }
  return pack;
}

// Whether step t of a thread has an entry.
template <int STEPS, bool PACKED>
__device__ inline bool has_entry(int t, int lane, int entries) {
  return (PACKED ? lane * STEPS : t * kEntryLanes + lane) < entries;
}

template <int STEPS>
bool packs(int64_t k, const void* columns, const void* values) {
  return k % STEPS == 0 && aligned16(columns) && aligned16(values);
}

// Calls fn(C{}) with the storage type of the columns.
template <typename Fn>
const char* dispatch_columns(ColumnType type, Fn&& fn) {
  switch (type) {
    case ColumnType::u8: return fn(uint8_t{});
    case ColumnType::u16: return fn(uint16_t{});
    case ColumnType::i32: return fn(int32_t{});
  }
  return "unknown column type";
}

// Calls fn(T{}, C{}).
template <typename Fn>
const char* dispatch_entries(DType dtype, ColumnType column_type, Fn&& fn) {
  return dispatch(dtype, false, [&](auto element, auto) {
    return dispatch_columns(column_type, [&](auto column) { return fn(element, column); });
  });
}

template <int N>
using Int = std::integral_constant<int, N>;

// Calls fn(STEPS, PACKED) with compile-time integers. Odd numbers of entries share one kernel.
template <int MOST, typename C, typename I, typename Fn>
void dispatch_steps(int64_t k, int64_t entries, const void* columns, const void* values, Fn&& fn) {
  if constexpr (sizeof(C) <= 2 && sizeof(I) == 4) {
    const int steps = steps_of(entries, MOST);
    if constexpr (MOST >= 4) {
      if (steps == 4 && packs<4>(k, columns, values)) return fn(Int<4>{}, std::true_type{});
    }
    if (steps == 2 && packs<2>(k, columns, values)) return fn(Int<2>{}, std::true_type{});
    if (steps == 1) return fn(Int<1>{}, std::true_type{});
  }
  fn(Int<MOST>{}, std::false_type{});
}

// The kernel must request dynamic shared memory above 48 KiB.
template <typename Kernel>
const char* allow_shared(Kernel* kernel, int bytes) {
  if (bytes <= 32 * 1024) return nullptr;  // the kernel's static memory counts too
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline int multiple_of_32(int64_t n) { return static_cast<int>((n + 31) / 32 * 32); }

}  // namespace pyg_fast::cuda
