"""Generated CUDA kernels compile for GPUs that this machine need not have."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import conv as pyg
from torch_geometric.utils import softmax

import pyg_fast
from pyg_fast.nn import FusedGATv2Conv, gat
from tests._report import why_pygs

from ._parts import (
    FORMS,
    Form,
    Passes,
    Plan,
    Recipe,
    combine_kernel,
    jit_function,
    statistics_blocks,
    statistics_kernel,
)

triton = pytest.importorskip('triton')


class Drops(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.nn.functional.dropout((x_i * x_j).softmax(-1), 0.5, self.training)


class Residual(MessagePassing):
    """Its message is no multiple of its softmax."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        return x_j + softmax((x_i * x_j).sum(-1, keepdim=True), index, None, size_i) * x_j


class Angles(MessagePassing):
    """Functions that a library of the GPU has."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        bounded = torch.tanh(x_i + x_j) * 0.9
        return torch.atan2(x_i, x_j) + bounded.acos() * bounded.asin() + torch.atan(x_j)


class Rotates(MessagePassing):
    """Values of edges that are half as wide as the result."""

    def forward(self, x: Tensor, edge_index: Tensor, angle: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, angle=angle)

    def message(self, x_j: Tensor, angle: Tensor) -> Tensor:
        (a, b), cos, sin = x_j.chunk(2, -1), angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


LAYERS = {
    'ResGated': lambda: pyg.ResGatedGraphConv(64, 64),
    'GINE': lambda: pyg.GINEConv(torch.nn.Linear(64, 64), edge_dim=16),
    'GINE of 24': lambda: pyg.GINEConv(torch.nn.Linear(64, 64), edge_dim=24),
    'GINE, narrow': lambda: pyg.GINEConv(torch.nn.Linear(16, 16), edge_dim=16),
    'PNA': lambda: pyg.PNAConv(64, 64, ['mean', 'max', 'std'], ['identity'], torch.tensor([0, 5])),
    'FeaSt': lambda: pyg.FeaStConv(64, 8, heads=2),
    'Transformer': lambda: pyg.TransformerConv(64, 8, heads=8),
    'Transformer, edges': lambda: pyg.TransformerConv(64, 8, heads=8, edge_dim=16),
    'Transformer, tiles of heads': lambda: pyg.TransformerConv(64, 24, heads=3),
    'Transformer, wide tiles': lambda: pyg.TransformerConv(64, 64, heads=4, edge_dim=16),
    'PointTransformer': lambda: pyg.PointTransformerConv(64, 64),
    'RGAT': lambda: pyg.RGATConv(
        64, 4, 3, heads=2, dim=2, attention_mode='multiplicative-self-attention', mod='additive'
    ),
    'Drops': Drops,
    'Residual': Residual,
    'Angles': Angles,
    'Rotates': Rotates,
}


def plan_of(name: str, dtype: torch.dtype = torch.float32) -> Plan:
    """What a call of the layer made of its message."""
    if name.startswith('GATv2'):
        layer = FusedGATv2Conv(64, 8, heads=8, edge_dim=int(name.rsplit(' ', 1)[1]))
        layer(torch.rand(9, 64), torch.randint(9, (2, 30)), torch.rand(30, layer.edge_dim))
        assert not why_pygs(layer)
        return gat._entries[layer].last
    conv = pyg_fast.accelerate(LAYERS[name]()).to(dtype)
    x = torch.rand(9, 16 if 'narrow' in name else 64, dtype=dtype)
    edges = torch.randint(9, (2, 30))
    widths = {'GINE': 16, 'GINE, narrow': 16, 'GINE of 24': 24, 'Transformer, edges': 16}
    widths |= {'Rotates': 32, 'Transformer, wide tiles': 16}
    if name == 'PointTransformer':
        conv(x, torch.rand(9, 3), edges)
    elif name == 'RGAT':
        conv(x, edges, torch.randint(3, (30,)))
    else:
        conv(x, edges, *([torch.rand(30, widths[name], dtype=dtype)] if name in widths else []))
    assert why_pygs(conv) == ''
    return conv._fused_entry.last


def recipes(name: str, dtype: torch.dtype = torch.float32) -> Iterator[Recipe]:
    """The kernels of a training step."""
    plan = plan_of(name, dtype)
    passes = Passes(plan)
    needs = tuple(True for _ in plan.inputs)
    backward = passes.backward(needs)
    joint = passes.joint_pass(True)
    if joint is not None:
        yield joint.recipe(torch.float32)
    for n in range(len(plan.softmaxes)):
        yield passes.softmax_pass(n).recipe(torch.float32)
        if not passes.multiples[n]:
            yield passes.dot_pass(n).recipe(torch.float32)
    yield passes.forward_passes(backward.local, False)[0].recipe(torch.float32)
    for each in backward.passes:
        yield each.pass_.recipe(torch.float32)


def test_a_result_in_two_types_is_summed_once() -> None:
    """Of an attention, which writes it in its type, and as the backward pass reads it."""
    passes = Passes(plan_of('Transformer, edges'))
    once, twice = (passes.joint_pass(True, True, copies) for copies in (False, True))
    assert once is not None
    assert twice is not None
    count = len(once.outs) - 1
    assert [out.kind for out in twice.outs] == ['softmax', *['weighted'] * 2 * count]
    texts = [each.recipe(torch.float32).source.text for each in (once, twice)]
    assert texts[0].count(' * s0_0f + ') == texts[1].count(' * s0_0f + ') > 0
    stores = [text.count('tl.store(out') - 1 for text in texts]  # without that of the softmax
    assert stores[1] == 2 * stores[0]


def compiled(
    text: str, name: str, constants: dict[str, Any], warps: int, capability: int,
    features: str = '*fp32',
) -> str:  # fmt: skip
    """The assembly code of a kernel, for such pointers to features of nodes and edges."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = jit_function(text, name)
    has_softmax = 'exp_of_minus(' in text or 'b0 = 1.0 / b0' in text
    kinds = {'seed_at': '*i64', 'size': 'i32', 'longest': 'i32'}
    of_graph = ['rowptr', 'col', 'perm', 'owner', 'long_row', 'long_shift', 'long_ptr']
    kinds |= dict.fromkeys(of_graph, '*i32')

    def kind(parameter: str) -> str:
        if parameter in constants:
            return 'constexpr'
        is_place = not has_softmax and re.fullmatch(r'p?arg\d*', parameter)
        is_number = re.fullmatch(r'num_\w+|size\d+', parameter)
        if re.fullmatch(r'(src|dst|edge|grad)\d+', parameter):
            return features
        return kinds.get(parameter, 'i32' if is_number else '*i32' if is_place else '*fp32')

    names = function.arg_names
    signature = {parameter: kind(parameter) for parameter in names}
    values = {(names.index(parameter),): value for parameter, value in constants.items()}
    aligned = {
        (k,): [['tt.divisibility', 16]] for k, p in enumerate(names) if signature[p][0] == '*'
    }
    out = triton.compile(
        ASTSource(function, signature, values, aligned),
        target=GPUTarget('cuda', capability, 32), options={'num_warps': warps},
    )  # fmt: skip
    ptx = out.asm['ptx']
    check_sums_of_threads(ptx)
    return ptx


def check_sums_of_threads(ptx: str) -> None:
    """All threads get the same sum: none fuses the product that is its own into an addition."""
    products = {*re.findall(r'mul\.f32\s+(%r\d+)', ptx)}
    shuffled = {*re.findall(r'shfl\.sync\.bfly\.b32\s+(%r\d+)', ptx)}
    for a, b in re.findall(r'add\.f32\s+%r\d+, (%r\d+), (%r\d+)', ptx):
        assert not (a in products and b in shuffled)
        assert not (b in products and a in shuffled)
    assert not shuffled & {*re.findall(r'fma\.rn\.f32.* (%r\d+);', ptx)}


def constants_of(recipe: Recipe) -> dict[str, Any]:
    constants = {'HAS_PERM': True, 'OFFSET': triton.language.int32, 'BE': recipe.tile.edges}
    constants |= {f'B{j}': n for j, n in enumerate(recipe.tile.columns)}
    steps = re.findall(r'(STEP_\w+): tl', recipe.source.text)
    # Columns of a wider matrix.
    return {**constants, **dict.fromkeys(steps, 320), 'STAGES': recipe.tile.stages}


COMPILED = [*LAYERS, 'GATv2, edges of 16', 'GATv2, edges of 24']


@pytest.mark.parametrize('name', COMPILED)
def test_compiles(name: str) -> None:
    for k, recipe in enumerate(recipes(name), COMPILED.index(name)):
        if 'wide' in name and recipe.wide:
            recipe = recipe.wide
        constants, source = constants_of(recipe), recipe.source
        # All three have the same sums; compiling takes long.
        capability = 80 if k % 2 else 90
        text = (source.divides, source.text, source.of_groups)[k % 3]
        if text == source.divides:
            constants['LANES'] = 8
        ptx = compiled(text, source.name, constants, recipe.tile.warps, capability)
        assert f'.target sm_{capability}' in ptx
        assert source.has_dots or 'mma' not in ptx  # TF32 would round.


def test_wide_tiles_of_bfloat16() -> None:
    """Loads are under way, and two numbers are converted at once. A thread with one head computes
    one exponential for an edge, though it has many channels."""
    found = [recipe.wide for recipe in recipes('Transformer, wide tiles', torch.bfloat16)]
    wide = [recipe for recipe in found if recipe is not None]
    assert [recipe.source.of_softmax for recipe in wide] == [True, False]
    for recipe in wide:
        source, constants = recipe.source, constants_of(recipe)
        ptx = compiled(source.text, source.name, constants, recipe.tile.warps, 90, '*bf16')
        assert 'cp.async.cg' in ptx
        assert '0xffff0000' in ptx
        assert ptx.count('ex2.approx.ftz') == source.of_softmax


def test_edge_features_are_mapped_for_heads_at_once() -> None:
    """By a product of blocks, as is the gradient of the weight."""
    forward, *_, backward, _ = (recipe.source.text for recipe in recipes('GATv2, edges of 16'))
    assert re.search(r'tl\.sum\(tl\.expand_dims\(.* \* tl\.expand_dims\(.*axis=1\)', forward)
    assert re.search(r'tl\.sum\(tl\.expand_dims\(.* \* tl\.expand_dims\(.*axis=0\)', backward)


def test_channels_of_a_narrow_gradient_are_side_by_side() -> None:
    assert all(recipe.source.text.count('tl.cos(') <= 3 for recipe in recipes('Rotates'))


def test_values_for_a_later_pass_are_not_computed_again() -> None:
    """They are stored where the pass over destinations has them."""
    *_, destinations, sources = (recipe.source.text for recipe in recipes('Transformer, edges'))
    assert destinations.count('tl.exp(') == 1
    assert 'tl.exp(' not in sources


def test_heads_are_in_tiles() -> None:
    found = {(recipe.tile.columns, recipe.num_tiles) for recipe in recipes(
        'Transformer, tiles of heads')}  # fmt: skip
    assert ((2, 32), 2) in found
    assert [recipe.wide.tile for recipe in recipes('Transformer, wide tiles') if recipe.wide]


@pytest.mark.parametrize('kinds', [
    ('sum',), ('mean', 'sum'), ('max', 'min', 'sum'), ('softmax', 'weighted', 'weighted'),
], ids=str)  # fmt: skip
@pytest.mark.parametrize('form', FORMS, ids=['blocks', 'few groups', 'many groups'])
def test_combinations_compile(kinds: tuple[str, ...], form: Form) -> None:
    text, constants = combine_kernel(kinds, form), {'ACC': triton.language.float32}
    ptx = compiled(text, 'message_combine', constants, form.warps, 80)
    assert ptx.count('st.global') >= len(kinds)


@pytest.mark.parametrize('sizes', [[8], [8, 16], [1500, 1]], ids=str)
def test_statistics_compile(sizes: list[int]) -> None:
    block, columns = statistics_blocks(sizes)
    constants = {'B': block, 'ACC': triton.language.float32}
    for k, (size, column) in enumerate(zip(sizes, columns, strict=True)):
        constants |= {f'S{k}': size, f'C{k}': column}
    text = statistics_kernel(len(sizes))
    ptx = compiled(text, 'message_statistics', constants, 4, 80)
    assert ptx.count('st.global') >= 4  # the sum, and three statistics side by side
