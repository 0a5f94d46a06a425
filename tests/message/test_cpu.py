"""Passes of messages on a CPU, against the same programs in plain torch and float64."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyg_fast.sparse.graph import Graph

from ._parts import BINARY, EDGE, UNARY, Out, Pass, Program, is_float, run_pass_cpu

pytestmark = pytest.mark.usefixtures('several_threads', 'few_edges_for_several_threads')
ROLES = ('src', 'dst', 'edge', 'param')


@pytest.fixture
def few_edges_for_several_threads(limits: Callable[..., None]) -> None:
    limits(grain_of_messages=1, edges_of_a_share=1, shares_of_messages=3)


def edges_of(kind: str) -> tuple[Tensor, int, int]:
    """An edge_index and its numbers of sources and destinations."""
    if kind == 'square':
        return torch.randint(34, (2, 260)), 37, 37
    if kind == 'wide':
        return torch.stack([torch.randint(50, (200,)), torch.randint(9, (200,))]), 50, 11
    if kind == 'hubs':
        dst = torch.where(torch.rand(500) < 0.5, 7, torch.randint(300, (500,)))
        return torch.stack([torch.randint(5, (500,)), dst]), 5, 300
    if kind == 'sparse':
        return torch.tensor([[0, 3, 3], [990, 4, 4]]), 5, 1000
    assert kind == 'empty'
    return torch.empty(2, 0, dtype=torch.long), 4, 6


KINDS = ('square', 'wide', 'hubs', 'sparse', 'empty')


class Case:
    """A graph, and inputs for the loads of a program."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float64) -> None:
        self.edge_index, self.num_src, self.num_dst = edges_of(kind)
        self.num_edges = self.edge_index.size(1)
        self.graph = Graph.from_edge_index(self.edge_index, self.num_src, self.num_dst)
        self.dtype = dtype
        self.inputs: dict[tuple[str, int], Tensor] = {}
        self.program = Program()

    def rows(self, role: str) -> int:
        return {'src': self.num_src, 'edge': self.num_edges}.get(role, self.num_dst)

    def load(self, role: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> int:
        """A load with an input of its own."""
        own = dtype or self.dtype
        slot = len(self.inputs)
        size = shape if role == 'param' else (self.rows(role), *shape)
        if own == torch.bool:
            self.inputs[role, slot] = torch.rand(size) < 0.5
        elif is_float(str(own)[6:]):
            self.inputs[role, slot] = torch.randn(size).to(own)
        else:
            self.inputs[role, slot] = torch.randint(-3, 4, size, dtype=own)
        if role == 'grad':
            at = self.program.add('load', (), (role, slot), shape, str(own)[6:], 4)
        else:
            at = self.program.load(role, slot, shape, str(own)[6:])
        return at

    def known(self, ats: list[int]) -> dict[int, Tensor]:
        """The values of the loads for every edge, in float64."""
        out = {}
        src, dst = self.edge_index
        for at in self.program.reachable(ats):
            if self.program[at].op != 'load':
                continue
            role, k = self.program[at].attrs
            if role == 'picked':
                arg = self.inputs['arg', k][dst]
                grad = self.inputs['grad', k][dst].double()
                own = torch.arange(self.num_edges).view(-1, *(1,) * (arg.dim() - 1))
                out[at] = torch.where(arg == own, grad, 0.0)
                continue
            x = self.inputs[role, k]
            x = x.double() if x.is_floating_point() else x
            out[at] = {'src': lambda x: x[src], 'edge': lambda x: x, 'param': lambda x: x}.get(
                role, lambda x: x[dst]
            )(x)
        return out

    def value(self, at: int) -> Tensor:
        """The value of each edge."""
        known = self.known([at])
        (got,) = self.program.evaluate([at], known, torch.float64) if known else (None,)
        shape = self.program[at].shape
        return got.to(torch.float64).expand(self.num_edges, *shape)

    def run(
        self, outs: list[Out], row_role: str, seed: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        one = Pass(self.program, tuple(outs), row_role)
        return run_pass_cpu(one, self.graph, self.inputs, self.dtype, seed)

    def check(
        self, ats: list[int], kinds: list[str], row_role: str, tolerance: float | None = None
    ) -> None:
        """Compares a pass with plain torch."""
        name = str(self.dtype)[6:]
        outs = [Out(at, kind, name) for at, kind in zip(ats, kinds, strict=True)]
        found, args = self.run(outs, row_role)
        if tolerance is None:
            tolerance = {torch.float64: 1e-10, torch.float32: 3e-5}.get(self.dtype, 2e-2)
        end = self.edge_index[1 if row_role == 'dst' else 0]
        num_rows = self.num_dst if row_role == 'dst' else self.num_src
        for at, kind, out, arg in zip(ats, kinds, found, args, strict=True):
            v = self.value(at)
            size = v.abs().amax().nan_to_num().item() if v.numel() else 0.0
            if kind == 'edge':
                expected = v
            elif kind == 'total':
                assert out.size(0) == max(1, min(3, self.num_edges))
                out, expected = out.sum(0), v.sum(0)
                size *= max(1.0, self.num_edges**0.5)
            else:
                name = {'max': 'amax', 'min': 'amin'}.get(kind, kind)
                index = end.view(-1, *(1,) * (v.dim() - 1)).expand_as(v)
                zero = v.new_zeros(num_rows, *v.shape[1:])
                expected = zero.scatter_reduce(0, index, v, name, include_self=False)
                size *= 10
            assert out.shape == expected.shape
            torch.testing.assert_close(
                out.double(), expected, rtol=10 * tolerance, atol=tolerance * max(1.0, size),
                equal_nan=True,
            )  # fmt: skip
            assert (arg is not None) == (kind in ('max', 'min'))
            if arg is not None:
                self.check_choice(v, expected, arg, end, kind, num_rows, tolerance)

    def check_choice(
        self, v: Tensor, expected: Tensor, arg: Tensor, end: Tensor, kind: str, num_rows: int,
        tolerance: float,
    ) -> None:  # fmt: skip
        degree = torch.bincount(end, minlength=num_rows).view(-1, *(1,) * (v.dim() - 1))
        assert ((arg == -1) == (degree == 0)).all()
        for row in range(num_rows):
            ids = (end == row).nonzero().flatten()
            if len(ids):
                chosen = v.gather(0, arg[row : row + 1].long())[0]
                torch.testing.assert_close(
                    chosen, expected[row], rtol=tolerance, atol=tolerance, equal_nan=True
                )
                if self.dtype == torch.float64:
                    best = v[ids] == expected[row]
                    best |= v[ids].isnan() & expected[row].isnan()
                    first = ids[best.int().argmax(0)]
                    assert torch.equal(first, arg[row].long())


POSITIVE = {'log', 'log2', 'log10', 'sqrt', 'rsqrt', 'reciprocal'}
ANY_UNARY = [
    op for op in UNARY if op not in POSITIVE and op not in ('floor', 'ceil', 'asin', 'acos')
]


def random_program(case: Case, seed: int, smooth: bool) -> list[int]:
    """Operations at random, of all kinds; the positions of some results. Without steps, where
    rounding decides, if `smooth`."""
    rng, p = random.Random(seed), case.program
    sizes = rng.choice([(1,), (3,), (8,), (17,), (64,), (70,), (4, 8), (3, 5), (2, 1, 6)])
    pool = [case.load(role, sizes) for role in ROLES]
    pool.append(case.load(rng.choice(ROLES), (1,) * len(sizes)))
    pool.append(case.load('grad', sizes))
    if rng.random() < 0.5:
        pool.append(case.load(rng.choice(ROLES[:3]), sizes, torch.bool))

    def fits(a: int, b: int) -> bool:
        x, y = p[a].shape, p[b].shape
        return len(x) == len(y) and all(m == n or 1 in (m, n) for m, n in zip(x, y, strict=True))

    for _ in range(rng.randint(3, 14)):
        x = rng.choice(pool)
        shape = p[x].shape
        real = is_float(p[x].dtype)
        kind = rng.choice(['unary', *['binary'] * 3, 'where', 'shape', 'reduce', 'cat', 'mm'])
        if kind == 'unary' and real:
            op = rng.choice(['neg', 'abs', 'tanh', 'sigmoid', 'relu', 'sin', 'erf'])
            pool.append(p.pointwise(op, x))
        elif kind == 'binary':
            y = rng.choice([k for k in pool if fits(k, x)])
            ops = ['add', 'sub', 'mul', 'maximum', 'minimum']
            if not smooth:
                ops += ['lt', 'le', 'ge', 'gt']
            if real and is_float(p[y].dtype):
                pool.append(p.pointwise(rng.choice(ops), x, y))
        elif kind == 'where' and real:
            y = rng.choice([k for k in pool if fits(k, x)])
            c = p.pointwise('gt', x, p.const(0.0, len(shape), p[x].dtype))
            if is_float(p[y].dtype):
                pool.append(p.pointwise('where', c, x, p.pointwise('mul', y, x)))
        elif kind == 'shape' and shape:
            which = rng.choice(['view', 'permute', 'slice', 'expand'])
            dim = rng.randrange(len(shape))
            if which == 'view':
                pool.append(p.view(x, rng.choice([(math.prod(shape),), (*shape, 1), (1, *shape)])))
            elif which == 'permute':
                pool.append(p.permute(x, tuple(rng.sample(range(len(shape)), len(shape)))))
            elif which == 'expand' and shape[dim] == 1 and math.prod(shape) < 100:
                pool.append(p.expand(x, (*shape[:dim], 3, *shape[dim + 1 :])))
            elif which == 'slice':
                step = rng.choice([1, 2])
                start = rng.randrange(shape[dim])
                most = (shape[dim] - start + step - 1) // step
                pool.append(p.slice(x, dim, start, rng.randint(1, most), step))
        elif kind == 'reduce' and real:
            dims = rng.sample(range(len(shape)), rng.randint(1, len(shape)))
            pool.append(p.reduce(rng.choice(['sum', 'amax', 'amin']), x, dims))
        elif kind == 'cat' and real:
            dim = rng.randrange(len(shape))
            others = [
                k for k in pool if len(p[k].shape) == len(shape) and is_float(p[k].dtype)
                and p[k].shape[:dim] == shape[:dim] and p[k].shape[dim + 1 :] == shape[dim + 1 :]
            ]  # fmt: skip
            pool.append(p.cat([x, rng.choice(others)], dim))
        elif kind == 'mm' and real and math.prod(shape) < 200:
            out = rng.choice([1, 5, 16, 35])
            pool.append(lowered(p, x, case.load('param', (shape[-1], out))))
    edge = [k for k in pool if p.dependence(k) not in (0,) and is_float(p[k].dtype)]
    return rng.sample(edge, min(len(edge), rng.randint(1, 4))) + [edge[-1]]


def lowered(p: Program, x: int, weight: int) -> int:
    """A linear map as the plan writes it."""
    lead, size = p[x].shape[:-1], p[x].shape[-1]
    a = p.view(x, (*lead, size, 1))
    w = p.view(weight, (*(1,) * len(lead), *p[weight].shape))
    total = p.reduce('sum', p.pointwise('mul', a, w), (len(lead),))
    return p.view(total, (*lead, p[weight].shape[-1]))


@pytest.mark.parametrize('row_role', ['dst', 'src'])
@pytest.mark.parametrize('seed', range(60))
def test_random_programs(seed: int, row_role: str) -> None:
    torch.manual_seed(seed)
    case = Case(KINDS[seed % len(KINDS)])
    ats = random_program(case, seed, smooth=False)
    rng = random.Random(seed)
    kinds = [rng.choice(['sum', 'mean', 'max', 'min', 'edge', 'total']) for _ in ats]
    case.check(ats, kinds, row_role)


@pytest.mark.parametrize('seed', range(30))
def test_random_programs_in_float32(seed: int) -> None:
    torch.manual_seed(seed)
    case = Case(KINDS[seed % len(KINDS)], torch.float32)
    ats = random_program(case, seed, smooth=True)
    kinds = [random.Random(seed).choice(['sum', 'mean', 'edge', 'total']) for _ in ats]
    case.check(ats, kinds, 'dst', 1e-3)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('width', [1, 3, 7, 8, 16, 31])
@pytest.mark.parametrize('op', [*UNARY, *BINARY])
def test_pointwise(op: str, width: int, dtype: torch.dtype) -> None:
    case = Case('square', dtype)
    p = case.program
    x, y = case.load('src', (width,)), case.load('dst', (width,))
    if op in POSITIVE or op == 'pow':
        x = p.pointwise('add', p.pointwise('abs', x), p.const(0.1, 1, p[x].dtype))
    if op == 'log1p':
        x = p.pointwise('abs', x)
    if op in ('asin', 'acos'):
        x = p.pointwise('mul', p.pointwise('sin', x), p.const(0.8, 1, p[x].dtype))
    if op == 'eq':
        x, y = p.pointwise('floor', x), p.pointwise('floor', y)
    at = p.pointwise(op, x) if op in UNARY else p.pointwise(op, x, y)
    case.check([at], ['edge'], 'dst', 1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('roles', [('src', 'edge'), ('edge', 'param'), ('dst', 'src')], ids=str)
@pytest.mark.parametrize('heads', [1, 3, 8])
@pytest.mark.parametrize('channels', [2, 3, 4, 8, 16])
def test_a_number_for_each_head(
    channels: int, heads: int, roles: tuple[str, str], dtype: torch.dtype
) -> None:
    """Vectors hold several rows of few channels."""
    torch.manual_seed(0)
    case = Case('square', dtype)
    p, shape = case.program, (heads, channels)
    row, number = case.load(roles[0], shape), case.load(roles[1], (heads, 1))
    ats = [p.pointwise('sub', row, number), p.pointwise('mul', p.expand(number, shape), row)]
    case.check(ats, ['edge', 'sum'], 'dst')


def pointwise_of(op: str, *args: Tensor, power: float | None = None) -> Tensor:
    """An operation by the kernel, of rows of one edge."""
    graph = Graph.from_edge_index(torch.zeros(2, 1, dtype=torch.long), 1, 1)
    p, dtype = Program(), str(args[0].dtype)[len('torch.') :]
    loads = [p.load('src', k, (len(args[0]),), dtype) for k in range(len(args))]
    if power is not None:
        loads.append(p.const(power, 1, dtype))
    one = Pass(p, (Out(p.pointwise(op, *loads), 'sum', dtype),), 'dst')
    inputs = {('src', k): x[None] for k, x in enumerate(args)}
    (out,), _ = run_pass_cpu(one, graph, inputs, args[0].dtype, None)
    return out[0]


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, math.inf, -math.inf, math.nan])


def wide_range(dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes, and multiples of pi / 2, near which sines are small."""
    x = torch.cat([
        torch.linspace(-80, 80, 3001), torch.logspace(-30, 30, 999),
        torch.arange(-1000, 1000) * (math.pi / 2),
    ])  # fmt: skip
    return torch.cat([x, -x, SPECIAL]).to(dtype)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
@pytest.mark.parametrize('channels', [2, 3, 4, 8, 16, 32, 48])
@pytest.mark.parametrize('op', ['sum', 'amax', 'amin'])
def test_reductions_of_heads(op: str, channels: int, dtype: torch.dtype) -> None:
    """Of numbers of an edge that are some for each head; tiles end with any number of edges."""
    torch.manual_seed(channels)
    for kind in ('square', 'sparse'):
        case = Case(kind, dtype)
        p = case.program
        x = p.pointwise('exp', case.load('edge', (3, channels)))
        total = p.reduce(op, x, (1,))
        whole = p.pointwise('mul', x, p.view(total, (3, 1)))
        # Nothing of another head or edge.
        case.inputs['edge', 0][0, 1, 0] = math.inf
        case.inputs['edge', 0][-1, 0, -1] = math.nan
        case.check([total, whole], ['edge', 'edge'], 'dst')


@pytest.mark.parametrize('op', [
    'exp', 'exp2', 'log', 'log2', 'log10', 'log1p', 'expm1', 'tanh', 'sigmoid', 'erf', 'sin', 'cos',
    'asin', 'acos', 'atan',
])  # fmt: skip
def test_relative_error_in_float32(op: str) -> None:
    x = wide_range(torch.float32)
    if op in ('asin', 'acos'):
        x = torch.cat([torch.linspace(-1.01, 1.01, 3001), SPECIAL])
    expected = UNARY[op](x.double())
    expected[expected.abs() > torch.finfo(torch.float32).max] *= math.inf
    out = pointwise_of(op, x).double()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize('op', ['log', 'sin', 'cos'])
def test_relative_error_in_float64(op: str) -> None:
    x = wide_range(torch.float64)
    out, expected = pointwise_of(op, x), UNARY[op](x)
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=0, equal_nan=True)


@pytest.mark.parametrize('op', ['pow', 'atan2'])
def test_relative_error_of_two_in_float32(op: str) -> None:
    x, y = torch.cartesian_prod(SPECIAL, SPECIAL).unbind(1)
    many = wide_range(torch.float32)
    x = torch.cat([x, many, many[:40]])
    y = torch.cat([y, many.flip(0), torch.arange(-20, 20)])
    expected = BINARY[op](x.double(), y.double())
    expected[expected.abs() > torch.finfo(torch.float32).max] *= math.inf
    out = pointwise_of(op, x, y).double()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('power', [-2.0, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0])
def test_constant_powers(power: float, dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-4, 4, 101, dtype=dtype), SPECIAL.to(dtype)])
    out = pointwise_of('pow', x, power=power)
    torch.testing.assert_close(out, x.pow(power), rtol=1e-6, atol=0, equal_nan=True)


def test_slices_of_joined_values_are_the_parts() -> None:
    p = Program(by_parts=True)
    a, b = (p.view(p.load('src', k, (8,), 'float32'), (8, 1)) for k in range(2))
    both = p.cat([a, b], 1)
    assert p.slice(both, 1, 1, 1) == b
    zero = p.expand(p.const(0.0, 2, 'float32'), (8, 1))
    padded = p.pointwise('add', p.cat([a, zero], 1), p.cat([zero, b], 1))
    assert [p.slice(padded, 1, k, 1) for k in range(2)] == [a, b]
    assert p[p.slice(both, 1, 0, 2)].op == 'cat'
    wide = p.cat([p.load('src', 2, (8, 3), 'float32'), a], 1)
    assert p[p.slice(wide, 1, 2, 2)].op == 'slice'
    assert p.reduce('sum', both, (1,)) == p.pointwise('add', a, b)
    assert p[p.reduce('sum', wide, (1,))].op == 'sum'
    assert p[p.reduce('amax', both, (1,))].op == 'amax'


def test_parts_without_slices_if_the_same_inputs_get_gradients() -> None:
    p = Program()
    a, b = (p.load('src', k, (8,), 'float32') for k in range(2))
    one, other = (p.slice(p.cat([a, b], 0), 0, k, 8) for k in (0, 8))
    new, (product,) = p.with_parts([p.pointwise('mul', one, other)])
    assert new[product].op == 'mul'
    assert all(new[arg].op == 'load' for arg in new[product].args)
    for outputs in ([one], [p.slice(p.cat([p.detach(a), a], 0), 0, 0, 8)]):
        assert p.with_parts(outputs) == (p, outputs)
    assert p.with_parts([one, other])[0] is not p


def test_a_sum_of_gradients_of_slices_is_their_join() -> None:
    p = Program()
    a, b = (p.load('src', k, (2,), 'float32') for k in range(2))
    zero = p[p.const(0, 1, 'float32')]
    zeros = [p.add('const', (), zero.attrs, (n,), 'float32') for n in range(4)]
    total = p[p.pointwise('add', p.cat([a, zeros[3]], 0), p.cat([zeros[3], b], 0))]
    assert total.op == 'cat'
    assert [part for part in total.args if p[part].op != 'const'] == [a, b]
    assert [p[part].shape for part in total.args if p[part].op == 'const'] == [(1,)]
    crossing = p.cat([zeros[1], a, zeros[2]], 0)
    assert p[p.pointwise('add', p.cat([a, zeros[3]], 0), crossing)].op == 'add'


def test_repeated_values_are_computed_once() -> None:
    p = Program()
    a, b = (p.load('edge', k, (1,), 'float32') for k in range(2))
    wide = p.pointwise('mul', p.expand(a, (8,)), p.expand(b, (8,)))
    assert wide == p.expand(p.pointwise('mul', a, b), (8,))
    row = p.load('src', 0, (8,), 'float32')
    assert p[p.pointwise('mul', p.expand(a, (8,)), row)].op == 'mul'


def test_a_gradient_of_a_square_doubles_its_smaller_factor() -> None:
    p = Program()
    g, x, h = (
        p.load('dst', 0, (1,), 'float32'),
        *(p.load('src', k, (8,), 'float32') for k in (1, 2)),
    )
    product = p.pointwise('mul', p.expand(g, (8,)), x)
    total = p.pointwise('add', p.pointwise('add', h, product), product)
    twice = p.pointwise('mul', g, p.const(2.0, 1, 'float32'))
    assert total == p.pointwise('add', h, p.pointwise('mul', twice, x))


@pytest.mark.parametrize('row_role', ['dst', 'src'])
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('width', [1, 5, 16, 33, 64, 65, 100, 193, 200])
def test_gate(width: int, kind: str, row_role: str) -> None:
    case = Case(kind)
    p = case.program
    k, q, v = case.load('dst', (width,)), case.load('src', (width,)), case.load('src', (width,))
    w, one = case.load('param', (width,)), case.load('edge', (1,))
    gate = p.pointwise('sigmoid', p.pointwise('add', k, q))
    at = p.pointwise('mul', p.pointwise('mul', p.pointwise('mul', gate, v), w), one)
    case.check([at, at, at, at, at], ['sum', 'mean', 'max', 'min', 'total'], row_role)
    case.check([at], ['edge'], row_role)


@pytest.mark.parametrize('row_role', ['dst', 'src'])
@pytest.mark.parametrize('heads', [1, 3])
@pytest.mark.parametrize('sizes', [(1, 1), (5, 7), (16, 32), (40, 33)])
def test_linear_map_and_its_gradients(sizes: tuple[int, int], heads: int, row_role: str) -> None:
    inner, out = sizes
    case = Case('square')
    p = case.program
    lead = () if heads == 1 else (heads,)
    a, g = case.load('edge', (*lead, inner)), case.load('grad', (*lead, out))
    w = case.load('param', (inner, out))
    y = p.pointwise('relu', lowered(p, a, w))
    wide_g, wide_a = p.view(g, (*lead, 1, out)), p.view(a, (*lead, inner, 1))
    full_w = p.view(w, (*(1,) * len(lead), inner, out))
    back = p.reduce('sum', p.pointwise('mul', wide_g, full_w), (len(lead) + 1,))
    by_weight = p.pointwise('mul', wide_g, wide_a)
    if lead:
        by_weight = p.reduce('sum', by_weight, (0,))
    turned = p.permute(p.view(by_weight, (inner, out)), (1, 0))
    case.check([y, p.view(back, (*lead, inner))], ['sum', 'edge'], row_role)
    case.check([by_weight, turned], ['total', 'total'], row_role)


def test_linear_map_does_not_make_the_products() -> None:
    case = Case('square', torch.float32)
    p = case.program
    a, g = case.load('edge', (16,)), case.load('grad', (64,))
    w = case.load('param', (16, 64))
    outer = p.pointwise('mul', p.view(g, (1, 64)), p.view(a, (16, 1)))
    back = p.reduce('sum', p.pointwise('mul', p.view(g, (1, 64)), w), (1,))
    for at, kind in ((lowered(p, a, w), 'sum'), (outer, 'total'), (back, 'edge')):
        one = Pass(p, (Out(at, kind, 'float32'),), 'dst')
        code = one.code_for(torch.float32, case.inputs)
        edges, size = code.code[:2].tolist()
        assert size // edges <= 16 + 64


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('width', [1, 3, 4, 8, 13, 16, 35])
def test_sums_of_products(width: int, dtype: torch.dtype) -> None:
    """By heads, with values that heads share, and over all dimensions."""
    case = Case('hubs', dtype)
    p = case.program
    q, k = case.load('dst', (5, width)), case.load('src', (5, width))
    for role in ('edge', 'dst'):
        shared, heads = case.load(role, (1, width)), case.load('edge', (5, 1))
        for x in (k, shared, heads):
            case.inputs[p[x].attrs][:2].fill_(math.inf)
        ats = [p.reduce('sum', p.pointwise('mul', q, x), (1,)) for x in (k, shared, heads)]
        whole = p.reduce('sum', p.pointwise('mul', k, shared), (0, 1))
        by_channel = p.reduce('sum', p.pointwise('mul', q, k), (0,))
        for row_role in ('dst', 'src'):
            case.check([*ats, whole], ['sum', 'max', 'sum', 'mean'], row_role)
            case.check([by_channel], ['edge'], row_role)


def test_sum_of_products_does_not_make_them() -> None:
    case = Case('square', torch.float32)
    p = case.program
    q, k = case.load('dst', (8, 16)), case.load('src', (8, 16))
    at = p.reduce('sum', p.pointwise('mul', q, k), (1,))
    one = Pass(p, (Out(at, 'sum', 'float32'),), 'dst')
    code = one.code_for(torch.float32, case.inputs)
    edges, size = code.code[:2].tolist()
    assert size // edges == 8


def test_extremes_take_nan_and_the_first() -> None:
    case = Case('hubs')
    at = case.load('edge', (19,))
    x = case.inputs['edge', 0]
    x.copy_(torch.randint(3, x.shape))
    x[torch.rand(x.shape) < 0.003] = math.nan
    x[torch.rand(x.shape) < 0.05] = -math.inf
    for row_role in ('dst', 'src'):
        case.check([at, at], ['max', 'min'], row_role)


@pytest.mark.parametrize('row_role', ['dst', 'src'])
@pytest.mark.parametrize('width', [3, 40, 130])
def test_picked(width: int, row_role: str) -> None:
    case = Case('square')
    p = case.program
    grad = torch.randn(case.num_dst, width).double()
    (_,), (arg,) = case.run([Out(case.load('edge', (width,)), 'max', 'float64')], 'dst')
    case.inputs['grad', 9], case.inputs['arg', 9] = grad, arg
    at = p.add('load', (), ('picked', 9), (width,), 'float64', 4)
    at = p.pointwise('mul', at, case.load('src', (width,)))
    case.check([at, at], ['sum', 'edge'], row_role)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision(dtype: torch.dtype) -> None:
    case = Case('square', dtype)
    p = case.program
    x, y = case.load('src', (21,)), case.load('dst', (21,))
    w = case.load('param', (21,))
    b = case.load('edge', (21,), torch.bool)
    i = case.load('edge', (1,), torch.int64)
    at = p.pointwise('where', b, p.pointwise('mul', p.pointwise('mul', x, w), i), y)
    p.values[at] = p.values[at]._replace(dtype=str(dtype)[6:])
    for row_role in ('dst', 'src'):
        case.check([at, at, at], ['sum', 'edge', 'total'][:2] + ['mean'], row_role)
    outs, _ = case.run([Out(at, 'sum', str(dtype)[6:])], 'dst')
    assert outs[0].dtype == dtype


@pytest.mark.parametrize('width', [1, 50, 200])
def test_dropout(width: int) -> None:
    case = Case('square')
    p = case.program
    v = case.load('edge', (width,))
    keep, other = p.keep(0, 0.25, (width,), 'float64'), p.keep(1, 0.25, (width,), 'float64')
    at = p.pointwise('mul', v, keep)
    outs = [Out(keep, 'edge', 'float64'), Out(other, 'edge', 'float64'), Out(at, 'sum', 'float64')]
    found = [
        case.run(outs, row_role, torch.tensor([seed]))[0]
        for row_role, seed in (('dst', 5), ('src', 5), ('dst', 6))
    ]
    mask = found[0][0]
    assert torch.equal(mask, found[1][0])
    assert not torch.equal(mask, found[2][0])
    assert not torch.equal(mask, found[0][1])
    assert mask.unique().tolist() == [0.0, 1 / 0.75]
    assert 0.1 < (mask == 0).double().mean() < 0.4
    x = case.inputs['edge', 0] * mask
    expected = torch.zeros(case.num_dst, width).double().index_add(0, case.edge_index[1], x)
    torch.testing.assert_close(found[0][2], expected)


def test_bad_code_is_refused() -> None:
    case = Case('square')
    at = case.load('src', (4,))
    one = Pass(case.program, (Out(at, 'sum', 'float64'),), 'dst')
    code = one.code_for(torch.float64, case.inputs)
    graph = case.graph
    call: Callable[[Tensor], None] = lambda words: torch.ops.pyg_fast.message_pass(  # noqa: E731
        graph.rowptr, graph.col, graph.perm, graph.num_src, words, code.numbers,
        [case.inputs['src', 0]], code.row_indices, [torch.empty(37, 4).double()],
        [0], [], None, True, 3,
    )  # fmt: skip
    call(code.code)
    for place in range(len(code.code)):
        for value in (-1, 1 << 41):
            words = code.code.clone()
            words[place] = value
            try:
                call(words)
            except RuntimeError as error:
                assert 'code is not that of a message' in str(error)  # noqa: PT017
    with pytest.raises(RuntimeError, match='code is not that'):
        call(code.code[:-1])


# Heads and channels: of whole vectors, of parts of one, and of neither.
HEADS = (
    (1, 8), (8, 8), (3, 8), (8, 16), (5, 2), (8, 2), (4, 4), (16, 4), (2, 32), (3, 10), (7, 1),
    (1, 70),
)  # fmt: skip


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize(('heads', 'channels'), HEADS)
def test_heads(heads: int, channels: int, dtype: torch.dtype) -> None:
    """Dot products of heads, and sums of products with one factor for each head."""
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for kind, row_role in (('square', 'src'), ('hubs', 'dst'), ('wide', 'dst')):
        case = Case(kind, dtype)
        p = case.program
        q, k = case.load('dst', (heads, channels)), case.load('src', (heads, channels))
        shared, factor = case.load('edge', (1, channels)), case.load('src', (heads, 1))
        pairs = ((q, k), (q, shared), (shared, k))
        dots = [p.reduce('sum', p.pointwise('mul', x, y), (1,)) for x, y in pairs]
        case.check(dots, ['edge', 'sum', 'mean'], row_role, tolerance)
        computed = p.pointwise('exp', p.pointwise('mul', dots[0], p.const(0.1, 2, p[k].dtype)))
        of_shared = p.pointwise('mul', p.expand(shared, (heads, channels)), computed)
        sums = [
            p.pointwise('mul', k, computed), p.pointwise('mul', factor, q),
            p.view(of_shared, (heads * channels,)),
            p.pointwise('mul', k, p.pointwise('sigmoid', q)),
            p.pointwise('mul', k, p.const(2.0, 2, p[k].dtype)),
        ]  # fmt: skip
        case.check(sums, ['sum', 'mean', 'sum', 'sum', 'mean'], row_role, tolerance)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize(('heads', 'channels'), [*HEADS, (70, 1), (1, 1)])
def test_joint_softmax(heads: int, channels: int, dtype: torch.dtype) -> None:
    """A softmax and averages by it, in one pass: rows of many tiles, and scores of any size."""
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    for spread in (1.0, 200.0, 1e30):
        case = Case('hubs', dtype)
        case.edge_index = case.edge_index.repeat(1, 40)  # 10,000 edges of one row.
        case.num_edges = case.edge_index.size(1)
        case.graph = Graph.from_edge_index(case.edge_index, case.num_src, case.num_dst)
        p, (src, dst) = case.program, case.edge_index
        score, x = case.load('edge', (heads, 1)), case.load('src', (heads, channels))
        row = case.load('dst', (heads, channels))
        case.inputs['edge', 0].mul_(spread)[::7] = -math.inf
        case.inputs['edge', 0][dst == dst[dst != 7][0]] = -math.inf
        half = p.pointwise('mul', score, p.const(0.5, 2, p[score].dtype))
        powers = p.add('load', (), ('powers', 0), (heads, 1), 'float32', 4)
        other = p.pointwise('neg', p.pointwise('mul', powers, row))
        averages = [
            p.pointwise('mul', x, powers), p.expand(powers, (heads, channels)),
            p.view(other, (heads * channels,)),
        ]  # fmt: skip
        outs = [Out(half, 'softmax', 'acc'), *(Out(at, 'weighted', 'acc') for at in averages)]
        (most, *found), (scale, *_) = case.run(outs, 'dst')
        scores = case.inputs['edge', 0].double() / 2
        top, alpha, mass = softmax_of(scores, dst, case.num_dst)
        some = torch.bincount(dst, minlength=case.num_dst) > 0
        assert scale is not None
        below = is_base(most[some], top[some])
        torch.testing.assert_close(
            scale[some].double() * below.exp(), 1 / mass.nan_to_num(0)[some],
            rtol=tolerance, atol=0,
        )  # fmt: skip
        own_x, own_row = case.inputs['src', 1].double(), case.inputs['dst', 2].double()
        ones = alpha.expand(-1, -1, channels)
        for out, each in zip(found, (own_x[src] * alpha, ones, -own_row[dst] * alpha), strict=True):
            expected = torch.zeros(case.num_dst, heads, channels, dtype=torch.float64)
            expected.index_add_(0, dst, each)
            torch.testing.assert_close(
                out.double().view_as(expected), expected, rtol=tolerance, atol=tolerance,
                equal_nan=True,
            )  # fmt: skip


def softmax_of(scores: Tensor, dst: Tensor, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest score of each destination, the softmax, and the sums of exponentials."""
    index = dst.view(-1, *(1,) * (scores.dim() - 1)).expand_as(scores)
    zero = scores.new_zeros(num_dst, *scores.shape[1:])
    top = zero.scatter_reduce(0, index, scores, 'amax', include_self=False)
    power = (scores - top[dst]).exp()
    mass = zero.index_add(0, dst, power)
    return top, power / mass[dst], mass


def is_base(most: Tensor, top: Tensor) -> Tensor:
    """How far exponentials are relative to less than the largest score: at most 4."""
    below = torch.where(most == top, 0, top.double() - most.double())
    assert ((below >= 0) & (below <= 4.001)).all()
    return below


def test_softmax_of_chunks() -> None:
    """Where a pass runs for chunks of columns, its softmax is one of each column."""
    case = Case('hubs')
    p = case.program
    score, x = case.load('edge', (150,)), case.load('src', (150,))
    powers = p.add('load', (), ('powers', 0), (150,), 'float32', 4)
    outs = [Out(score, 'softmax', 'acc'), Out(p.pointwise('mul', x, powers), 'weighted', 'acc')]
    (most, found), _ = case.run(outs, 'dst')
    src, dst = case.edge_index
    top, alpha, _ = softmax_of(case.inputs['edge', 0], dst, case.num_dst)
    is_base(most, top)
    expected = torch.zeros_like(top).index_add_(0, dst, alpha * case.inputs['src', 1][src])
    torch.testing.assert_close(found, expected)


def test_shares_do_not_matter() -> None:
    """Results and sums over all edges are those of one thread, bit for bit."""
    case = Case('hubs', torch.float32)
    p = case.program
    q, k = case.load('dst', (3, 8)), case.load('src', (3, 8))
    score = p.reduce('sum', p.pointwise('mul', q, k), (1,))
    powers = p.add('load', (), ('powers', 0), (3, 1), 'float32', 4)
    outs = [
        Out(score, 'softmax', 'acc'), Out(p.pointwise('mul', k, powers), 'weighted', 'acc'),
        Out(q, 'total', 'acc'),
    ]  # fmt: skip
    several, _ = case.run(outs, 'dst')
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        single, _ = case.run(outs, 'dst')
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, several, single))


@pytest.mark.parametrize('kind', ['edge', 'sum', 'total'])
def test_constants_of_several_chunks(kind: str) -> None:
    """As the gradient of edge features that a message only compares."""
    case = Case('square')
    at = case.program.add('const', (), ((0.25).hex(),), (130,), 'float64', 0)
    (out,), _ = case.run([Out(at, kind, 'float64')], 'dst')
    share = out.sum(0) if kind == 'total' else out
    degree = case.edge_index[1].bincount(minlength=case.num_dst).view(-1, 1)
    count = {'edge': 1, 'sum': degree, 'total': case.num_edges}[kind]
    assert share.equal(torch.full_like(share, 0.25) * count)


def test_a_square_has_no_power_in_its_gradient() -> None:
    program = Program()
    x = program.add('load', (), ('edge', 0), (4,), 'float32', EDGE)
    assert program.pointwise('pow', x, program.const(1.0, 1, 'float32')) == x
