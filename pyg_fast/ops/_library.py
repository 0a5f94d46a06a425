"""Loads the compiled extension, gives its ops their fake kernels, and its errors their types."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PATH = Path(__file__).parent.parent / '_C.abi3.so'
if not _PATH.exists():
    raise ImportError(
        f"pyg_fast's compiled extension is missing ({_PATH}): build it with 'pip install .', and "
        f"do not import pyg_fast from the root of its source tree without 'pip install -e .'"
    )
torch.ops.load_library(_PATH)


_is_tracing = torch.compiler.is_dynamo_compiling

# As csrc/stable.h has it.
_OUT_OF_MEMORY = re.compile(r'out of memory: (\d+) bytes on (cuda:\d+)')


def _typed(error: RuntimeError, name: str) -> RuntimeError:
    """What a user should see of an op's error: PyTorch's type for memory of a GPU that ran out."""
    found = _OUT_OF_MEMORY.search(str(error))
    if found is None:
        return error
    size, device = int(found[1]), found[2]
    text = (
        f'CUDA out of memory: pyg_fast.{name} tried to allocate {size} bytes '
        f'({size / 2**30:.2f} GiB) on {device}.'
    )
    if torch.cuda.is_available():
        allocated = torch.cuda.memory_allocated(device) / 2**30
        reserved = torch.cuda.memory_reserved(device) / 2**30
        text += f' PyTorch has {allocated:.2f} GiB allocated and {reserved:.2f} GiB reserved there.'
    return torch.OutOfMemoryError(text)


def _guarded(name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
    """`raw` with errors of their types. Compiled code calls `raw` itself."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_tracing():
            return raw(*args, **kwargs)
        try:
            return raw(*args, **kwargs)
        except RuntimeError as error:
            typed = _typed(error, name)
            if typed is error:
                raise
            memory = typed
        # Behind the handler: the frames of C++ are no context of it.
        raise memory

    return call


class _Op:
    """A raw op: `op(...)` and, quicker, `op.default(...)`."""

    def __init__(self, name: str) -> None:
        packet = getattr(torch.ops.pyg_fast, name)
        self.default = _guarded(name, packet.default)
        self.packet = _guarded(name, packet)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.packet(*args, **kwargs)


class _Ops:
    """The raw ops by name. `torch.ops.pyg_fast` has them without the types of errors."""

    def __init__(self) -> None:
        for name in torch._C._dispatch_get_all_op_names():
            library, _, op = name.partition('::')
            if library == 'pyg_fast':
                setattr(self, op, _Op(op))

    def __getattr__(self, name: str) -> _Op:
        raise AttributeError(f'pyg_fast has no op {name!r}')


ops = _Ops()

LOOP_CHUNK = 128  # edges whose self-loops gcn_degree counts together, as csrc/kernels.h has it


def with_cuda() -> bool:
    """Whether the CUDA kernels were compiled in."""
    return ops.with_cuda()


# Meta kernels by `Library.impl`: the first `torch.library.register_fake` of a process costs 50 ms.
_meta = torch.library.Library('pyg_fast', 'IMPL')


def _acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sorted(edge_index: Tensor, num_rows: int, index64: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.int64 if index64 else torch.int32
    return (
        edge_index.new_empty(num_rows + 1, dtype=dtype),
        edge_index.new_empty(edge_index.size(1), dtype=dtype),
        edge_index.new_empty(edge_index.size(1), dtype=dtype),
    )


def _to_csr(
    edge_index: Tensor, num_src: int, num_dst: int, reverse: bool, index64: bool, drop_loops: bool,
    report: bool = True,
) -> tuple[Tensor, ...]:
    csr = _sorted(edge_index, num_src if reverse else num_dst, index64)
    return *csr, edge_index.new_empty(1, dtype=torch.int64)


def _to_csr_csc(
    edge_index: Tensor, num_src: int, num_dst: int, index64: bool, drop_loops: bool,
    report: bool = True,
) -> tuple[Tensor, ...]:
    csr, csc = (_sorted(edge_index, rows, index64) for rows in (num_dst, num_src))
    return *csr, *csc, edge_index.new_empty(1, dtype=torch.int64)


def _rabbit_order(rowptr: Tensor, col: Tensor) -> Tensor:
    return rowptr.new_empty(rowptr.size(0) - 1, dtype=torch.int64)


def _spmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    out_acc: bool,
    self_row: Tensor | None = None,
) -> Tensor:
    dtype = _acc(x.dtype) if out_acc else x.dtype
    return x.new_empty(rowptr.size(0) - 1, x.size(1), dtype=dtype)


def _spmm_groups(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    out_acc: bool,
    self_row: Tensor | None,
    group_ptr: Tensor,
    group_row: Tensor,
    long_row: Tensor,
    long_ptr: Tensor,
    long_shift: Tensor,
    num_partials: int,
    group_size: int,
    atomic: bool,
) -> Tensor:
    dtype = _acc(x.dtype) if out_acc else x.dtype
    return x.new_empty(rowptr.size(0) - 1, x.size(1), dtype=dtype)


def _sampled_spmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    out_acc: bool,
    num_samples: int,
    strategy: int,
    seed: Tensor | None,
) -> Tensor:
    dtype = _acc(x.dtype) if out_acc or x.dtype == torch.int8 else x.dtype
    return x.new_empty(rowptr.size(0) - 1, x.size(1), dtype=dtype)


def _sample_edges(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    sampled_rowptr: Tensor,
    num_slots: int,
    num_samples: int,
    strategy: int,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return col.new_empty(2, num_slots), col.new_empty(num_slots)


def _sample_transposed(
    rowptr: Tensor,
    t_rowptr: Tensor,
    t_col: Tensor,
    position: Tensor,
    num_slots: int,
    num_samples: int,
    strategy: int,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        t_rowptr.new_empty(t_rowptr.shape), t_col.new_empty(num_slots), t_col.new_empty(num_slots)
    )


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(x.size(0), dtype=torch.float32),
    )


def _spmm_max(
    rowptr: Tensor, col: Tensor, perm: Tensor | None, value: Tensor | None, x: Tensor, minimum: bool
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(rowptr.size(0) - 1, x.size(1))
    return out, torch.empty_like(out, dtype=col.dtype)


def _spmm_max_backward_x(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    num_cols: int,
) -> Tensor:
    return grad.new_empty(num_cols, grad.size(1))


def _spmm_max_backward_x_ordered(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    t_rowptr: Tensor,
    t_col: Tensor,
    t_position: Tensor | None,
) -> Tensor:
    return grad.new_empty(t_rowptr.size(0) - 1, grad.size(1))


def _spmm_max_backward_value(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    x: Tensor,
    num_values: int,
) -> Tensor:
    return grad.new_empty(num_values)


def _sddmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    a: Tensor,
    b: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    mean: bool,
    num_values: int,
) -> Tensor:
    return a.new_empty(num_values)


def _expand_rows(x: Tensor, position: Tensor, fill: float) -> Tensor:
    return x.new_empty(position.size(0), x.size(1))


def _count_outside(x: Tensor, position: Tensor, counter: Tensor) -> None:
    return None


def _node_dropout(x: Tensor, nodes: Tensor | None, seed: Tensor, dropout: float) -> Tensor:
    return x.new_empty(x.shape)


def _scatter(
    edge_index: Tensor,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    num_dst: int,
    reverse: bool,
    drop_loops: bool,
    count: bool,
    report: bool = False,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(num_dst, x.size(1)), x.new_empty(int(count), dtype=torch.int64)


def _edge_dot(
    edge_index: Tensor,
    a: Tensor,
    b: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    drop_loops: bool,
) -> Tensor:
    return a.new_empty(edge_index.size(1))


def _gcn_degree(
    edge_index: Tensor,
    edge_weight: Tensor | None,
    num_nodes: int,
    drop_loops: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.int32 if edge_weight is None else _acc(edge_weight.dtype)
    return (
        edge_index.new_empty(num_nodes, dtype=dtype),
        edge_index.new_empty(
            num_nodes if edge_weight is not None and drop_loops else 0, dtype=torch.int64
        ),
        edge_index.new_empty(2, dtype=torch.int64),
        edge_index.new_empty(
            (edge_index.size(1) + LOOP_CHUNK - 1) // LOOP_CHUNK if drop_loops else 0,
            dtype=torch.int64,
        ),
    )


def _gcn_weight(
    edge_index: Tensor,
    edge_weight: Tensor | None,
    degree: Tensor,
    last: Tensor | None,
    before: Tensor | None,
    num_kept: int,
    loops: bool,
    fill_value: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    total = num_kept + degree.size(0) if loops else num_kept
    return (
        edge_index.new_empty(2, total if loops else 0),
        edge_index.new_empty(total, dtype=dtype),
        torch.empty_like(degree, dtype=_acc(dtype)),
    )


def _gcn_weight_backward(
    edge_index: Tensor,
    grad: Tensor,
    scale: Tensor,
    grad_degree: Tensor,
    before: Tensor | None,
    reverse: bool,
) -> Tensor:
    return grad.new_empty(edge_index.size(1))


def _gcn_scale(
    rowptr: Tensor,
    perm: Tensor | None,
    value: Tensor,
    last_loop: Tensor | None,
    fill_value: float,
    loops: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, acc = rowptr.size(0) - 1, _acc(value.dtype)
    return (
        value.new_empty(num_rows, dtype=acc),
        value.new_empty(num_rows if loops else 0, dtype=acc),
    )


def column_dtype(num_columns: int) -> torch.dtype:
    """The narrowest type that CBSR columns are stored in."""
    if num_columns <= 256:
        return torch.uint8
    return torch.uint16 if num_columns <= 65536 else torch.int32


def _maxk(x: Tensor, k: int, balanced: bool) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.size(0), k),
        x.new_empty(x.size(0), k, dtype=column_dtype(x.size(1))),
    )


def _cbsr_to_dense(values: Tensor, columns: Tensor, dim: int) -> Tensor:
    return values.new_empty(values.size(0), dim)


def _cbsr_sample(dense: Tensor, columns: Tensor) -> Tensor:
    return dense.new_empty(columns.size(0), columns.size(1))


def _cbsr_spmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    values: Tensor,
    columns: Tensor,
    dim: int,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    out_acc: bool,
) -> Tensor:
    dtype = _acc(values.dtype) if out_acc else values.dtype
    return values.new_empty(rowptr.size(0) - 1, dim, dtype=dtype)


def _cbsr_spmm_backward(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    grad: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    mean: bool,
) -> Tensor:
    return grad.new_empty(columns.size(0), columns.size(1))


def _cbsr_spmm_backward_ordered(
    t_rowptr: Tensor,
    t_col: Tensor,
    t_perm: Tensor | None,
    value: Tensor | None,
    grad: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
) -> Tensor:
    return grad.new_empty(columns.size(0), columns.size(1))


def _cbsr_sddmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    grad: Tensor,
    values: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    mean: bool,
    num_values: int,
) -> Tensor:
    return grad.new_empty(num_values)


def _head_scores(x: Tensor, att_src: Tensor, att_dst: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, heads = x.size(0), x.size(1)
    return (
        att_src.new_empty(rows, heads),
        att_src.new_empty(0 if att_dst is None else rows, heads),
    )


def _head_scores_backward(
    x: Tensor,
    att_src: Tensor,
    att_dst: Tensor | None,
    grad_alpha_src: Tensor,
    grad_alpha_dst: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), att_src.new_empty(1 if att_dst is None else 2, *att_src.shape)


def _gat(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    num_loops: int,
    negative_slope: float,
    dropout: float,
    training: bool,
    out_acc: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, heads, channels = rowptr.size(0) - 1, x.size(1), x.size(2)
    acc, kept = _acc(x.dtype), rows if training else 0
    return (
        x.new_empty(rows, heads, channels, dtype=acc if out_acc else x.dtype),
        x.new_empty(kept, heads, channels, dtype=acc),
        x.new_empty(kept, heads, channels, dtype=acc),
        x.new_empty(kept, heads, dtype=acc),
        x.new_empty(kept, heads, dtype=acc),
    )


def _gat_backward(
    t_rowptr: Tensor,
    t_col: Tensor,
    t_perm: Tensor | None,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    seed: Tensor | None,
    y: Tensor,
    y_plus: Tensor,
    lse: Tensor,
    mass_plus: Tensor,
    grad: Tensor,
    num_loops: int,
    negative_slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = x.size(1)
    return (
        x.new_empty(x.shape),
        alpha_src.new_empty(x.size(0), heads),
        alpha_src.new_empty(alpha_dst.size(0), heads),
        alpha_src.new_empty(0 if alpha_edge is None else t_col.size(0), heads),
        alpha_src.new_empty(0 if alpha_loop is None else num_loops, heads),
    )


def _gatv2(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    x: Tensor,
    x_dst: Tensor,
    att: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    num_loops: int,
    negative_slope: float,
    dropout: float,
    training: bool,
    out_acc: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, channels = rowptr.size(0) - 1, x.size(1), x.size(2)
    acc, kept = _acc(x.dtype), rows if training else 0
    return (
        x.new_empty(rows, heads, channels, dtype=acc if out_acc else x.dtype),
        x.new_empty(kept, heads, channels, dtype=acc),
        x.new_empty(kept, heads, dtype=acc),
    )


def _gatv2_backward(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    t_rowptr: Tensor,
    t_col: Tensor,
    t_perm: Tensor | None,
    x: Tensor,
    x_dst: Tensor,
    att: Tensor,
    seed: Tensor | None,
    y: Tensor,
    lse: Tensor,
    grad: Tensor,
    num_loops: int,
    negative_slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(x_dst.shape),
        lse.new_empty(x.size(1), x.size(2)),
    )


def _take_sample(
    n_id: Tensor,
    sampled_rowptr: Tensor,
    neighbor: Tensor,
    dst: Tensor,
    e_id: Tensor,
    map: Tensor,
    local: Tensor,
    stamp: int,
    num_nodes: int,
    num_rows: int,
    num_edges: int,
) -> tuple[Tensor, ...]:
    return (
        n_id.new_empty(num_nodes),
        dst.new_empty(num_nodes + 1),
        dst.new_empty(num_edges),
        n_id.new_empty(2, num_edges),
        n_id.new_empty(num_edges),
    )


def _count_induced(rowptr: Tensor, col: Tensor, n_id: Tensor, map: Tensor, stamp: int) -> Tensor:
    return n_id.new_empty(n_id.size(0) + 1)


def _induced_edges(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    n_id: Tensor,
    induced_rowptr: Tensor,
    map: Tensor,
    local: Tensor,
    stamp: int,
    num_edges: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return local.new_empty(num_edges), n_id.new_empty(2, num_edges), n_id.new_empty(num_edges)


def _relabel(ids: Tensor, map: Tensor, stamp: int) -> tuple[Tensor, Tensor, Tensor]:
    return ids.new_empty(ids.size(0)), ids.new_empty(ids.size(0)), ids.new_empty(1)


def _match(
    n_id: Tensor, previous: Tensor, map: Tensor, stamp: int, num_nodes: int
) -> Tensor:
    return torch.empty_like(n_id, memory_format=torch.contiguous_format)


def _match_degree(
    ids: Tensor, ptr: Tensor, map: Tensor, stamp: int, num_nodes: int
) -> Tensor:
    return ids.new_empty(ptr.size(0) - 1, ptr.size(0) - 1)


def _fetch_rows(
    x: Tensor,
    index: Tensor,
    match: Tensor | None,
    previous: Tensor | None,
    cache_position: Tensor | None,
    cache: Tensor | None,
    counter: Tensor | None,
) -> Tensor:
    return index.new_empty(index.size(0), *x.shape[1:], dtype=x.dtype)


def _random_walk(
    rowptr: Tensor, col: Tensor, start: Tensor, walk_length: int, restart: float, seed: int
) -> Tensor:
    return start.new_empty(start.size(0), walk_length + 1)


def _visited_neighbors(
    rowptr: Tensor,
    col: Tensor,
    nodes: Tensor,
    num_neighbors: int,
    num_walks: int,
    walk_length: int,
    restart: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    size = nodes.size(0), num_neighbors
    return nodes.new_empty(size), nodes.new_empty(size)


for _fake in (
    _to_csr,
    _to_csr_csc,
    _rabbit_order,
    _spmm,
    _spmm_groups,
    _sampled_spmm,
    _sample_edges,
    _sample_transposed,
    _quantize_rows,
    _spmm_max,
    _spmm_max_backward_x,
    _spmm_max_backward_x_ordered,
    _spmm_max_backward_value,
    _sddmm,
    _expand_rows,
    _count_outside,
    _node_dropout,
    _scatter,
    _edge_dot,
    _gcn_degree,
    _gcn_weight,
    _gcn_weight_backward,
    _gcn_scale,
    _maxk,
    _cbsr_to_dense,
    _cbsr_sample,
    _cbsr_spmm,
    _cbsr_spmm_backward,
    _cbsr_spmm_backward_ordered,
    _cbsr_sddmm,
    _head_scores,
    _head_scores_backward,
    _gat,
    _gat_backward,
    _gatv2,
    _gatv2_backward,
    _take_sample,
    _count_induced,
    _induced_edges,
    _relabel,
    _match,
    _match_degree,
    _fetch_rows,
    _random_walk,
    _visited_neighbors,
):
    _meta.impl(_fake.__name__[1:], _fake, 'Meta')


def _changes_its_arguments(*args: object) -> None:
    """The fake kernel of ops that return nothing."""


for _name in ('begin_sample', 'sample_counts', 'sample_neighbors', 'append_nodes'):
    _meta.impl(_name, _changes_its_arguments, 'Meta')
