"""The bytes that each kernel must move and gathers, beside the ceilings of the device.

python -m benchmarks roofline                         everything below
python -m benchmarks roofline --quick                 a minute or less
python -m benchmarks roofline --parts sums,maxk       the ceilings, and any of
    sums        spmm, its gradients, and that of an execution path
    maxk        selection, aggregation of CBSR features, and its gradient
    sampled     aggregation of a sample
    batches     to_csr, neighbor_sample, relabel, match, gather_rows, random_walk
    attention   GAT and GATv2: inference, training, gradients
"""
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_fast import ops
from pyg_fast.sparse.operator import Sampling, SparseOperator

from . import _harness, _minibatch, gat, loader, maxk, paths, sampled, spmm
from ._graphs import Graph
from ._harness import Bench, Contender, Option, Result, Section, Settings, exact, same
from ._minibatch import Inputs
from .spmm import FORWARD

GRAPHS = {
    'quick': {'cuda': ('arxiv-like',), 'cpu': ('medium',)},
    'cuda': ('arxiv-like', 'reddit-like', 'products-like'), 'cpu': ('Computers', 'medium')}
DTYPES = ('float32', 'bfloat16')
ROWS = (8, 64, 128, 256, 512, 1024)  # bytes
TABLES = {'quick': {'cuda': (8, 512), 'cpu': (1, 64)},  # MiB
          'cuda': (8, 32, 128, 512, 2048), 'cpu': (1, 8, 64, 512)}
BUFFERS = {'cuda': 2048, 'cpu': 256}  # MiB
GATHERED = {'quick': 1 << 18, 'cuda': 1 << 30, 'cpu': 1 << 24}  # bytes at a call
MOST_GATHERS = 1 << 24
CEILING_REPEATS = 20  # at least
BAG = 32
K, HEADS, CHANNELS, SAMPLES, SHARE, PATH_WIDTH = 32, 8, 8, 32, 0.1, 64
BATCH_SIZE = {'cuda': 8000, 'cpu': 1024}
FANOUT, BATCH_WIDTH = (15, 10, 5), 100
NUM_WALKS, WALK_LENGTH = {'cuda': 1 << 18, 'cpu': 1 << 13}, 10
INDEX = 4  # bytes, of the graphs' int32

COPY, READ, WRITE, BUS = 'copy', 'read (sum)', 'write (fill)', 'host to device, pinned'
SELECT, EMBEDDING_BAG, PLAIN = 'index_select', f'embedding_bag, {BAG} rows a bag', 'plain kernel'
MEMORY, CACHE = 'memory', 'cache'

# Neighbouring threads read neighbouring chunks of a row, each with four loads in flight. The kernel
# writes nothing: the sum is never equal to `never`.
_PLAIN = r"""
extern "C" __global__ void gather(const VECTOR* table, const int* index, int* out, int shift,
                                  int total, int never) {
  const int chunks = 1 << shift, stride = gridDim.x * blockDim.x;
  int sum = 0;
  for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < total; t += 4 * stride) {
    VECTOR part[4];
    for (int k = 0; k < 4; ++k) {
      const int at = t + k * stride;
      part[k] = table[((long long)index[at >> shift] << shift) + (at & (chunks - 1))];
    }
    for (int k = 0; k < 4; ++k) sum += part[k].x | part[k].y;
  }
  if (sum == never) out[0] = sum;
}
"""

kernels = torch.ops.pyg_fast


def size(*tensors: Tensor | None) -> int:
    """Bytes of arrays."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def distinct(index: Tensor, num_nodes: int) -> int:
    named = torch.zeros(num_nodes, dtype=torch.bool, device=index.device)
    named[index.long()] = True
    return int(named.sum())


# Ceilings ---------------------------------------------------------------------------------------

@dataclasses.dataclass
class Rate(Result):
    """A time, and for how many bytes it was."""

    num_bytes: int = 0

    @property
    def per_second(self) -> float:
        """Of the fastest repeat, since that is what the device can do."""
        return self.num_bytes / self.min_ms * 1e3 if self.min_ms else 0.0

    def text(self) -> str:
        return gigabytes(self.per_second)


def rate(result: Result) -> float:
    assert isinstance(result, Rate)
    return result.per_second


def gigabytes(per_second: float) -> str:
    """In GB per second."""
    return f'{per_second / 1e9:,.{0 if per_second >= 1e11 else 1}f}' if per_second else '–'


class Ceilings:
    """The ceilings of the device, in bytes per second, measured in this run."""

    def __init__(self, cache: int) -> None:
        self.cache = cache
        self.memory = self.bus = 0.0
        self.rows: dict[tuple[int, int], float] = {}  # by bytes of a row and of the table

    def random_rows(self, row: int, table: int) -> float:
        """Of rows and a table of about that size."""
        return self.rows[min(self.rows, key=lambda known: (
            abs(math.log(known[0] / row)), abs(math.log(known[1] / max(table, 1)))))]

    def cached(self, row: int) -> float:
        """Of rows of about that size, from whichever table they come fastest."""
        nearest = min({known for known, _ in self.rows}, key=lambda k: abs(math.log(k / row)))
        return max(rate for (known, _), rate in self.rows.items() if known == nearest)

    def stream(self, num_bytes: int) -> tuple[str, float]:
        """Of so many bytes read and written once, and what they come from."""
        cached = self.cached(ROWS[-1])
        if num_bytes <= self.cache and cached > self.memory:
            return CACHE, cached
        return MEMORY, self.memory


def often(bench: Bench) -> Settings:
    least = 0 if bench.quick else CEILING_REPEATS
    return dataclasses.replace(bench.kernel, repeats=max(bench.kernel.repeats, least))


def measure_streams(bench: Bench, ceilings: Ceilings) -> None:
    megabytes = bench.args.buffer
    count = megabytes << 18
    x, y = (torch.ones(count, device=bench.device) for _ in range(2))
    ways: dict[str, tuple[Callable[[], Any], int]] = {
        COPY: (lambda: y.copy_(x), 2 * size(x)),
        READ: (x.sum, size(x)),
        WRITE: (lambda: y.fill_(1.0), size(y))}
    if bench.cuda:
        host = torch.ones(min(count, 1 << 26)).pin_memory()
        part = y[:host.numel()]
        ways[BUS] = lambda: part.copy_(host, non_blocking=True), size(host)
    results = bench.measure(
        'Streams, GB/s', 'float32', megabytes,
        [Contender(name, lambda run=run: run, ours=True) for name, (run, _) in ways.items()],
        often(bench), label='MiB', ours='', made=lambda found: {
            name: Rate(**vars(result), num_bytes=ways[name][1])
            for name, result in found.items()})
    ceilings.memory = max(rate(results[COPY]), rate(results[READ]))
    ceilings.bus = rate(results[BUS]) if BUS in results else 0.0


def plain_kernel(table: Tensor, index: Tensor) -> Callable[[], Tensor]:
    row = size(table[:1])
    vector = min(row, 16)
    code = _PLAIN.replace('VECTOR', f'int{vector // 4}')
    kernel = torch.cuda._compile_kernel(code, 'gather')
    out = index.new_empty(1)
    total = index.numel() * row // vector
    # A power of two, like the total: no thread must compare its index with the end.
    blocks = min(1 << 12, max(1, total // (4 * 256)))

    def run() -> Tensor:
        kernel((blocks, 1, 1), (256, 1, 1), (
            table, index, out, (row // vector).bit_length() - 1, total, -1))
        return out

    return run


def gathers(table: Tensor, index: Tensor) -> list[Contender]:
    """The ways to read random rows."""
    offsets = torch.arange(0, index.numel(), BAG, device=index.device, dtype=index.dtype)
    out = table.new_empty(index.numel(), table.size(1))
    ways: dict[str, Callable[[], Callable[[], Any]]] = {
        SELECT: lambda: lambda: torch.index_select(table, 0, index, out=out),
        EMBEDDING_BAG: lambda: lambda: F.embedding_bag(index, table, offsets, mode='sum')}
    if table.is_cuda:
        ways[PLAIN] = lambda: plain_kernel(table, index)
    return [Contender(name, make, ours=name == SELECT) for name, make in ways.items()]


def measure_gathers(bench: Bench, ceilings: Ceilings) -> None:
    generator = torch.Generator(device=bench.device).manual_seed(1)
    for megabytes, row in itertools.product(bench.args.tables, ROWS):
        table = torch.ones((megabytes << 20) // row, row // 4, device=bench.device)
        count = min(Option(GATHERED).value(bench.args) // row, MOST_GATHERS)
        index = torch.randint(
            table.size(0), (count,), generator=generator, device=bench.device, dtype=torch.int)
        results = bench.measure(
            'Random rows, GB/s', f'a table of {megabytes} MiB', row, gathers(table, index),
            often(bench), label='bytes of a row', rivals=(), made=lambda found, count=count,
            row=row: {name: Rate(**vars(result), num_bytes=count * (row + INDEX))
                      for name, result in found.items()})
        ceilings.rows[row, megabytes << 20] = max(rate(r) for r in results.values())


# What kernels do --------------------------------------------------------------------------------

@dataclasses.dataclass
class Work:
    """The bytes that a kernel moves.

    ``must_move``: inputs and results, each once, as with perfect caches; of gathered rows each
    distinct one; no scratch memory. ``gathered``: rows of ``row`` bytes, each as often as it is
    read, of ``table`` bytes in total; over the ``bus`` or not.
    """

    must_move: int
    gathered: int = 0
    row: int = 0
    table: int = 0
    bus: bool = False


def over_edges(
    csr: Sequence[Tensor | None], row: int, num_rows: int, once: int,
) -> Work:
    """The work of a kernel that reads a row of some array for each edge of a CSR structure, whose
    second array names the rows; ``once``: all other bytes."""
    col = csr[1]
    assert col is not None
    once += size(*csr)
    return Work(distinct(col, num_rows) * row + once, col.numel() * row + once, row, num_rows * row)


class Kernel(NamedTuple):
    """A kernel, what measures it, its work, and a description of the counted bytes."""

    name: str
    contender: Contender
    work: Work
    counted: str


def picked(contenders: Iterable[Contender], name: str) -> Contender:
    return next(contender for contender in contenders if contender.name == name)


def raw(
    name: str, run: Callable[[], Any], check: Callable[[Any], float], work: Work, counted: str,
) -> Kernel:
    return Kernel(name, Contender(name, lambda: run, True, check), work, counted)


@dataclasses.dataclass
class Reached(Result):
    """A time, the work, and the ceilings that fit it, in bytes per second; shares of them.

    ``share``: the least time that both ceilings allow, divided by the time. ``limit``: the ceiling
    of this least time: memory (or cache, if all bytes fit into it) for the bytes that must move,
    cached rows for gathered rows. ``of_random_rows``: compared with random rows of such a table.
    """

    must_move: int = 0
    gathered: int = 0
    row: int = 0
    table: int = 0
    stream: str = MEMORY
    stream_ceiling: float = 0.0
    gather_ceiling: float = 0.0
    random_ceiling: float = 0.0
    of_stream: float = 0.0
    of_gather: float = 0.0
    of_random_rows: float = 0.0
    share: float = 0.0
    limit: str = MEMORY


def reached(result: Result, work: Work, ceilings: Ceilings) -> Reached:
    assert result.median_ms is not None
    seconds = result.median_ms / 1e3
    source, stream = ceilings.stream(work.must_move)
    if work.bus:
        source, stream = 'bus', ceilings.bus
    found = Reached(
        **vars(result), must_move=work.must_move, gathered=work.gathered, row=work.row,
        table=work.table, stream=source, stream_ceiling=stream,
        of_stream=work.must_move / seconds / stream)
    found.share, found.limit = found.of_stream, source
    if work.gathered and not work.bus:
        found.gather_ceiling = ceilings.cached(work.row)
        found.random_ceiling = ceilings.random_rows(work.row, work.table)
        found.of_gather = work.gathered / seconds / found.gather_ceiling
        found.of_random_rows = work.gathered / seconds / found.random_ceiling
        if found.of_gather > found.share:
            found.share, found.limit = found.of_gather, 'cached rows'
    return found


class Roofline(Section):
    """A table of kernels, one to a line."""

    def markdown(self) -> str:
        head = ['kernel', 'graph', self.width, 'ms', 'must move, MB', 'GB/s', 'of', 'share',
                'gathers, MB', 'GB/s', 'of cached rows', 'of random rows', 'limit', 'of the limit']
        rows = []
        for cell in self.cells:
            for name, result in cell.results.items():
                assert isinstance(result, Reached)
                of = f'{result.stream}, {gigabytes(result.stream_ceiling)}'
                ms = result.median_ms or math.nan
                row = [name, cell.graph, f'{cell.width:,}', result.text(),
                       _harness.megabytes(result.must_move),
                       gigabytes(result.must_move / ms * 1e3), of, f'{result.of_stream:.0%}']
                if result.gather_ceiling:
                    row += [
                        _harness.megabytes(result.gathered),
                        gigabytes(result.gathered / ms * 1e3),
                        *(f'{share:.0%} of {gigabytes(ceiling)}' for share, ceiling in (
                            (result.of_gather, result.gather_ceiling),
                            (result.of_random_rows, result.random_ceiling)))]
                else:
                    row += ['–'] * 4
                rows.append([*row, result.limit, f'{result.share:.0%}'])
        return self.titled(head, rows)


class Rooflines:
    """One graph: measures kernels and adds them to the report."""

    def __init__(
        self, bench: Bench, graph: Graph, ceilings: Ceilings, counted: dict[str, str],
    ) -> None:
        self.bench, self.graph, self.ceilings, self.counted = bench, graph, ceilings, counted
        self.args, self.widest = bench.args, max(bench.args.widths)

    def measure(
        self, title: str, width: int, made: Sequence[Kernel], label: str = 'F', of: str = '',
    ) -> None:
        self.counted |= {each.name: each.counted for each in made}
        self.bench.measure(
            title, self.graph.name + of, width,
            [dataclasses.replace(each.contender, name=each.name) for each in made],
            self.bench.kernel, kind=Roofline, label=label, ours='', made=lambda results: {
                each.name: reached(results[each.name], each.work, self.ceilings) for each in made})


# Sums -------------------------------------------------------------------------------------------

def sums(bench: Rooflines) -> None:
    for dtype in DTYPES:
        case = maxk.Case(bench.graph, _harness.DTYPES[dtype], bench.widest)
        for width in bench.args.widths:
            bench.measure(f'Sums, {dtype}', width, sums_of(case, width))
        del case
    path(bench)


def sums_of(case: maxk.Case, width: int) -> list[Kernel]:
    graph, weight = case.graph.structure, case.weight
    num_nodes, row = case.graph.num_nodes, width * case.x.element_size()

    def of(mode: str, name: str = spmm.OURS) -> Contender:
        return picked(spmm.contenders(case, 'sum', mode, width, 0), name)

    def work(*csr: Tensor | None) -> Work:
        return over_edges(csr, row, num_nodes, num_nodes * row)

    return [
        Kernel('spmm', of(FORWARD), work(*graph[:3], weight),
               'a row of x for each edge, besides its source and weight; pointers and the result '
               'once, since a row of it is summed up in registers'),
        Kernel('spmm, unweighted', of(FORWARD, spmm.PLAIN), work(*graph[:3]),
               'the same without weights'),
        Kernel('spmm, gradient of x', of(spmm.GRAD_X), work(*graph[3:6], weight),
               'spmm over the transpose, whose weights are looked up by the position of each edge'),
        Kernel('spmm, gradient of weights', of(spmm.GRAD_W), work(*graph[:3], weight),
               'a row of x for each edge and a number written to it; a row of the gradient once, '
               'since all edges of a destination use it'),
    ]


def path(bench: Rooflines) -> None:
    problem = paths.Problem(bench.graph, SHARE)
    case = paths.Aggregation(problem, PATH_WIDTH)
    part, scale = case.path, case.scale
    matrix = SparseOperator(case.graph, None, scale, scale)
    matrix = (matrix if part.is_whole else matrix.on(part)).t()
    csr, row = matrix.graph, 4 * PATH_WIDTH
    assert matrix.col_scale is not None
    own = size(matrix.row_scale) + row * csr.num_dst
    work = over_edges(csr[:3], row + INDEX, csr.num_src, own)
    # Rows of the gradient are taken out first, and those of the result put back among all.
    apart = 2 * row * csr.num_src + row * csr.num_dst + size(part.src_position)
    work.must_move += row * (problem.num_nodes - csr.num_dst)
    work.gathered += apart + row * problem.num_nodes
    bench.measure(f'Execution paths, {SHARE:.0%} training', PATH_WIDTH, [Kernel(
        'spmm on a path', picked(case.contenders(), paths.PATH), work,
        'a row of the gradient and its scale for each edge of the path; the rows of training nodes '
        'taken out before, the result written for the path and copied to all nodes')])


# MaxK -------------------------------------------------------------------------------------------

def largest(bench: Rooflines) -> None:
    num_nodes, width, k = bench.graph.num_nodes, bench.widest, min(K, bench.widest)
    for dtype in DTYPES:
        selection = maxk.Selection(
            num_nodes, width, _harness.DTYPES[dtype], bench.bench.device)
        case = maxk.Case(bench.graph, _harness.DTYPES[dtype], width)
        graph, weight, cbsr = case.graph.structure, case.weight, case.largest(k)
        item, column = case.x.element_size(), cbsr.columns.element_size()
        entries, dense = k * (item + column), num_nodes * width * item
        aggregated = over_edges((*graph[:3], weight), entries, num_nodes, dense)
        ordered = over_edges(
            (*graph[3:6], weight), k * item, num_nodes, num_nodes * entries)
        # Of a row of the gradient, other columns for each edge: all of them are needed once.
        ordered.must_move = size(*graph[3:6], weight) + dense + num_nodes * entries
        ordered.table = dense
        bench.measure(f'MaxK, k = {k}, {dtype}', width, [
            Kernel('maxk', picked(selection.contenders(k), maxk.OURS),
                   Work(size(selection.x) + num_nodes * entries),
                   'x once, values and columns once'),
            Kernel('cbsr_spmm', picked(maxk.forwards(case, k), maxk.OURS), aggregated,
                'k values and columns for each edge, besides its source and weight; the dense '
                'result once'),
            Kernel('cbsr_spmm, gradient', picked(maxk.gradients(case, k), maxk.OURS), aggregated,
                   'k columns for each edge and k values added to memory; a dense row of the '
                   'gradient once, since all edges of a destination use it'),
            Kernel('cbsr_spmm, gradient, deterministic', picked(
                maxk.gradients(case, k), maxk.ORDERED), ordered,
                'k entries of a row of the gradient for each edge of the transpose; columns and '
                'values of a source once'),
        ])
        del case, selection


# Samples ----------------------------------------------------------------------------------------

def samples(bench: Rooflines) -> None:
    num_nodes, width = bench.graph.num_nodes, bench.widest
    for dtype in (*DTYPES, 'int8'):
        case = sampled.Case(bench.graph, dtype, width)
        x, scale = case.given
        made = []
        contenders = sampled.sampling_contenders(case, SAMPLES)
        for strategy in ('fastrand', 'bucket'):
            taken = case.sample(Sampling(SAMPLES, strategy)).graph
            # Of sources and weights those alone that are taken.
            once = taken.num_edges * case.weight.element_size() + num_nodes * width * (
                4 if case.is_int8 else x.element_size())
            row = width * x.element_size() + INDEX * (scale is not None)
            made.append(Kernel(
                f'sampled_spmm, {strategy}', picked(contenders, strategy),
                over_edges((bench.graph.rowptr, taken.col), row, num_nodes, once),
                'as spmm, of the edges that are taken; of eight bits with a scale for each row'))
        bench.measure(f'Sampled sums, S = {SAMPLES}, {dtype}', width, made)
        del case


# Mini-batches -----------------------------------------------------------------------------------

def batches(bench: Rooflines) -> None:
    graph, num_nodes = bench.graph, bench.graph.num_nodes
    batch_size, num_walks = bench.args.batch_size, NUM_WALKS[bench.args.device]
    inputs = Inputs(graph, BATCH_WIDTH)
    device, rowptr, col = inputs.device, graph.rowptr, graph.col
    seeds, others = inputs.seeds(batch_size, 2, device)
    node_map = ops.NodeMap(num_nodes, device)
    sample = loader.samplers(inputs, FANOUT, node_map)[loader.OURS]
    sub, before = sample(seeds), sample(others)
    n_id, num_edges = sub.n_id, sub.e_id.numel()
    numbered = n_id.numel() - sub.num_sampled_nodes[-1]  # nodes that have sampled
    entry = 8  # bytes of the map, of a node
    result = size(n_id, sub.edge_index, sub.rowptr, sub.col, sub.e_id)
    read = size(seeds) + num_edges * INDEX + numbered * 2 * INDEX
    ids = torch.cat([seeds, n_id[sub.edge_index[0]]])
    unique, local = _minibatch.torch_relabel(ids)
    start = torch.randint(num_nodes, (num_walks,), device=device)
    shuffled = graph.edge_index[:, torch.randperm(graph.num_edges, device=device)]
    x, row = inputs.x.to(device), size(inputs.x[:1])
    expected = x[n_id]
    fetched = Work(
        size(n_id, expected) + distinct(n_id, num_nodes) * row, size(n_id) + 2 * size(expected),
        row, size(x))

    def sorted_right(out: Sequence[Tensor]) -> float:
        src, dst = shuffled[:, out[2].long()]
        return same((out[0], graph.rowptr), (dst, graph.row), (src.int(), out[1]))

    def relabeled(out: Sequence[Tensor]) -> float:
        return same((out[0][:unique.numel()], unique), (out[1], local))

    def matched(out: Tensor) -> float:
        place = torch.full((num_nodes,), -1, device=device)
        place[before.n_id] = torch.arange(before.n_id.numel(), device=device)
        return same((out, place[n_id]))

    def fetch(table: Tensor) -> Callable[[], Tensor]:
        return lambda: kernels.gather_rows(table, n_id, None, None, None, None, None)

    def is_right(out: Tensor) -> float:
        return same((out, expected))

    made = [
        raw('to_csr', lambda: kernels.to_csr(shuffled, num_nodes, num_nodes, False, False, False),
            sorted_right, Work(size(shuffled, rowptr) + graph.num_edges * 2 * INDEX),
            'the list of edges once, sorted sources and positions once; passes of the sort are '
            'its own affair'),
        raw('neighbor_sample', lambda: sample(seeds),
            functools.partial(_minibatch.sample_error, graph, seeds, FANOUT),
            Work(read + result, read + result + num_edges * 2 * entry, entry, size(node_map.table(
                n_id.numel()))),
            'two pointers of each node that samples, a source for each edge, the batch; gathered '
            'besides: an entry of the map for each edge as it is met and as it gets its number. '
            'The time includes waiting once for the sizes'),
        raw('relabel', lambda: kernels.relabel(
            ids, node_map.table(ids.numel()), node_map.next_stamp()), relabeled,
            Work(size(ids, unique, local), size(ids, unique, local) + ids.numel() * 2 * entry,
                 entry, num_nodes * entry),
            'ids, distinct ids and places once; gathered besides: an entry of the map for each id, '
            'twice'),
        raw('match', lambda: kernels.match(
            n_id, before.n_id, node_map.table(before.n_id.numel()), node_map.next_stamp(),
            num_nodes), matched,
            Work(2 * size(n_id) + size(before.n_id), 2 * size(n_id) + size(before.n_id)
                 + (n_id.numel() + before.n_id.numel()) * entry, entry, num_nodes * entry),
            'both batches and the positions once; gathered besides: an entry of the map for each '
            'node of either'),
        raw('gather_rows, on the device', fetch(x), is_right, fetched,
            'ids, rows read and rows written'),
        raw('random_walk', lambda: kernels.random_walk(rowptr, col, start, WALK_LENGTH, 0.0, 1),
            functools.partial(walk_error, graph, start),
            Work(size(start) * (WALK_LENGTH + 2), size(start) * (WALK_LENGTH + 2)
                 + num_walks * WALK_LENGTH * 3 * INDEX, 2 * INDEX, size(rowptr, col)),
            'walks written once; gathered besides: two pointers and a source at each step'),
    ]
    if device.type == 'cuda':
        made.append(raw(
            'gather_rows, from the host', fetch(inputs.x), is_right,
            Work(distinct(n_id, num_nodes) * row, bus=True), 'distinct rows, over the bus'))
    bench.measure('Mini-batches and preparation', batch_size, made, 'batch')


def walk_error(graph: Graph, start: Tensor, out: Tensor) -> float:
    """Zero if each step follows an edge, or stays where there is none."""
    at, to = out[:, :-1].reshape(-1), out[:, 1:].reshape(-1)
    follows = graph.has_edges(to, at) | ((graph.degree[at] == 0) & (at == to))
    return exact(torch.equal(out[:, 0], start) and bool(follows.all()))


# Attention --------------------------------------------------------------------------------------

def attention(bench: Rooflines) -> None:
    width, num_nodes = HEADS * CHANNELS, bench.graph.num_nodes
    row, scores = 4 * width, 4 * HEADS  # bytes of a node
    graph = bench.graph.structure

    def over(row: int, once: int) -> Work:
        return over_edges(graph[:3], row, num_nodes, num_nodes * once)

    def over_transpose(row: int, once: int) -> Work:
        return over_edges(graph[3:6], row, num_nodes, num_nodes * once)

    kept = 2 * (row + scores)
    pair = 2 * row  # x_dst or the gradient, and a result
    by_src, by_dst = over_transpose(2 * row + 2 * scores, pair), over(row, 3 * row + 2 * scores)
    both = Work(
        by_src.must_move + by_dst.must_move - num_nodes * row, by_src.gathered + by_dst.gathered,
        by_src.row, by_src.table)
    for model, steps in {
        'gat': {
            'inference': (
                over(row + scores, row + scores),
                'a row of x and a score of each head for each edge; scores of destinations and '
                'the result once'),
            'training': (
                over(row + scores, row + scores + kept),
                'the same, and what the backward pass reads written once: two more sums of rows, '
                'two numbers of each head'),
            'gradient': (
                over_transpose(row + 3 * scores, 2 * row + 4 * scores + kept),
                'a row of the gradient and three numbers of each head for each edge of the '
                'transpose; x, what was kept, and all gradients once')},
        'gatv2': {
            'inference': (
                over(row, pair),
                'a row of x for each edge; rows of destinations and the result once'),
            'training': (
                over(row, pair + row + scores),
                'the same, and what the backward pass reads written once'),
            'gradient': (
                both, 'a row of x for each edge; for each edge of the transpose a row of the '
                'gradient, one of the destinations and two numbers of each head; all else once')},
    }.items():
        case = gat.CASES[model](bench.graph, torch.float32, HEADS, CHANNELS)
        ways = (FORWARD, gat.INFERENCE), (FORWARD, gat.TRAINING), (gat.BACKWARD, gat.OURS)
        bench.measure('Attention, float32', width, [
            Kernel(f'{model}, {step}', picked(gat.kernel_contenders(case, mode, 0), name), *work)
            for (mode, name), (step, work) in zip(ways, steps.items(), strict=True)
        ], of=f', {HEADS} x {CHANNELS}')


PARTS = {
    'sums': sums, 'maxk': largest, 'sampled': samples, 'batches': batches, 'attention': attention}


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'roofline', __doc__, argv, parts=tuple(PARTS), graphs=GRAPHS,
        widths=Option({'quick': (16, 64), 'usual': (16, 64, 256)}, _harness.integers, 'columns F'),
        tables=Option(TABLES, _harness.integers, 'MiB of the tables, for the ceilings'),
        buffer=Option(BUFFERS, help='MiB to copy, for the ceilings: much more than the caches'),
        batch_size=Option(BATCH_SIZE, help='seeds of a mini-batch'))
    args, ceilings = bench.args, Ceilings(_harness.cache_bytes(bench.device))
    bench.note(
        'The ceilings are measured in the same run; the fastest repeat counts. "Must move": '
        'inputs and results, each once, as with perfect caches; its ceiling is the faster of copy '
        f'and read of {args.buffer} MiB ("{MEMORY}"), or for bytes that fit into the last cache '
        f'({_harness.megabytes(ceilings.cache)} MB) that of random rows of {ROWS[-1]} bytes from '
        f'the fastest table, if it is higher ("{CACHE}"). "Gathers": a row as often as an edge '
        'names it. "Cached rows": random rows of about that size from the fastest table; "random '
        'rows": from a table of about that size; kernels exceed it where a graph names some rows '
        'much more often than others. "Of the limit": of the least time that memory and cached '
        'rows allow.',
        f'Random rows: the fastest of "{SELECT}" (which also writes them), "{EMBEDDING_BAG}" and, '
        f'on a GPU, "{PLAIN}", which reads rows and writes nothing; rows and their int32 indices '
        'count. linear_product and linear_cbsr have no line: they are dense products beside the '
        'kernels below.')
    counted: dict[str, str] = {}
    notes = list(bench.report.notes)
    measure_streams(bench, ceilings)
    measure_gathers(bench, ceilings)
    for graph in bench.graphs():
        on = Rooflines(bench, graph, ceilings, counted)
        for part in args.parts:
            PARTS[part](on)
        bench.report.notes = [*notes, 'Counted:', *(
            f'- {name}: {what}.' for name, what in counted.items())]
    bench.finish()


if __name__ == '__main__':
    main()
