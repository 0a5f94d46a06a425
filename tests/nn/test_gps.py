"""GPSConv with attention over the graphs of a batch beside PyG's."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import GINEConv, GPSConv

import pyg_fast
from pyg_fast.nn import FusedGINConv, FusedGPSConv
from tests._report import what_ran, why_pygs

F, D = 8, 3  # channels of nodes and edges
SIZES = [3, 1, 40, 1, 30]


def layer(device: Any = 'cpu', dtype: torch.dtype = torch.float64, **kwargs: Any) -> GPSConv:
    torch.manual_seed(0)
    conv = GINEConv(nn.Sequential(nn.Linear(F, F), nn.ReLU()), edge_dim=D)
    return GPSConv(F, **{'conv': conv, 'heads': 2, **kwargs}).to(device, dtype)


def graphs(
    sizes: list[int], device: Any = 'cpu', dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Features of nodes and edges of graphs, and the graph of each node."""
    count = torch.tensor(sizes, dtype=torch.long)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), count)
    first = (count.cumsum(0) - count)[batch]
    ends = [first + torch.randint(2**20, batch.shape) % count[batch] for _ in range(4)]
    edge_index = torch.stack([torch.cat(ends[:2]), torch.cat(ends[2:])])
    x = torch.randn(batch.size(0), F, dtype=torch.float64).to(dtype)
    edge_attr = torch.randn(edge_index.size(1), D, dtype=torch.float64).to(dtype)
    found = {'x': x, 'edge_index': edge_index, 'batch': batch, 'edge_attr': edge_attr}
    return {name: value.to(device) for name, value in found.items()}


def run(conv: GPSConv, given: dict[str, Any]) -> tuple[Any, ...]:
    """Outputs, gradients, and what batch norms keep."""
    conv.zero_grad()
    x = given['x'].detach().requires_grad_()
    torch.manual_seed(1)
    out = conv(**{**given, 'x': x})
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=x.device)
    out.backward(weight.view(out.shape))
    grads = {name: p.grad for name, p in conv.named_parameters() if p.grad is not None}
    return out.detach(), x.grad, grads, conv.state_dict()


def assert_alike(ours: GPSConv, pygs: GPSConv, given: dict[str, Any], rtol: float = 1e-9) -> None:
    torch.testing.assert_close(run(ours, given), run(pygs, given), rtol=rtol, atol=rtol)
    assert what_ran(ours) == 'FusedGPSConv'


@pytest.mark.parametrize(
    'options',
    [
        {}, {'dropout': 0.5}, {'heads': 1, 'act': 'elu'}, {'norm': None},
        {'norm': 'graph_norm'}, {'norm': 'layer_norm', 'norm_kwargs': {'mode': 'graph'}},
        {'attn_kwargs': {'bias': False}}, {'attn_kwargs': {'kdim': F, 'vdim': F}}, {'conv': None},
    ],
)  # fmt: skip
def test_like_pyg(options: dict[str, Any], device: torch.device) -> None:
    """In training and evaluation; random numbers of features are those of PyG."""
    pygs = layer(device, **options)
    ours = pyg_fast.accelerate(copy.deepcopy(pygs))
    given = graphs(SIZES, device)
    for training in (True, False):
        assert_alike(ours.train(training), pygs.train(training), given)
    with torch.no_grad():
        torch.testing.assert_close(ours(**given), pygs(**given))
    assert_alike(ours, pygs, given | {'batch': None})
    assert_alike(ours, pygs, given | {'batch': given['batch'] * 3 + 1})


@given(st.lists(st.one_of(st.integers(0, 6), st.just(300)), min_size=1, max_size=5).filter(any))
def test_sizes_of_graphs(sizes: list[int]) -> None:
    pygs = layer(norm='layer_norm')
    ours = pyg_fast.accelerate(copy.deepcopy(pygs))
    assert_alike(ours, pygs, graphs(sizes))


@pytest.mark.parametrize(('dtype', 'rtol'), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_dtypes(dtype: torch.dtype, rtol: float, device: torch.device) -> None:
    pygs = layer(device, dtype, norm=None, conv=None, act='elu')
    ours, given = pyg_fast.accelerate(copy.deepcopy(pygs)), graphs(SIZES, device, dtype)
    for a, b in zip(run(ours, given)[:2], run(pygs, given)[:2], strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= rtol * b.abs().max()


def test_autocast(device: torch.device) -> None:
    """Products run in the half type, the residual sum in float32."""
    pygs, given = layer(device, torch.float32, norm=None), graphs(SIZES, device, torch.float32)
    ours = pyg_fast.accelerate(copy.deepcopy(pygs))
    with torch.autocast(device.type, torch.bfloat16):
        got, expected = ours(**given), pygs(**given)
    assert got.dtype == expected.dtype == torch.float32
    assert (got - expected).abs().max() <= 0.05 * expected.abs().max()
    assert why_pygs(ours) == ''


def test_dropout_of_attention(device: torch.device) -> None:
    """As of MultiheadAttention: in training alone, with PyG's mean."""
    pygs = layer(device, torch.float32, norm=None, attn_kwargs={'dropout': 0.5}, conv=None)
    ours = pyg_fast.accelerate(copy.deepcopy(pygs))
    given = graphs([4, 2], device, torch.float32)
    assert_alike(ours.eval(), pygs.eval(), given, 1e-4)
    ours.train(), pygs.train()
    attention = lambda: ours._attention(given['x'], given['batch'])  # noqa: E731
    many = torch.stack([attention() for _ in range(1000)])
    exact = ours.eval()._attention(given['x'], given['batch'])
    assert ((many.mean(0) - exact).abs() <= 5 * many.std(0) / 1000**0.5).all()
    ours.train()
    ours.attn.eval()  # Its own mode counts.
    assert torch.equal(attention(), attention())


def test_rows_of_one_kind_are_refused_as_by_pyg() -> None:
    """Errors of PyG's code stay PyG's; ours are typed."""
    ours, given = pyg_fast.accelerate(layer()), graphs(SIZES)
    with pytest.raises(RuntimeError):
        ours(**given | {'batch': given['batch'][:-1]})
    assert why_pygs(ours).startswith('a batch of shape')
    for how in ('kernel', 'pyg'):
        with pyg_fast.small_graphs(how), pytest.raises(ValueError, match='ascending order'):
            ours(**given | {'batch': given['batch'].flip(0)})
    with pytest.raises(IndexError, match="'batch' must hold numbers of graphs from 0 on, got -1"):
        ours(**given | {'batch': given['batch'] - 1})


def hooked(conv: GPSConv) -> None:
    conv.attn.register_forward_hook(lambda *_: None)


def patched(conv: GPSConv) -> None:
    conv.forward = conv.forward  # type: ignore[method-assign]


def replaced(conv: GPSConv) -> None:
    class Own(nn.MultiheadAttention):
        pass

    attn = Own(F, 2, batch_first=True).double()
    attn.load_state_dict(conv.attn.state_dict())
    conv.attn = attn


@pytest.mark.parametrize(
    ('options', 'change', 'reason'),
    [
        ({'attn_type': 'performer'}, None, "attn_type='performer'"),
        ({'attn_kwargs': {'add_bias_kv': True}}, None, 'add_bias_kv'),
        ({'attn_kwargs': {'add_zero_attn': True}}, None, 'add_zero_attn'),
        ({'attn_kwargs': {'dropout': 0.0}}, hooked, 'its attention has hooks or is patched'),
        ({}, replaced, 'its attention is a Own'),
        ({}, patched, 'its forward is patched'),
    ],
)
def test_what_stays_pygs(
    options: dict[str, Any], change: Callable[[GPSConv], None] | None, reason: str
) -> None:
    pygs = layer(**options)
    if change is not None:
        change(pygs)
    ours, given = pyg_fast.accelerate(copy.deepcopy(pygs)), graphs([3, 4])
    report, local = pyg_fast.accelerate_report(ours)
    assert reason in (report.reason or '')
    assert 'page' not in (report.cure or 'page')
    assert type(ours) is GPSConv
    assert local.reason is None  # The local layer is accelerated.
    torch.testing.assert_close(run(ours, given), run(pygs, given), rtol=1e-9, atol=1e-9)


def test_what_changes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call asks again."""
    ours, given = pyg_fast.accelerate(layer()), graphs([3, 4])
    expected = run(ours, given)
    for change in (hooked, replaced):
        other = copy.deepcopy(ours)
        change(other)
        torch.testing.assert_close(run(other, given)[:2], expected[:2])
        assert why_pygs(other)
    monkeypatch.setattr(GPSConv, 'forward', lambda self, x, *args, **kwargs: x)
    assert ours(**given) is given['x']
    assert why_pygs(ours) == 'its forward is patched'


def test_there_and_back() -> None:
    pygs = layer()
    names = list(pygs.state_dict())
    ours = pyg_fast.accelerate(copy.deepcopy(pygs))
    assert type(ours) is FusedGPSConv
    assert isinstance(ours, GPSConv)
    assert list(ours.state_dict()) == names
    given = graphs(SIZES)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_alike(other, copy.deepcopy(pygs), given)
    back = pyg_fast.restore(ours)
    assert type(back) is GPSConv
    assert type(back.conv) is GINEConv
    assert '_last_run' not in vars(back)
    own = FusedGPSConv(F, FusedGINConv(nn.Linear(F, F)), heads=2).double()
    assert repr(own).startswith('FusedGPSConv(8, conv=FusedGINConv(')
    base = own.to_base()
    assert type(base) is GPSConv
    assert base.attn is own.attn
    assert pyg_fast.restore(own) is own
    assert type(own) is FusedGPSConv


def test_compiled(device: torch.device) -> None:
    """Without a graph break, once for all sizes."""
    torch.compiler.reset()
    pygs = layer(device, conv=None, norm=None)
    ours = pyg_fast.accelerate(copy.deepcopy(pygs))
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend='aot_eager')
    for sizes in (SIZES, [9, 4]):
        given = graphs(sizes, device)
        torch.testing.assert_close(run(compiled, given)[:2], run(pygs, given)[:2])


def test_few_nodes_on_a_cpu() -> None:
    conv = pyg_fast.accelerate(GPSConv(8, None, heads=2))
    with pyg_fast.small_graphs('pyg'):
        for num_nodes, reason in ((100, '100 nodes are too few for a kernel to pay'), (1_300, '')):
            conv(torch.randn(num_nodes, 8), torch.empty(2, 0, dtype=torch.long),
                 torch.arange(num_nodes) // 10)  # fmt: skip
            assert why_pygs(conv) == reason
