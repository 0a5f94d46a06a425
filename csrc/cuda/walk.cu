// Random walks: one thread per walk.
#include "params/walk.h"

#include "common.cuh"

namespace pyg_fast::cuda {
namespace {

template <typename I>
__global__ void __launch_bounds__(kThreads) random_walk_kernel(RandomWalk p) {
  const int64_t step_of_grid = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < p.num_walks;
       i += step_of_grid) {
    const int64_t start = p.start[i];
    int64_t* out = p.out + i * (p.length + 1);
    int64_t node = out[0] = start;
    for (int64_t step = 0; step < p.length; ++step) {
      const int64_t next = next_node<I>(p, start, node, i, step);
      if (next >= 0) node = next;
      out[step + 1] = node;
    }
  }
}

// Visited nodes, hashed in shared memory. All counts are integers: their sums do not depend on the order
// of additions.
struct Visits {
  unsigned long long* node;  // [slots]; all ones if empty
  unsigned* count;           // [slots]
  unsigned* first;           // [slots]: time of the first visit

  static constexpr int kBytes = 16;  // bytes per slot
  static constexpr unsigned long long kNone = ~0ull;

  __device__ void clear(int slot) const {
    node[slot] = kNone;
    count[slot] = 0;
    first[slot] = ~0u;
  }

  __device__ void add(int64_t id, unsigned when, int slots) const {
    const auto wanted = static_cast<unsigned long long>(id);
    int slot = static_cast<int>(mixed64(wanted) & (slots - 1));
    for (;;) {
      const unsigned long long held = atomicCAS(node + slot, kNone, wanted);
      if (held == kNone || held == wanted) break;
      slot = (slot + 1) & (slots - 1);
    }
    atomicAdd(count + slot, 1u);
    atomicMin(first + slot, when);
  }

  // The score grows with the number of visits; for ties, with an earlier first visit. Scores of different
  // nodes differ; 0: never visited.
  __device__ unsigned long long score(int slot) const {
    return count[slot] == 0 ? 0 : static_cast<unsigned long long>(count[slot]) << 32 | ~first[slot];
  }
};

// `lanes` threads of a warp process a node with its `slots` slots; both are powers of two.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    pinsage_neighbors_kernel(PinsageNeighbors p, int lanes, int slots) {
  extern __shared__ unsigned long long memory[];
  const int groups = blockDim.x / lanes, group = threadIdx.x / lanes;
  const int lane = threadIdx.x & (lanes - 1), lane_of_warp = threadIdx.x % 32;
  const unsigned mask =
      lanes == 32 ? kWarpMask : ((1u << lanes) - 1) << (lane_of_warp / lanes * lanes);
  auto* counts = reinterpret_cast<unsigned*>(memory + groups * slots);
  const Visits visits{memory + group * slots, counts + group * slots,
                      counts + (groups + group) * slots};
  const int64_t step_of_grid = static_cast<int64_t>(gridDim.x) * groups;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * groups + group; i < p.num_nodes;
       i += step_of_grid) {
    const int64_t start = p.nodes[i];
    for (int s = lane; s < slots; s += lanes) visits.clear(s);
    __syncwarp(mask);
    for (int64_t walk = lane; walk < p.num_walks; walk += lanes) {
      int64_t node = start;
      for (int64_t step = 0; step < p.length; ++step) {
        const int64_t when = walk * p.length + step;
        const int64_t next = next_node<I>(p, start, node, start, when);
        if (next < 0) continue;
        node = next;
        if (node != start) visits.add(node, static_cast<unsigned>(when), slots);
      }
    }
    __syncwarp(mask);
    for (int64_t k = 0; k < p.num_neighbors; ++k) {
      unsigned long long best = 0;
      int slot = 0;
      for (int s = lane; s < slots; s += lanes) {
        const unsigned long long score = visits.score(s);
        if (score > best) {
          best = score;
          slot = s;
        }
      }
      unsigned long long best_of_all = best;
      for (int distance = lanes / 2; distance > 0; distance /= 2) {
        const unsigned long long other = __shfl_xor_sync(mask, best_of_all, distance);
        best_of_all = other > best_of_all ? other : best_of_all;
      }
      const int64_t at = i * p.num_neighbors + k;
      if (best_of_all == 0) {
        if (lane == 0) {
          p.neighbor[at] = -1;
          p.visits[at] = 0;
        }
      } else if (best == best_of_all) {
        p.neighbor[at] = static_cast<int64_t>(visits.node[slot]);
        p.visits[at] = visits.count[slot];
        visits.count[slot] = 0;  // Only this lane reads it.
      }
    }
    __syncwarp(mask);
  }
}

template <typename I>
void visit(const PinsageNeighbors& p, cudaStream_t stream) {
  constexpr int kSharedBytes = 48 * 1024;
  int lanes = 1, slots = 16;
  while (lanes < 32 && lanes < p.num_walks) lanes *= 2;
  while (slots < 2 * p.num_walks * p.length) slots *= 2;
  const int bytes = slots * Visits::kBytes, most = kThreads / lanes;
  const int groups = kSharedBytes / bytes < most ? kSharedBytes / bytes : most;
  const int64_t wanted = (p.num_nodes + groups - 1) / groups;
  const auto blocks = static_cast<unsigned>(wanted < (1 << 20) ? wanted : 1 << 20);
  pinsage_neighbors_kernel<I><<<blocks, groups * lanes, groups * bytes, stream>>>(p, lanes, slots);
}

}  // namespace

const char* random_walk(const RandomWalk& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.num_walks == 0) return nullptr;
  const unsigned blocks = blocks_for(p.num_walks);
  if (p.graph.index64) random_walk_kernel<int64_t><<<blocks, kThreads, 0, stream>>>(p);
  else random_walk_kernel<int32_t><<<blocks, kThreads, 0, stream>>>(p);
  return last_error();
}

const char* pinsage_neighbors(const PinsageNeighbors& p, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  if (p.num_nodes == 0 || p.num_neighbors == 0) return nullptr;
  p.graph.index64 ? visit<int64_t>(p, stream) : visit<int32_t>(p, stream);
  return last_error();
}

}  // namespace pyg_fast::cuda
