#include "bindings/minibatch.h"
#include "params/relabel.h"

namespace pyg_fast {
namespace {

template <bool kCuda>
std::tuple<Tensor, Tensor, Tensor> relabel(const Tensor& ids_, const Tensor& map, int64_t stamp) {
  STD_TORCH_CHECK(ids_.dim() == 1, "ids must have one dimension, got ", ids_.dim());
  const Tensor ids = to_contiguous(ids_);
  Relabel p;
  p.map = node_map_of(map, stamp, ids);
  p.num_ids = ids.size(0);
  p.ids = int64s(ids, "ids", ids);
  Tensor unique = empty(ids, {p.num_ids}, ScalarType::Long);
  Tensor place = empty(ids, {p.num_ids}, ScalarType::Long);
  Tensor rank = empty(ids, {p.num_ids}, ScalarType::Int);
  Tensor count = empty(ids, {1}, ScalarType::Long);
  p.unique = static_cast<int64_t*>(unique.mutable_data_ptr());
  p.place = static_cast<int64_t*>(place.mutable_data_ptr());
  p.rank = static_cast<int32_t*>(rank.mutable_data_ptr());
  p.count = static_cast<int64_t*>(count.mutable_data_ptr());
  if constexpr (kCuda) {
    Launch launch(ids);
    void* scratch = launch.scratch(cuda::relabel_scratch(p));
    launch.check(cuda::relabel(p, scratch, launch.stream()), "relabel");
  } else {
    cpu::start(p.map);
    share(0, p.num_ids, [&](int64_t begin, int64_t end) { cpu::insert_ids(p, begin, end); });
    *p.count = number_found(
        0, p.num_ids, 0,
        [&](int64_t begin, int64_t end) { return cpu::count_first(p, begin, end); },
        [&](int64_t begin, int64_t end, int64_t next) {
          return cpu::rank_first(p, begin, end, next);
        });
    share(0, p.num_ids, [&](int64_t begin, int64_t end) { cpu::places(p, begin, end); });
  }
  return {unique, place, count};
}

}  // namespace
}  // namespace pyg_fast

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_fast, m) {
  // Distinct ids in order of first occurrence (padded), the place of each id, their number.
  m.def("relabel(Tensor ids, Tensor(a!) map, int stamp) -> (Tensor, Tensor, Tensor)");
}

PYG_FAST_IMPL(relabel)
