// The only file that uses torch's stable ABI directly: all tensor functions of the bindings.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "cpu/shares.h"
#include "params/runtime.h"

// Exists in libtorch_cuda only: the weak symbol lets this file also load with a CPU torch.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

// An op is a function template of namespace pyg_fast with one argument, `bool kCuda`. It ends with
//   if constexpr (kCuda) { Launch launch(x); launch.check(cuda::op(p, launch.stream()), "op"); }
//   else { share_rows(..., [&](int64_t begin, int64_t end) { cpu::op(p, begin, end); }); }
// These macros register the op under its name: for both devices or for one.
#define PYG_FAST_IMPL(op) PYG_FAST_CPU_IMPL(op) PYG_FAST_CUDA_IMPL(op)
#define PYG_FAST_CPU_IMPL(op) \
  STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CPU, m) { m.impl(#op, TORCH_BOX(&pyg_fast::op<false>)); }
#ifdef PYG_FAST_WITH_CUDA
#define PYG_FAST_CUDA_IMPL(op) \
  STABLE_TORCH_LIBRARY_IMPL(pyg_fast, CUDA, m) { m.impl(#op, TORCH_BOX(&pyg_fast::op<true>)); }
#else
#define PYG_FAST_CUDA_IMPL(op)
#endif

namespace pyg_fast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

inline DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::Double: return DType::f64;
    case ScalarType::Half: return DType::f16;
    case ScalarType::BFloat16: return DType::bf16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, float64, float16 or bfloat16, got ",
                      torch::headeronly::toString(t.scalar_type()));
  }
}

// The type of the sums.
inline ScalarType acc_of(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline bool is_index64(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, name,
                  " must be int32 or int64, got ", torch::headeronly::toString(type));
  return type == ScalarType::Long;
}

inline int64_t bytes_of(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
    case ScalarType::Long: return 8;
    case ScalarType::Float:
    case ScalarType::Int: return 4;
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::UInt16: return 2;
    default: return 1;
  }
}

using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Whether the size is valid, and its bytes. For an invalid size torch reports another error.
inline bool is_size(Sizes size, int64_t element, int64_t& bytes) {
  bytes = element;
  for (const int64_t n : size) {
    if (n < 0 || __builtin_mul_overflow(bytes, n, &bytes)) return false;
  }
  return true;
}

[[noreturn]] inline void out_of_memory(const Tensor& on, int64_t bytes) {
#ifdef PYG_FAST_WITH_CUDA
  // After a kernel crash, every allocation fails too.
  const char* error = on.is_cuda() ? cuda::device_error() : nullptr;
  if (error) throw std::runtime_error(std::string("CUDA error: ") + error);
#endif
  std::string text = "out of memory: " + std::to_string(bytes) + " bytes on ";
  text += on.is_cuda() ? "cuda:" + std::to_string(on.get_device_index()) : std::string("cpu");
  throw std::runtime_error(text);
}

// Allocates all memory that the bindings need from torch: allocate() on the device of `on`, `size`
// elements of `element` bytes. The stable ABI does not pass on torch's own message (forty lines of stack
// frames); Python turns this one into torch.OutOfMemoryError.
template <typename Allocate>
Tensor allocated(const Tensor& on, Sizes size, int64_t element, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception&) {
    int64_t bytes = 0;
    if (!is_size(size, element, bytes)) throw;
    out_of_memory(on, bytes);
  }
}

// torch::stable::contiguous always calls the dispatcher; most tensors are already contiguous.
inline Tensor to_contiguous(const Tensor& t) {
  if (t.is_contiguous()) return t;
  return allocated(t, {t.numel()}, static_cast<int64_t>(t.element_size()),
                   [&] { return torch::stable::contiguous(t); });
}

inline OptTensor to_contiguous(const OptTensor& t) {
  return t ? OptTensor(to_contiguous(*t)) : std::nullopt;
}

inline const void* pointer(const OptTensor& t) { return t ? t->const_data_ptr() : nullptr; }

inline void check_vector(const OptTensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(!t || (t->dim() == 1 && t->size(0) == size), name, " must have shape [", size,
                  "]");
}

inline void check_matrix(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns, name,
                  " must have shape [", rows, ", ", columns, "]");
}

inline void check_type(const OptTensor& t, const char* name, ScalarType type) {
  STD_TORCH_CHECK(!t || t->scalar_type() == type, name, " must be ",
                  torch::headeronly::toString(type));
}

inline void check_device(const OptTensor& t, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(
      !t || (t->is_cuda() == like.is_cuda() && t->get_device_index() == like.get_device_index()),
      name, " is on another device than the graph");
}

// edge_index [2, num_edges] with contiguous rows; copies only if necessary.
inline Tensor with_contiguous_rows(const Tensor& edge_index) {
  STD_TORCH_CHECK(edge_index.dim() == 2 && edge_index.size(0) == 2,
                  "edge_index must have shape [2, num_edges]");
  const bool rows = edge_index.stride(1) == 1 || edge_index.size(1) <= 1;
  return rows ? edge_index : to_contiguous(edge_index);
}

// The graph for kernels. Its tensors must be contiguous and outlive the result.
inline Csr csr_of(const Tensor& rowptr, const Tensor& col, const OptTensor& perm,
                  int64_t num_cols) {
  Csr csr;
  csr.index64 = is_index64(rowptr, "rowptr");
  STD_TORCH_CHECK(rowptr.dim() == 1 && rowptr.size(0) >= 1,
                  "rowptr must have shape [num_rows + 1]");
  STD_TORCH_CHECK(col.dim() == 1, "col must have one dimension");
  check_type(col, "col", ScalarType::Int);
  check_type(perm, "perm", rowptr.scalar_type());
  check_device(rowptr, "rowptr", col);
  check_device(perm, "perm", col);
  csr.num_rows = rowptr.size(0) - 1;
  csr.num_cols = num_cols;
  csr.num_edges = col.size(0);
  check_vector(perm, "perm", csr.num_edges);
  STD_TORCH_CHECK(rowptr.is_contiguous() && col.is_contiguous() && (!perm || perm->is_contiguous()),
                  "rowptr, col and perm must be contiguous");
  csr.rowptr = rowptr.const_data_ptr();
  csr.col = col.const_data_ptr();
  csr.perm = pointer(perm);
  return csr;
}

// One number per edge, of the features' type or (`value_acc`) of the type of their sums.
inline const void* checked_value(const OptTensor& value, const Csr& csr, ScalarType type,
                                 bool& value_acc, const Tensor& on) {
  if (!value) return nullptr;
  STD_TORCH_CHECK(value->dim() == 1, "value must have one dimension, got ", value->dim());
  STD_TORCH_CHECK(value->size(0) >= csr.num_edges, "value must name every edge");
  value_acc = value->scalar_type() == acc_of(type);
  if (!value_acc) check_type(value, "value", type);
  check_device(value, "value", on);
  return pointer(value);
}

inline const void* checked_scale(const OptTensor& scale, const char* name, int64_t size,
                                 ScalarType type, const Tensor& on) {
  check_vector(scale, name, size);
  check_type(scale, name, acc_of(type));
  check_device(scale, name, on);
  return pointer(scale);
}

inline Tensor empty(const Tensor& like, Sizes size, ScalarType type) {
  return allocated(like, size, bytes_of(type),
                   [&] { return torch::stable::new_empty(like, size, type); });
}

// Torch's own sum over the first dimension.
inline Tensor sum_of_rows(const Tensor& x) {
  const int64_t rows = 0;
  return torch::stable::sum(x, Sizes(&rows, 1));
}

inline Tensor zeros(const Tensor& like, Sizes size, ScalarType type) {
  return allocated(like, size, bytes_of(type),
                   [&] { return torch::stable::new_zeros(like, size, type); });
}

inline Tensor zeros(const Tensor& like, Sizes size) {
  return zeros(like, size, like.scalar_type());
}

// All of torch's threads, or one if `work` (about one per nanosecond) is too small to wake them: OpenMP
// always wakes all threads.
inline int64_t paid_threads(int64_t work) {
  const int64_t threads = torch::stable::get_num_threads();
  return work < 18000 + 1000 * threads ? 1 : threads;
}

// Runs fn(k) for k in [0, n) on torch's threads, or on one thread if `work` is too small.
template <typename Fn>
void parallel(int64_t n, int64_t work, const Fn& fn) {
  if (n <= 1 || paid_threads(work) == 1) {
    for (int64_t k = 0; k < n; ++k) fn(k);
    return;
  }
  torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) fn(k);
  });
}

inline int64_t num_threads() { return torch::stable::get_num_threads(); }

// Calls run(begin, end) for equal shares of `rows`, in parallel if `work` is large enough.
template <typename Run>
void share_rows(int64_t rows, int64_t work, const Run& run) {
  const int64_t shares = num_threads();
  parallel(shares, work, [&](int64_t k) { run(rows * k / shares, rows * (k + 1) / shares); });
}

// Calls run(begin, end) for shares of the rows with about equal numbers of edges.
template <typename Run>
void share_edges(const Csr& csr, int64_t work, const Run& run) {
  const int64_t shares = num_threads();
  parallel(shares, work, [&](int64_t k) {
    run(cpu::row_of_share(csr, k, shares), cpu::row_of_share(csr, k + 1, shares));
  });
}

// Shares of some rows or edges whose `count` sums are added up: by their size alone, so that results have
// the same bits for any number of threads (most divide 120).
inline int64_t fixed_shares(int64_t size, int64_t count) {
  constexpr int64_t kMost = 120, kLeastSize = 256, kLeast = 16, kMostNumbers = 1 << 22;
  const int64_t fit = kMostNumbers / (count > 0 ? count : 1);
  const int64_t most = fit > kMost ? kMost : fit > kLeast ? fit : kLeast;
  return size / kLeastSize > most ? most : size > kLeastSize ? size / kLeastSize : 1;
}

// A row of float32 or float64 numbers: each share of the work writes its own copy.
class SumOfShares {
 public:
  SumOfShares(const Tensor& like, int64_t shares, int64_t count)
      : parts_(zeros(like, {shares, count})),
        shares_(shares),
        count_(count),
        wide_(like.scalar_type() == ScalarType::Double) {}

  void* share(int64_t k) {
    return static_cast<char*>(parts_.mutable_data_ptr()) + k * count_ * (wide_ ? 8 : 4);
  }

  void write(void* out) { wide_ ? add<double>(out) : add<float>(out); }

 private:
  template <typename T>
  void add(void* out) {
    const T* part = static_cast<const T*>(share(0));
    for (int64_t c = 0; c < count_; ++c) {
      double sum = part[c];
      for (int64_t k = 1; k < shares_; ++k) sum += part[k * count_ + c];
      static_cast<T*>(out)[c] = static_cast<T>(sum);
    }
  }

  Tensor parts_;
  int64_t shares_, count_;
  bool wide_;
};

// The device, its current stream, and memory from torch's allocator, for one launch.
class Launch {
 public:
  explicit Launch(const Tensor& on) : on_(on), guard_(on.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream_));
  }

  void* stream() const { return stream_; }

  void* scratch(int64_t bytes) {
    if (bytes == 0) return nullptr;
    scratch_ = empty(on_, {bytes}, ScalarType::Byte);
    return scratch_->mutable_data_ptr();
  }

  static void check(const char* error, const char* op) {
    STD_TORCH_CHECK(error == nullptr, "pyg_fast::", op, ": ", error);
  }

 private:
  Tensor on_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
  OptTensor scratch_;
};

}  // namespace pyg_fast
