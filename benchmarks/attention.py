"""Attention of a graph transformer with projected edge features: beside PyG and anemoi-models.

python -m benchmarks attention                       everything below but the mesh at random
python -m benchmarks attention --quick               a minute or less
python -m benchmarks attention --cases mesh          only some, of
    mesh             a mesh whose nodes have 8 neighbours with near numbers
    mesh at random   the same, nodes numbered at random
    graph            the graphs of --graphs
    grid to mesh     40 sources of a finer grid for each node of the mesh
    mesh to grid     3 nodes of the mesh for each point of the grid
python -m benchmarks attention --dtypes bfloat16     in place of the types of each case
python -m benchmarks attention --modes step          forward and backward only
python -m benchmarks attention --scale 0.5           half the nodes of the meshes and grids
python -m benchmarks attention --eager-only          without torch.compile, which takes long

q is [num_dst, H, C], k and v are [num_src, H, C], e is [num_edges, H, C]: a destination's output is
the sum of its edges' v_j + e, weighted by the softmax of q_i . (k_j + e) / sqrt(C). A step is
forward and backward, with the gradients of all four. The kernels of anemoi-models (weather models
of ECMWF) run where that package can be imported.
"""
import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.typing import OptTensor
from torch_geometric.utils import softmax

import pyg_fast
from pyg_fast.graph import prepare_edge_index

from . import _graphs, _harness
from ._harness import DTYPES, Bench, Contender, Option, Result
from .layers import (
    COMPILED,
    OURS,
    OURS_CAPTURED,
    PLAIN,
    PREPARED,
    PYG,
    captured,
    compiled,
    step_error,
    steps,
    warm,
)
from .roofline import BUFFERS, Ceilings, distinct, measure_streams, size
from .spmm import FORWARD, STEP

ANEMOI, ANEMOI_CAPTURED = 'anemoi-models', 'anemoi-models, CUDA graph'
GRAPHS = {'quick': ('small',), 'cuda': ('arxiv-like',), 'cpu': ('Computers',)}
SCALE = {'quick': 0.003, 'cuda': 1.0, 'cpu': 0.1}
MESH, GRID = 41_000, 542_000  # nodes
# Where the neighbours of a node are on the other plane: rows and columns away.
AROUND = tuple(step for step in itertools.product((-1, 0, 1), repeat=2) if any(step))
WINDOW = tuple(itertools.product(range(-2, 3), range(-4, 4)))
TRIANGLE = ((0, 0), (0, 1), (1, 0))
INDEX = 4  # bytes, of the graph's int32
# Allowed errors, in those of float32: roundings of these types are so much larger, about.
_COARSER = {torch.float32: 1, torch.float16: 20, torch.bfloat16: 160}
_TOLERANCE = 3e-4  # of a gradient's norm, in float32
_BLOCK = 1 << 25  # numbers of a matrix of messages in float64, at once
_PYG_MATRICES, _PYG_BYTES = 8, 1 << 33  # with a row for each edge; of all of them, on a CPU
Inputs = tuple[Tensor, ...]


class Attention(pyg.MessagePassing):
    """The message of TransformerConv without its linear maps."""

    def __init__(self) -> None:
        super().__init__(aggr='add', node_dim=0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, e: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, q=q, k=k, v=v, e=e)

    def message(
        self, q_i: Tensor, k_j: Tensor, v_j: Tensor, e: Tensor, index: Tensor,
        ptr: OptTensor, size_i: Optional[int],  # noqa: UP045 (PyG reads no other form)
    ) -> Tensor:
        alpha = (q_i * (k_j + e)).sum(-1) / math.sqrt(q_i.size(-1))
        alpha = softmax(alpha, index, ptr, size_i)
        return (v_j + e) * alpha.unsqueeze(-1)


# Graphs -----------------------------------------------------------------------------------------

class Edges:
    """A graph from sources to destinations, which may be others; sorted by destination."""

    def __init__(self, name: str, edge_index: Tensor, num_src: int, num_dst: int) -> None:
        self.name, self.num_src, self.num_dst = name, num_src, num_dst
        self.prepared, perm = prepare_edge_index(edge_index, (num_src, num_dst))
        self.edge_index = edge_index[:, perm]  # All contenders take the edges in this order.

    @functools.cached_property
    def colptr(self) -> Tensor:
        degree = self.edge_index[1].bincount(minlength=self.num_dst)
        return torch.cat([degree.new_zeros(1), degree.cumsum(0)])

    @functools.cached_property
    def of_anemoi(self) -> tuple[Inputs, Inputs]:
        """The arguments ``csc`` and ``reverse`` of anemoi's kernels, as its ``edge_index_to_csc``
        makes them: edges by destination, and the positions of a source's edges among them."""
        row, col = (end.contiguous() for end in self.edge_index)
        degree = row.bincount(minlength=self.num_src)
        rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        return (row, self.colptr), (rowptr, row.argsort(stable=True), col)

    def summary(self) -> dict[str, int]:
        return {
            'nodes': self.num_dst, 'edges': self.edge_index.size(1),
            'largest_degree': int(self.colptr.diff().max()), 'sources': self.num_src}


def plane(num_nodes: float) -> tuple[int, int]:
    """Rows and columns of about so many nodes."""
    rows = max(3, round(math.sqrt(num_nodes)))
    return rows, max(3, round(num_nodes / rows))


def between(
    name: str, sources: tuple[int, int], destinations: tuple[int, int],
    away: Sequence[tuple[int, int]], device: torch.device,
) -> Edges:
    """Edges between the nodes of two planes, numbered row by row, from the sources beside the
    place of each destination; what leaves the plane comes in on its other side."""
    (rows, cols), (height, width) = sources, destinations
    dst = torch.arange(height * width, device=device)
    at = dst // width * rows // height, dst % width * cols // width
    src = torch.stack([(at[0] + y) % rows * cols + (at[1] + x) % cols for y, x in away], 1)
    edge_index = torch.stack([src.view(-1), dst.repeat_interleave(len(away))])
    return Edges(name, edge_index, rows * cols, height * width)


def mesh(name: str, scale: float, device: torch.device) -> Edges:
    nodes = plane(MESH * scale)
    return between(name, nodes, nodes, AROUND, device)


def mesh_at_random(name: str, scale: float, device: torch.device) -> Edges:
    found = mesh(name, scale, device)
    new = torch.randperm(found.num_dst, generator=torch.Generator().manual_seed(0)).to(device)
    return Edges(name, new[found.edge_index], found.num_src, found.num_dst)


def grid_to_mesh(name: str, scale: float, device: torch.device) -> Edges:
    return between(name, plane(GRID * scale), plane(MESH * scale), WINDOW, device)


def mesh_to_grid(name: str, scale: float, device: torch.device) -> Edges:
    return between(name, plane(MESH * scale), plane(GRID * scale), TRIANGLE, device)


class Kind(NamedTuple):
    """What to measure: the graph, made of its name and the scale (``None``: those of
    ``--graphs``), numbers of heads and their channels, and types."""

    make: Callable[[str, float, torch.device], Edges] | None
    dtypes: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...] = ((16, 64),)


KINDS = {
    'mesh': Kind(mesh, ('float32', 'bfloat16', 'float16')),
    'mesh at random': Kind(mesh_at_random, ('float32', 'bfloat16', 'float16')),
    'graph': Kind(None, ('float32', 'float16'), ((8, 8), (4, 64))),
    'grid to mesh': Kind(grid_to_mesh, ('float32', 'bfloat16')),
    'mesh to grid': Kind(mesh_to_grid, ('float32', 'bfloat16')),
}


def edges_of(bench: Bench, name: str) -> Iterator[Edges]:
    """The graphs of a case, which the record then lists."""
    kind = KINDS[name]
    if kind.make is not None:
        found = kind.make(name, bench.args.scale, bench.device)
        bench.report.graphs[name] = found.summary()
        yield found
        return
    for graph in bench.graphs():
        graph = graph.without_loops()
        yield Edges(graph.name, graph.edge_index, graph.num_nodes, graph.num_nodes)


# Contenders -------------------------------------------------------------------------------------

def anemoi(bench: Bench) -> Callable[..., Tensor] | None:
    """The function of anemoi-models; ``None`` if the record tells why it does not run."""
    reason = 'its kernels are for GPUs'
    if bench.cuda:
        try:
            kernels = importlib.import_module('anemoi.models.triton.gt')
        except (ImportError, ValueError) as error:  # ValueError: without Triton.
            reason = f'it cannot be imported: {error}'
        else:
            bench.note(f'{ANEMOI}: version {_harness.version(ANEMOI) or "unknown"}.')
            made: Callable[..., Tensor] = kernels.graph_transformer_attention_conv
            return made
    bench.report.left_out[ANEMOI] = reason
    return None


class Case:
    """A graph, heads and a type: the inputs, and steps of all contenders."""

    def __init__(self, edges: Edges, heads: int, channels: int, dtype: torch.dtype) -> None:
        self.edges, self.dtype = edges, dtype
        normal = _graphs.normal(edges.edge_index.device)

        def draw(rows: int) -> Tensor:
            return normal(rows, heads, channels).to(dtype)

        rows = edges.num_dst, edges.num_src, edges.num_src, edges.edge_index.size(1)
        self.leaves = [draw(count).requires_grad_() for count in rows]  # q, k, v, e
        self.grad = draw(edges.num_dst)

    def step(
        self, name: str, mode: str, rival: Callable[..., Tensor] | None = None,
    ) -> Callable[[], Inputs]:
        """A step, which returns the output and the gradients of all inputs."""
        plain = name in (PLAIN, PYG, COMPILED)
        graph: Any = (self.edges.edge_index if plain else self.edges.prepared,)
        layer: Any = Attention()
        if name in OURS:
            layer = pyg_fast.accelerate(layer)
        run: Any = compiled(name, layer)
        if rival is not None:
            run, graph = rival, self.edges.of_anemoi
        step = warm(steps(run, [(*self.leaves, *graph)], self.leaves, self.grad, mode))
        if reason := getattr(layer, '_last_run', ''):
            raise RuntimeError(f"PyG's code ran: {reason}")
        return captured(step) if name in (OURS_CAPTURED, ANEMOI_CAPTURED) else step

    @functools.cached_property
    def expected(self) -> Inputs:
        """By PyG's code in float64, for the edges of some destinations at a time, whose sources
        are copies. It is kept in float32, whose rounding is far below the allowed errors."""
        (q, k, v, e), grad, ptr = (x.detach() for x in self.leaves), self.grad, self.edges.colptr
        layer, some = Attention(), max(1, _BLOCK // q[0].numel())
        ends = torch.searchsorted(ptr, torch.arange(0, e.size(0), some, device=ptr.device))
        bounds = sorted({0, *ends.tolist(), self.edges.num_dst})
        found = [torch.zeros_like(x, dtype=torch.float) for x in (q, q, e)]
        of_sources = [torch.zeros_like(x, dtype=torch.double) for x in (k, v)]
        for start, end in itertools.pairwise(bounds):
            nodes, taken = slice(start, end), slice(int(ptr[start]), int(ptr[end]))
            src, dst = self.edges.edge_index[:, taken]
            leaves = [x.double().requires_grad_() for x in (q[nodes], k[src], v[src], e[taken])]
            copies = torch.stack([torch.arange(src.numel(), device=src.device), dst - start])
            out = layer(*leaves, copies)
            grads = torch.autograd.grad(out, leaves, grad[nodes].double())
            for into, place, part in zip(
                    found, (nodes, nodes, taken), (out.detach(), grads[0], grads[3]), strict=True):
                into[place] = part
            for total, part in zip(of_sources, grads[1:3], strict=True):
                total.index_add_(0, src, part)
        return *found[:2], *(total.float() for total in of_sources), found[2]

    def check(self, outputs: Sequence[Tensor]) -> float:
        expected = self.expected[:len(outputs)]
        return step_error(outputs, expected, _TOLERANCE) / _COARSER[self.dtype]

    @property
    def pyg_fits(self) -> bool:
        e = self.leaves[3]  # A GPU tells when it is full.
        return e.is_cuda or _PYG_MATRICES * size(e) <= _PYG_BYTES

    def contenders(
        self, mode: str, eager_only: bool, rival: Callable[..., Tensor] | None,
    ) -> list[Contender]:
        cuda = self.grad.is_cuda
        names = [PREPARED, PLAIN, *[OURS_CAPTURED] * cuda]
        names += [PYG, *[COMPILED] * (not eager_only)] * self.pyg_fits
        made = [Contender(name, functools.partial(self.step, name, mode), name in OURS, self.check)
                for name in names]
        return made + [
            Contender(name, functools.partial(self.step, name, mode, rival), False, self.check)
            for name in (ANEMOI, *[ANEMOI_CAPTURED] * cuda) if rival is not None]

    def least_bytes(self, mode: str) -> int:
        """What must be moved: each input read and each result written once, with perfect caches;
        in a step backward reads all inputs and the gradient of the output again."""
        q, k, v, e = self.leaves
        src = self.edges.edge_index[0]
        rows = distinct(src, self.edges.num_src) * (size(k[:1]) + size(v[:1]))
        inputs = size(q, e) + rows + INDEX * (src.numel() + self.edges.num_dst + 1)
        out = size(self.grad)
        return inputs + out if mode == FORWARD else 2 * (inputs + out) + size(q, k, v, e)


def measured(
    case: Case, mode: str, bandwidth: float, results: dict[str, Result],
) -> dict[str, Any]:
    """The least bytes, and the share of the device's bandwidth at which the fastest of ours would
    move just these."""
    least = case.least_bytes(mode)
    times = [result.median_ms for name, result in results.items() if name in OURS]
    fastest = min(time for time in times if time is not None)
    return {
        'least MB': least / 1e6, 'share of bandwidth': least / bandwidth / fastest * 1e3}


def share(text: str) -> float:
    found = float(text)
    if not 0 < found < math.inf:
        raise ValueError(text)
    return found


def run(
    bench: Bench, edges: Edges, kind: Kind, rival: Callable[..., Tensor] | None, bandwidth: float,
) -> None:
    """All cells of a graph."""
    args = bench.args
    for (heads, channels), dtype in itertools.product(kind.sizes, args.dtypes or kind.dtypes):
        case = Case(edges, heads, channels, DTYPES[dtype])
        label = f'{edges.name}: {heads} x {channels}'
        if not case.pyg_fits:
            bench.report.left_out[f"PyG's layer on {label}, {dtype}"] = (
                'its matrices might not fit into memory')
        pairs = [(PLAIN, PYG)] * case.pyg_fits
        if rival is not None:
            pairs.append((OURS_CAPTURED, ANEMOI_CAPTURED))
        for mode in args.modes:
            way = STEP if mode == 'step' else FORWARD
            bench.measure(
                f'Attention, {mode}, {dtype}', label, heads * channels,
                case.contenders(way, args.eager_only, rival), label='H C', memory=True,
                pairs=pairs, facts=functools.partial(measured, case, way, bandwidth))
        del case  # before the inputs of the next one are drawn
        _harness.free(bench.cuda)


def main(argv: Sequence[str] | None = None) -> None:
    usual = tuple(name for name in KINDS if name != 'mesh at random')
    types = tuple(name for name in DTYPES if DTYPES[name] in _COARSER)
    bench = Bench(
        'attention', __doc__, argv, graphs=GRAPHS,
        cases=_harness.names('case', tuple(KINDS), {'quick': usual[::2], 'usual': usual}),
        dtypes=_harness.names('type', types, {'quick': ('float32',), 'usual': None}),
        modes=_harness.names('mode', ('forward', 'step'), ('forward', 'step')),
        scale=Option(SCALE, share, 'share of the nodes of meshes and grids'),
        buffer=Option(BUFFERS, help='MiB to copy, for the bandwidth'),
        eager_only=Option(False), notes=[
            'Wall time with launches and Python; the first call is not counted. A step is forward '
            'and backward, with the gradients of q, k, v and e. Ours: pyg_fast.accelerate of the '
            'layer that PyG runs, its kernels at any size. Compared with the same in float64, made '
            'of the inputs as they are rounded to the type. Graphs are prepared before, for '
            'anemoi-models too; PyG and "ours, edge_index" take a list of the same edges in the '
            'same order.',
            'Meshes and grids are planes of nodes numbered row by row, whose neighbours are near: '
            'on the mesh the 8 around a node, from grid to mesh a window of 5 x 8, from mesh to '
            'grid the node at the place and the next of its row and its column.',
            'Least MB: each input read and each result written once, in a step all inputs and the '
            "output's gradient once more; of k and v the rows that edges name, of the graph int32. "
            'Share of bandwidth: of the copy or sum of much memory in this run, by the fastest of '
            'ours; more than 1 where caches hold the inputs.'])
    ceilings = Ceilings(_harness.cache_bytes(bench.device))
    measure_streams(bench, ceilings)
    rival = anemoi(bench)
    with pyg_fast.small_graphs('kernel'):
        for name in bench.args.cases:
            for edges in edges_of(bench, name):
                run(bench, edges, KINDS[name], rival, ceilings.memory)
    bench.finish()


if __name__ == '__main__':
    main()
