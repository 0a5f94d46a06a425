#include "bindings/groups.h"
#include "params/groups.h"

namespace pyg_fast {
namespace {

template <typename P>
void fill(P& p, const Tensor& rowptr, int64_t size) {
  p.index64 = is_index64(rowptr, "rowptr");
  STD_TORCH_CHECK(rowptr.dim() == 1 && rowptr.size(0) >= 1,
                  "rowptr must have shape [num_rows + 1]");
  STD_TORCH_CHECK(size >= 1, "size must be positive, got ", size);
  p.num_rows = rowptr.size(0) - 1;
  p.size = size;
  p.rowptr = rowptr.const_data_ptr();
}

template <bool kCuda>
Tensor count_groups(const Tensor& rowptr_, int64_t size) {
  const Tensor rowptr = to_contiguous(rowptr_);
  CountGroups p;
  fill(p, rowptr, size);
  Tensor out = empty(rowptr, {2, p.num_rows + 1}, ScalarType::Long);
  p.first = static_cast<int64_t*>(out.mutable_data_ptr());
  p.longs = p.first + p.num_rows + 1;
  if constexpr (kCuda) {
    Launch launch(rowptr);
    void* scratch = launch.scratch(cuda::count_groups_scratch(p));
    launch.check(cuda::count_groups(p, scratch, launch.stream()), "count_groups");
  } else {
    cpu::count_groups(p);
  }
  return out;
}

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_edges(const Tensor& rowptr_,
                                                               const Tensor& count_, int64_t size,
                                                               int64_t num_groups,
                                                               int64_t num_long) {
  const Tensor rowptr = to_contiguous(rowptr_), count = to_contiguous(count_);
  GroupEdges p;
  fill(p, rowptr, size);
  check_matrix(count, "count", 2, p.num_rows + 1);
  check_type(count, "count", ScalarType::Long);
  check_device(count, "count", rowptr);
  STD_TORCH_CHECK(num_groups >= p.num_rows && num_long >= 0 && num_long <= p.num_rows &&
                      (p.num_rows > 0 || num_groups == 0),
                  "num_groups and num_long do not fit rowptr: got ", num_groups, " and ", num_long,
                  " of ", p.num_rows, " rows");
  p.first = static_cast<const int64_t*>(count.const_data_ptr());
  p.longs = p.first + p.num_rows + 1;
  p.num_groups = num_groups;
  p.num_long = num_long;
  const auto vector = [&](int64_t entries, void*& pointer) {
    Tensor out = empty(rowptr, {entries}, rowptr.scalar_type());
    pointer = out.mutable_data_ptr();
    return out;
  };
  Tensor ptr = vector(num_groups + 1, p.ptr), row = vector(num_groups, p.row);
  Tensor long_row = vector(num_long, p.long_row), long_ptr = vector(num_long + 1, p.long_ptr);
  Tensor long_shift = vector(num_long, p.long_shift);
  if constexpr (kCuda) {
    Launch launch(rowptr);
    launch.check(cuda::group_edges(p, launch.stream()), "group_edges");
  } else {
    share_rows(p.num_rows, num_groups,
               [&](int64_t begin, int64_t end) { cpu::group_edges(p, begin, end); });
  }
  return {ptr, row, long_row, long_ptr, long_shift};
}

template <bool kCuda>
Tensor order_groups(const Tensor& ptr, const Tensor& row, const Tensor& long_ptr,
                    const Tensor& long_shift, int64_t size) {
  OrderGroups p;
  p.index64 = is_index64(row, "row");
  p.num_groups = row.numel();
  p.num_long = long_shift.numel();
  STD_TORCH_CHECK(size >= 1, "size must be positive, got ", size);
  p.size = size;
  p.ptr = entries_of(ptr, "ptr", p.num_groups + 1, row);
  p.row = entries_of(row, "row", p.num_groups, row);
  p.long_ptr = entries_of(long_ptr, "long_ptr", p.num_long + 1, row);
  p.long_shift = entries_of(long_shift, "long_shift", p.num_long, row);
  Tensor order = empty(row, {p.num_groups}, row.scalar_type());
  p.order = order.mutable_data_ptr();
  if constexpr (kCuda) {
    Launch launch(row);
    void* scratch = launch.scratch(cuda::order_groups_scratch(p));
    launch.check(cuda::order_groups(p, scratch, launch.stream()), "order_groups");
  } else {
    cpu::order_groups(p);
  }
  return order;
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Cuts each row into groups. count_groups: the numbers of groups and of long rows before each row;
  // group_edges: ptr, row, long_row, long_ptr, long_shift; order_groups: in which order to process them.
  m.def("count_groups(Tensor rowptr, int size) -> Tensor");
  m.def(
      "group_edges(Tensor rowptr, Tensor count, int size, int num_groups, int num_long) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "order_groups(Tensor ptr, Tensor row, Tensor long_ptr, Tensor long_shift, int size) -> Tensor");
}

PYG_FAST_IMPL(count_groups)
PYG_FAST_IMPL(group_edges)
PYG_FAST_IMPL(order_groups)
