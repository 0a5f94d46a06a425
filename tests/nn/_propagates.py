"""Random layers of message passing: the text of `message`, `aggregate` and `update`."""

import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401 (texts of layers read it, as the others)
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import degree, scatter, softmax  # noqa: F401

N, C, TYPES = 12, 6, 4

# Operations of values of `C` channels, one row for each edge or node. One that ends with a
# newline assigns to `{out}` itself.
UNARY = [
    'torch.sigmoid({0})', 'torch.tanh({0})', 'torch.relu({0})', '-{0}', '{0}.abs()',
    'torch.exp(-{0}.abs())', 'F.leaky_relu({0}, 0.2)', 'F.silu({0})', 'F.elu({0})',
    'F.softplus({0})', 'F.gelu({0})', '{0} * 0.5 - 1', '({0} * {0} + 1).sqrt()',
    '({0}.abs() + 0.5).log()', '{0}.clamp(-0.5, 0.7)', 'torch.sin({0})', '{0}.tanh().pow(3)',
    '{0}.softmax(-1)', '{0}.sum(-1, keepdim=True).expand_as({0})', '{0}[:, :1] * {0}',
    '{0} - {0}.mean(-1, keepdim=True)', '{0}.amax(-1, keepdim=True) + {0}',
    '{0}.view({0}.size(0), 2, -1).transpose(1, 2).reshape({0}.shape)',
    'torch.cat([{0}[:, 2:], {0}[:, :2]], -1)', '{0}.unflatten(-1, (2, -1)).softmax(1).flatten(1)',
    'torch.cat({0}.chunk(2, -1)[::-1], -1)', 'F.dropout({0}, 0.5, self.training)',
    '{0} * self.scale', '{0}.masked_fill({0} > 0.5, 0.25)', 'torch.where({0} > 0, {0}, 0.1)',
    '{0}.max(-1, keepdim=True).values * {0}',
]  # fmt: skip
BINARY = [
    '{0} + {1}', '{0} - {1}', '{0} * {1}', '{0} / ({1}.abs() + 1)', 'torch.maximum({0}, {1})',
    'torch.minimum({0}, {1})', 'torch.where({0} > {1}, {0}, {1} * 0.5)',
    '({0} * {1}).sum(-1, keepdim=True) + {0}', 'torch.lerp({0}, {1}, 0.3)',
    'torch.cat([{0}, {1}], -1)[:, 3:-3]', 'torch.stack([{0}, {1}], 1).amax(1)',
    '{0}.masked_fill({1} > 0.5, 0.25)', 'torch.addcmul({0}, {1}, {1}, value=0.1)',
    'self.both(torch.cat([{0}, {1}], -1))',
]  # fmt: skip
NORMS = [
    'self.norm({0})', 'F.layer_norm({0}, (6,))', 'F.rms_norm({0}, (6,))', 'self.batch_norm({0})',
    '{0} * {0}.var(-1, keepdim=True)', '{0} / ({0}.std(-1, keepdim=True) + 1)',
    'F.normalize({0}, dim=-1)', '{0}.norm(dim=-1, keepdim=True) + {0}',
]  # fmt: skip
GEOMETRY = [
    'torch.cross({0}.view(-1, 2, 3), ({1} + 1).view(-1, 2, 3), dim=-1).flatten(1)',
    '({0}.view(-1, 2, 3) @ {1}.view(-1, 3, 2) @ {0}.view(-1, 2, 3)).flatten(1)',
    'torch.bmm({0}.view(-1, 3, 2), {1}.view(-1, 2, 3))[:, :2].flatten(1)',
    "torch.einsum('ehc,ehd->ecd', {0}.view(-1, 3, 2), {1}.view(-1, 3, 2)).sum(1).repeat(1, 3)",
    '({0} - {1}).norm(dim=-1, keepdim=True) * {0}',
]  # fmt: skip
LINEAR = ['self.lin({0})', '{0} @ self.lin.weight', 'F.linear({0}, self.lin.weight)']
STOPS = [
    '{0}.detach()', '{0} * {1}.detach()',
    'with torch.no_grad():\n    {out} = {0} * {1}\n',
    'with torch.no_grad():\n    {out} = torch.relu({0})\n{out} = {out} * {1}\n',
]  # fmt: skip
WRITES = [
    '{out} = {0} * 1\n{out}.add_({1})\n', '{out} = {0} + 1\n{out}[:, :2] *= 2\n',
    '{out} = {0} * 2\n{out}[{out} < 0] = 0\n', '{out} = {0}.clone()\n{out}[:, 1] = {1}[:, 0]\n',
    '{out} = {0} - {1}\nF.relu({out}, inplace=True)\n', '{out} = {0} * 1\n{out} += {1}\n',
    '{out} = {0}\n{out} *= 2\n',
]  # fmt: skip
TABLES = [
    'self.emb(kind) * {0}', 'self.emb.weight[kind] + {0}', 'self.gates[kind].view(-1, 1) * {0}',
    'self.emb.weight.index_select(0, kind) - {0}',
    '(self.matrices[kind] @ {0}.unsqueeze(-1)).squeeze(-1)',
    'torch.bmm({0}.unsqueeze(1), self.matrices[kind]).squeeze(1)',
    'torch.where(kind.view(-1, 1) > 1, {0}, -{0})',
]  # fmt: skip
GATHERS = [
    'z[edge_index_i]', 'z[edge_index_j] * {0}', 'z[edge_index[0]] + {0}',
    'z.index_select(0, edge_index[1])', 'z[index] - {0}', 'torch.sigmoid(2 * z)[edge_index_j]',
    'self.rows[edge_index_j] * {0}', 'self.rows[edge_index_i]',
]  # fmt: skip
SOFTMAX = [
    'softmax({0}, index, num_nodes=size_i) * {1}', 'softmax({0}, index) + {1}',
    'softmax({0}, index, ptr, size_i)', 'softmax({0}.sum(-1, keepdim=True), index) * {1}',
    '(softmax(({0} * {1}).view(-1, 2, 3).sum(-1, keepdim=True), index, num_nodes=size_i)'
    ' * {0}.view(-1, 2, 3)).flatten(1)',
]  # fmt: skip
KEEPS = ['{out} = {0} * 1\nself.kept = {out}\n', '{out} = {0}\nself.kept = {out}.detach()\n']
OF_EDGES = [UNARY, BINARY, NORMS, GEOMETRY, LINEAR, STOPS, WRITES, TABLES, GATHERS, SOFTMAX, KEEPS]
OF_ROWS = [UNARY, BINARY, NORMS, LINEAR, STOPS, WRITES]

REDUCES = [
    *(f"scatter({{0}}, index, 0, dim_size, '{how}')" for how in ('sum', 'mean', 'max', 'min')),
    'scatter({0}, index, dim=0, dim_size=dim_size)',
    'self.aggr_module({0}, index, dim_size=dim_size)',
    'super().aggregate({0}, index, ptr, dim_size)',
    '{0}.new_zeros(dim_size, 6).index_add_(0, index, {0})',
    'torch.zeros(dim_size, 6, dtype={0}.dtype).index_add(0, index, {0})',
    '{0}.new_zeros(dim_size, 6).scatter_add_(0, index.view(-1, 1).expand_as({0}), {0})',
    '{0}.new_zeros(dim_size, 6).scatter_reduce(0, index.view(-1, 1).expand_as({0}), {0},'
    " 'amax', include_self=False)",
    'scatter(torch.cat([{0}, {1}], -1), index, 0, dim_size).chunk(2, -1)[1]',
    "scatter(softmax({0}, index, num_nodes=dim_size) * {1}, index, 0, dim_size, 'sum')",
    'torch.log(degree(index, dim_size, {0}.dtype) + 1).view(-1, 1)'
    ' * scatter({0}, index, 0, dim_size)',
]  # fmt: skip
AGGRS: list[Any] = [
    'sum', 'mean', 'max', 'min', 'var', 'std', 'softmax', ['mean', 'max', 'std'],
]  # fmt: skip
CONTAINERS = {
    'tuple': '({0}, {1})', 'list': '[{0}, {1}]', 'dict': "{{'a': {0}, 'b': {1}}}",
    'cat': 'torch.cat([{0}, {1}], -1)',
}  # fmt: skip
PARTS = {
    'tuple': 'p0, p1 = inputs', 'list': 'p0, p1 = inputs',
    'dict': "p0, p1 = inputs['a'], inputs['b']", 'cat': 'p0, p1 = inputs.chunk(2, dim=-1)',
}  # fmt: skip
ARGUMENTS = [
    'x_i', 'x_j', 'v_i', 'v_j', 'e', 'pair', 'kind', 'z', 'edge_index', 'edge_index_i',
    'edge_index_j', 'index', 'ptr', 'size_i', 'dim_size', 'x', 'h',
]  # fmt: skip


class Base(MessagePassing):
    """What the text of a random layer reads."""

    returns_kept = False

    def __init__(self, aggr: Any, flow: str) -> None:
        super().__init__(aggr, flow=flow)
        self.lin, self.both = nn.Linear(C, C), nn.Linear(2 * C, C)
        self.norm, self.batch_norm = nn.LayerNorm(C), nn.BatchNorm1d(C)
        self.emb, self.gates = nn.Embedding(TYPES, C), nn.Parameter(torch.randn(TYPES))
        self.matrices = nn.Parameter(torch.randn(TYPES, C, C) / 3)
        self.scale, self.rows = nn.Parameter(torch.randn(C)), nn.Parameter(torch.randn(N, C))
        for norm in (self.norm, self.batch_norm):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(
        self, x: Tensor, z: Tensor, edge_index: Tensor, e: Tensor, kind: Tensor
    ) -> list[Tensor]:
        self.kept = None
        out: Any = self.propagate(
            edge_index,
            x=x,
            v=self.lin(x),
            z=z,
            e=e,
            pair=(e[:, :1], e),
            kind=kind,
            h=x * 1,
            size=(x.size(0), x.size(0)),
        )
        outs = list(out.values()) if isinstance(out, dict) else [out]
        if isinstance(out, tuple):
            outs = list(out)
        return [*outs, self.kept] if self.returns_kept and self.kept is not None else outs


@dataclass(frozen=True)
class Propagate:
    """A layer; prints as its text."""

    text: str
    aggr: Any
    flow: str

    def layer(self, dtype: torch.dtype = torch.float64) -> Base:
        """The layer, in evaluation, as dropout draws other numbers than PyG's."""
        name = f'Random{abs(hash(self.text))}'
        source = self.text.replace('class Random', f'class {name}')
        space: dict[str, Any] = dict(globals())
        file = f'<{name}>'
        linecache.cache[file] = len(source), None, source.splitlines(True), file
        # Its globals are those of this module, where Dynamo looks for them.
        exec(compile(source, file, 'exec'), space)
        return space[name](self.aggr, self.flow).to(dtype).eval()

    def __repr__(self) -> str:
        return f'{self.text}# {self.aggr}, {self.flow}'


def _method(name: str, first: Sequence[str], body: Sequence[str]) -> str:
    """A method that takes what its body reads."""
    words = set(re.findall(r'(?<!\.)\b\w+\b(?!=)', '\n'.join(body)))
    arguments = ', '.join(['self', *first, *(each for each in ARGUMENTS if each in words)])
    lines = [f'        {line}\n' for line in '\n'.join(body).splitlines()]
    return ''.join([f'    def {name}({arguments}):\n', *lines])


class _Body:
    """The lines of a method, and the values that they have so far."""

    def __init__(self, draw: Callable[..., Any], values: Sequence[str], prefix: str) -> None:
        self.draw, self.values, self.prefix = draw, list(values), prefix
        self.lines: list[str] = []

    def add(self, operation: str) -> str:
        newest = st.sampled_from([self.values[0], *self.values])
        operands = [self.draw(newest), self.draw(newest)]
        out = f'{self.prefix}{len(self.lines)}'
        line = operation.format(*operands, out=out)
        self.lines.append(line.rstrip('\n') if line.endswith('\n') else f'{out} = {line}')
        self.values.insert(0, out)
        return out

    def steps(self, groups: Sequence[Sequence[str]], most: int) -> None:
        for _ in range(self.draw(st.integers(0, most))):
            self.add(self.draw(st.sampled_from(self.draw(st.sampled_from(groups)))))


@st.composite
def propagates(draw: Callable[..., Any], most: int = 3) -> Propagate:
    """Layers of up to :obj:`most` operations in each of their parts."""
    own = draw(st.booleans())  # whether it has an `aggregate`
    leaves = draw(st.lists(
        st.sampled_from(['x_j', 'v_j', 'e', 'x_i', 'v_i', 'pair[1]', '(pair[0] * x_j)']),
        min_size=1, max_size=3, unique=True,
    ))  # fmt: skip
    message = _Body(draw, leaves, 'm')
    message.steps(OF_EDGES, most)
    container = draw(st.sampled_from(['', *CONTAINERS])) if own else ''
    if container:
        pair = draw(st.permutations([*message.values[:2], leaves[0] + ' * 3']))
        returned = CONTAINERS[container].format(*pair)
    else:
        returned = message.values[0] if message.lines else f'{leaves[0]} * 1'
    methods = [_method('message', [], [*message.lines, f'return {returned}'])]
    several = own and draw(st.booleans())  # whether `aggregate` returns several tensors
    if own:
        methods.append(_aggregate(draw, container, several, most))
    aggr = draw(st.sampled_from(AGGRS[:6] if own else AGGRS))
    if not several and isinstance(aggr, str) and draw(st.booleans()):
        update = _Body(draw, ['inputs', 'h'], 'u')
        update.steps(OF_ROWS, 1)
        update.add(draw(st.sampled_from(BINARY)).replace('{1}', 'inputs'))
        methods.append(_method('update', ['inputs'], [*update.lines, f'return {update.values[0]}']))
    text = '\n'.join(['class Random(Base):', f'    returns_kept = {draw(st.booleans())}', *methods])
    return Propagate(text, aggr, draw(st.sampled_from(['source_to_target', 'target_to_source'])))


def _aggregate(draw: Callable[..., Any], container: str, several: bool, most: int) -> str:
    edges = _Body(draw, ['p0', 'p1'] if container else ['inputs'], 'a')
    if container:
        edges.lines.append(PARTS[container])
    edges.steps([UNARY, BINARY, NORMS], 1)
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        rows.append(edges.add(draw(st.sampled_from(REDUCES))))
        edges.values.remove(rows[-1])  # A result of nodes is no value to reduce.
    after = _Body(draw, [*rows, 'h'], 'r')
    after.steps(OF_ROWS, most - 1)
    after.add(draw(st.sampled_from(BINARY)).replace('{1}', rows[-1]))
    returned = after.values[0]
    if several:
        how = draw(st.sampled_from(['tuple', 'dict']))
        returned = CONTAINERS[how].format(*after.values[:2])
    return _method('aggregate', ['inputs'], [*edges.lines, *after.lines, f'return {returned}'])
