"""Random sequences of calls and writes, beside PyG's layers on the same tensors.

Whatever was called before, and in whichever way tensors were written since, a layer gives what
PyG's gives now. `PYG_FAST_SEQUENCES` says how many sequences are drawn on each device (100), and
`PYG_FAST_SEQUENCES_FROM` the seed of the first (0): a failure names the seed that draws it again.

Not drawn: writes into the data of a prepared graph, which are outside of the contract.
"""

import copy
import io
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from _captures import captured
from _raw_ops import raise_pending
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, Parameter, ReLU, Sequential
from torch.nn.modules.module import register_module_forward_hook
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

import pyg_fast
from pyg_fast import nn
from pyg_fast.transforms import ExecutionPaths, ToCSR

IN, HIDDEN, OUT, EDGE_DIM = 6, 5, 4, 2
COUNT = int(os.environ.get('PYG_FAST_SEQUENCES', 100))
FIRST = int(os.environ.get('PYG_FAST_SEQUENCES_FROM', 0))
CHUNKS = 10

# Layers -----------------------------------------------------------------------------------------


class Stack(Module):
    """What `PathPreparedGNN` is without paths, of PyG's layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        makers: dict[str, Callable[[int, int], Module]] = {
            'gcn': pyg.GCNConv,
            'sage': pyg.SAGEConv,
            'gin': lambda i, o: pyg.GINConv(Sequential(Linear(i, o), ReLU(), Linear(o, o))),
        }
        self.convs = ModuleList([makers[kind](IN, HIDDEN), makers[kind](HIDDEN, OUT)])
        self.act = ReLU()

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:
        return self.convs[1](self.act(self.convs[0](x, *edges)), *edges)


def mlp() -> Module:
    return Sequential(Linear(IN, HIDDEN), ReLU(), Linear(HIDDEN, OUT))


def flow(rng: random.Random) -> dict[str, Any]:
    return {'flow': rng.choice(['source_to_target'] * 2 + ['target_to_source'])}


def gcn_options(rng: random.Random) -> dict[str, Any]:
    options = {
        'improved': rng.random() < 0.3, 'bias': rng.random() < 0.7, **flow(rng),
        'normalize': rng.random() < 0.7, 'cached': rng.random() < 0.1,
    }  # fmt: skip
    # Without loops of its own PyG's cache would be the edge_index itself, and follow writes to it.
    if options['normalize'] and not options['cached'] and rng.random() < 0.3:
        options['add_self_loops'] = False
    return options


def sage_options(rng: random.Random) -> dict[str, Any]:
    return {
        'aggr': rng.choice(['mean', 'sum', 'max', 'mean', 'sum', 'max', 'min', ['mean', 'max']]),
        'normalize': rng.random() < 0.2, 'root_weight': rng.random() < 0.7,
        'project': rng.random() < 0.2, 'bias': rng.random() < 0.7, **flow(rng),
    }  # fmt: skip


def gin_options(rng: random.Random) -> dict[str, Any]:
    return {
        'nn': mlp(), 'eps': rng.choice([0.0, 0.5]), 'train_eps': rng.random() < 0.5, **flow(rng),
    }  # fmt: skip


def gat_options(rng: random.Random) -> dict[str, Any]:
    heads, concat = rng.choice([1, 2]), rng.random() < 0.7
    return {
        'out_channels': OUT // heads if concat else OUT, 'heads': heads, 'concat': concat,
        'add_self_loops': rng.random() < 0.7, 'residual': rng.random() < 0.3,
        'bias': rng.random() < 0.7, 'dropout': rng.choice([0.0, 0.0, 0.5]), **flow(rng),
    }  # fmt: skip


def gatv2_options(rng: random.Random) -> dict[str, Any]:
    return {**gat_options(rng), 'share_weights': rng.random() < 0.3}


# PyG's class, ours, and what both are made with; a drawn option for ours alone follows.
CONVS: dict[str, tuple[Any, Any, Callable[[random.Random], dict[str, Any]]]] = {
    'gcn': (pyg.GCNConv, nn.PathPreparedGCNConv, gcn_options),
    'sage': (pyg.SAGEConv, nn.PathPreparedSAGEConv, sage_options),
    'gin': (pyg.GINConv, nn.PathPreparedGINConv, gin_options),
    'gat': (pyg.GATConv, nn.FusedGATConv, gat_options),
    'gatv2': (pyg.GATv2Conv, nn.FusedGATv2Conv, gatv2_options),
    'maxk-gcn': (pyg.GCNConv, nn.MaxKGCNConv, gcn_options),
    'maxk-sage': (pyg.SAGEConv, nn.MaxKSAGEConv, sage_options),
    'maxk-gin': (pyg.GINConv, nn.MaxKGINConv, gin_options),
    'sampled-gcn': (pyg.GCNConv, nn.SampledGCNConv, gcn_options),
    'sampled-sage': (pyg.SAGEConv, nn.SampledSAGEConv, sage_options),
}
ACCELERATED = ('gcn', 'sage', 'gin', 'gat', 'gatv2')
ON_PATHS = ('gcn', 'sage', 'gin')
MODELS = ('gnn-gcn', 'gnn-sage', 'gnn-gin', 'maxk-gnn-gcn', 'maxk-gnn-sage', 'maxk-gnn-gin')
KINDS = (*ACCELERATED, *CONVS, *MODELS, *MODELS[:3])


def our_options(kind: str, options: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Options of ours with which it is PyG's layer."""
    if kind.startswith('maxk'):
        return {'k': rng.choice([None, OUT if kind == 'maxk-gcn' else IN])}
    if kind.startswith('sampled'):
        sample = rng.choice(['eval', 'always', 'never'])
        if options.get('cached') and sample == 'eval':
            sample = 'always'  # Else the graphs of training and of evaluation are kept apart.
        strategies = ['fastrand', 'adaptive', 'bucket', 'paper']
        if options.get('aggr', 'sum') in ('sum', 'mean'):
            strategies.append('unbiased')
        return {'num_samples': 200, 'strategy': rng.choice(strategies), 'sample': sample}
    return {}


def size_of(tensor: Tensor | None) -> float:
    """The largest entry, by its absolute value."""
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.detach().abs().max())


def tie(theirs: Module, ours: Module) -> None:
    """Gives both layers the same parameters and buffers."""
    for name, module in theirs.named_modules():
        other = ours.get_submodule(name)
        for own, given in (
            (module._parameters, other._parameters), (module._buffers, other._buffers),
        ):  # fmt: skip
            own.update({key: given[key] for key in own})


# Writes -----------------------------------------------------------------------------------------


def by_copy(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)


def by_view(tensor: Tensor, value: Tensor) -> None:
    half = tensor.size(0) // 2
    with torch.no_grad():
        tensor[half:].copy_(value[half:])


def by_base(tensor: Tensor, value: Tensor) -> None:
    """Through what the tensor is a view of."""
    if not isinstance(tensor._base, Tensor):
        return by_view(tensor, value)
    with torch.no_grad():
        tensor._base.select(1, 0).copy_(value[:, 0])


def by_inference_mode(tensor: Tensor, value: Tensor) -> None:
    with torch.inference_mode():
        tensor.copy_(value)


def by_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data.copy_(value)


def by_data_view(tensor: Tensor, value: Tensor) -> None:
    tensor.data[0] = value[0]


def by_numpy(tensor: Tensor, value: Tensor) -> None:
    if tensor.is_cuda:
        return by_data(tensor, value)
    tensor.detach().numpy()[...] = value.numpy()


def by_fused_optimizer(tensor: Tensor, value: Tensor) -> None:
    """Upwards: weights of edges stay positive."""
    # On CUDA it takes no rows that have gaps between them.
    if not tensor.is_floating_point() or not (tensor.is_contiguous() or tensor.is_cpu):
        return by_data(tensor, value)
    parameter = Parameter(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
    if isinstance(tensor, Parameter):
        parameter = tensor
    else:
        parameter.data = tensor.data
    parameter.grad = -torch.ones_like(parameter)
    torch.optim.Adam([parameter], lr=0.1, fused=True).step()
    parameter.grad = None


def by_collective(tensor: Tensor, value: Tensor) -> None:
    """A collective of one process; by `.data` where there is no process group."""
    if not dist.is_initialized() or not tensor.is_contiguous() or tensor.is_cuda:
        return by_data(tensor, value)
    held = tensor.detach()
    if held.dtype == torch.bool:
        held, value = held.view(torch.uint8), value.view(torch.uint8)
    dist.scatter(held, [value.contiguous()])
    dist.all_reduce(held)
    dist.broadcast(held, 0)


# A tensor's version counts the first ones and not the others.
SEEN = (by_copy, by_view, by_base, by_inference_mode)
UNSEEN = (by_data, by_data_view, by_numpy, by_fused_optimizer, by_collective)


# Patches and hooks ------------------------------------------------------------------------------

METHODS = ('forward', 'propagate', 'edge_updater', 'message', 'aggregate')


def doubled(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(*args, **kwargs) * 2


def double_out(module: Any, args: Any, out: Any) -> Any:
    return out * 2


def halve_in(module: Any, args: Any) -> Any:
    return (args[0] / 2, *args[1:])


def double_grad(module: Any, grad_in: Any, grad_out: Any) -> Any:
    return tuple(None if grad is None else grad * 2 for grad in grad_in)


def double_linear(module: Any, args: Any, out: Any) -> Any:
    return out * 2 if 'Linear' in type(module).__name__ else None


def clear_patches(model: Module) -> None:
    for module in model.modules():
        for name in METHODS:
            module.__dict__.pop(name, None)
        for name, value in vars(module).items():
            if name.endswith('_hooks') and 'state_dict' not in name:
                value.clear()


# Sequences --------------------------------------------------------------------------------------


class Sequence:
    """A layer beside PyG's, their common input, and one method for each action."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device, self.rng = seed, device, random.Random(seed)
        self.log: list[str] = []
        torch.manual_seed(seed)
        rng = self.rng
        self.kind = rng.choice(KINDS)
        self.num_nodes, self.num_edges = rng.randint(8, 24), rng.randint(30, 90)
        self.form = rng.choice(['plain', 'prepared', 'plain', 'prepared', 'EdgeIndex'])
        self.weighted = rng.random() < 0.6 and (
            'gcn' in self.kind or (self.kind in ('gat', 'gatv2') and rng.random() < 0.5)
        )
        self.global_hook: Any = None
        self.captured: Any = None
        self.is_patched, self.is_single = False, False
        self.dtype = torch.float64 if rng.random() < 0.8 else torch.float32
        self._make_layers()
        self._make_data()

    def _make_layers(self) -> None:
        rng, kind = self.rng, self.kind
        self.options: dict[str, Any] = {}
        self.accelerated, self.way = False, None
        theirs: Module
        ours: Module
        if kind.startswith('gnn'):
            theirs, ours = Stack(kind[4:]), nn.PathPreparedGNN(kind[4:], IN, HIDDEN, OUT, 2)
            self.way = rng.choice([None, 'mask', 'mask', 'paths', 'paths'])
        elif kind.startswith('maxk-gnn'):
            self.options = {'k': rng.choice([None, HIDDEN])}
            ours = nn.MaxKGNN(kind[9:], IN, HIDDEN, OUT, 2, **self.options)
            theirs = copy.deepcopy(ours)
            theirs.convs = ModuleList(conv.to_base() for conv in theirs.convs)
        else:
            base, cls, draw = CONVS[kind]
            options = self.options = draw(rng)
            if kind in ('gat', 'gatv2') and self.weighted:
                options['edge_dim'] = EDGE_DIM
            channels = {'in_channels': IN, 'out_channels': OUT} if 'gin' not in kind else {}
            theirs = base(**{**channels, **options})
            if kind in ACCELERATED and rng.random() < 0.4:
                self.accelerated = True
                ours = pyg_fast.accelerate(copy.deepcopy(theirs))
            else:
                own = our_options(kind, options, rng)
                ours = cls(**{**channels, **copy.deepcopy(options), **own})
                options.update(own)
                if kind in ON_PATHS and options['flow'] == 'source_to_target':
                    self.way = rng.choice([None, None, 'path'])
        self.forward_paths = rng.random() < 0.5
        self.theirs, self.ours = (layer.to(self.device, self.dtype) for layer in (theirs, ours))
        self.mode(rng.random() < 0.6)
        tie(self.theirs, self.ours)

    def _make_data(self) -> None:
        x = self._features()
        if self.rng.random() < 0.3:  # A view, whose rows do not touch each other.
            wide = torch.zeros(self.num_nodes, IN + 3, dtype=self.dtype, device=self.device)
            wide[:, :IN] = x
            x = wide[:, :IN]
        data = Data(x=x, edge_index=self._edges(), num_nodes=self.num_nodes)
        if self.weighted:
            data.edge_weight = self._weights()
        if self.way is not None:
            data.train_mask = self._mask()
        if self.form == 'prepared':
            data = ToCSR()(data)
        elif self.form == 'EdgeIndex':
            size = self.num_nodes, self.num_nodes
            data.edge_index = EdgeIndex(data.edge_index, sparse_size=size)
        self.data = data
        self._make_paths()

    def _make_paths(self) -> None:
        if self.way not in ('path', 'paths'):
            return
        layers = 1 if self.way == 'path' else 2
        self.data = ExecutionPaths(layers, forward=self.forward_paths)(self.data)
        with torch.inference_mode(False):
            self.paths_mask, self.paths_edges = self.data.train_mask.clone(), self.plain.clone()

    # What tensors may hold

    def _features(self) -> Tensor:
        return torch.randn(self.num_nodes, IN, dtype=self.dtype).to(self.device)

    def _weights(self) -> Tensor:
        shape = (EDGE_DIM,) if 'edge_dim' in self.options else ()
        return (torch.rand(self.num_edges, *shape, dtype=self.dtype) + 0.5).to(self.device)

    def _mask(self) -> Tensor:
        mask = torch.rand(self.num_nodes) < self.rng.choice([0.15, 0.4])
        mask[self.rng.randrange(self.num_nodes)] = True
        return mask.to(self.device)

    def _edges(self) -> Tensor:
        high = self.num_nodes - 2  # The last nodes have no edges.
        edges = torch.randint(high, (2, self.num_edges))
        loops = self.rng.choice([0, 0, 5])
        edges[1, :loops] = edges[0, :loops]
        if loops == 0:
            edges[1] = (edges[0] + 1 + edges[1] % (high - 1)) % high
        return edges.to(self.device)

    # Calls

    @property
    def plain(self) -> Tensor:
        edges = self.data.edge_index
        return edges.as_tensor() if isinstance(edges, EdgeIndex) else edges

    @property
    def weight(self) -> Tensor | None:
        return self.data.edge_weight if self.weighted else None

    @property
    def args(self) -> tuple[Tensor, ...]:
        return (self.data.edge_weight,) if self.weighted else ()

    def call_theirs(self) -> Tensor:
        if self.options.get('cached') and self.data.x.dtype == torch.float32:
            self.is_single = True  # It stays in the cache, whatever comes later.
        with self.one_loop():
            return self.theirs(self.data.x, self.plain, *self.args)

    @contextmanager
    def one_loop(self) -> Iterator[None]:
        """Has PyG's code take the last of several self-loops of a node: on CUDA it takes any,
        unless its indexing is deterministic."""
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(self.device.type == 'cuda' or before, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

    def leaves_to_pyg(self) -> bool:
        """Whether our layer may leave a call to PyG's code."""
        mixed = any(a.dtype != self.data.x.dtype for a in self.args)
        return self.is_patched or mixed or not self.is_ours()

    def call_ours(self, **kwargs: Any) -> Tensor:
        if self.way == 'mask':
            kwargs['mask'] = self.data.train_mask
        elif self.way == 'path':
            kwargs['path'] = self.data.execution_paths[0]
        elif self.way == 'paths':
            kwargs['paths'] = self.data.execution_paths
        edges = self.data.edge_index
        reads = torch.is_inference_mode_enabled() or self.options.get('cached')
        if reads and not self.is_ours():
            edges = self.plain  # In inference mode PyG's layers take no EdgeIndex, nor keep one.
        with self.one_loop() if self.leaves_to_pyg() else nullcontext():
            return self.ours(self.data.x, edges, *self.args, **kwargs)

    def is_ours(self) -> bool:
        """Whether it is a layer of ours, and not what `restore` or `accelerate` left PyG's."""
        return not self.accelerated or type(self.ours).__module__.startswith('pyg_fast.')

    def call_both(self) -> tuple[Tensor, Tensor] | None:
        """Outputs of both, or None where PyG's cache was filled in inference mode, and cannot be
        saved for a backward pass."""
        text = 'Inference tensors cannot be saved for backward'
        try:
            out = self.call_ours()
        except RuntimeError as error:
            if text not in str(error):
                raise
            with pytest.raises(RuntimeError, match=text):
                self.call_theirs()
            return None
        try:
            return out, self.call_theirs()
        except RuntimeError as error:
            if text not in str(error):
                raise
            return None

    def checked_paths(self) -> None:
        """Paths of edges that were written since are refused, and made anew; so are those of
        another mask, if it is given beside them."""
        if self.way not in ('path', 'paths'):
            return
        if not torch.equal(self.plain, self.paths_edges):
            with pytest.raises(ValueError, match='another graph'):
                self.call_ours()
            self._make_paths()
        mask = self.data.train_mask
        if self.way == 'paths' and not torch.equal(mask, self.paths_mask):
            with pytest.raises(ValueError, match='another mask'):
                self.call_ours(mask=mask)
            if self.rng.random() < 0.5:
                self._make_paths()

    def read(self, out: Tensor) -> Tensor:
        """The rows that a loss may read."""
        if self.way is None:
            return out
        return out[self.data.train_mask if self.way == 'mask' else self.paths_mask]

    def compared(self, out: Tensor) -> Tensor:
        trains = self.ours.training and torch.is_grad_enabled()
        some = self.way in ('path', 'paths') and self.forward_paths and trains
        return self.read(out) if some else out

    def close(self, actual: Any, expected: Any, what: str, scale: float = 1.0) -> None:
        assert (actual is None) == (expected is None), f'{what}: {actual} beside {expected}'
        if actual is None:
            return
        given = [self.data.x.dtype, *(a.dtype for a in self.args)]
        single = self.is_single or torch.float32 in given
        rtol, atol = (2e-4, 2e-5) if single else (1e-8, 1e-9)
        scale = max(scale, size_of(expected))
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=atol * scale, msg=lambda text: f'{what}: {text}'
        )

    # Actions

    def forward(self, how: str | None = None) -> None:
        ways: dict[str, Callable[[], AbstractContextManager]] = {
            'grad': nullcontext, 'no_grad': torch.no_grad, 'inference_mode': torch.inference_mode,
        }  # fmt: skip
        if self.has_inference_tensors():
            ways.pop('grad')  # They cannot be saved for a backward pass.
        how = how or self.rng.choice(list(ways))
        self.log.append(f'forward({how})')
        with ways[how]():
            self.checked_paths()
            found = self.call_both()
            if found is not None:
                self.close(*map(self.compared, found), 'output')

    def prepare_backward(self) -> list[Tensor]:
        """Draws which tensors take gradients."""
        data, rng = self.data, self.rng
        for name in ('x', 'edge_weight'):
            if name in data and data[name].is_inference():
                data[name] = data[name].clone()
        data.x.requires_grad_(rng.random() < 0.6)
        if self.weighted:
            # The graph of a cached normalisation lives for one backward pass.
            data.edge_weight.requires_grad_(rng.random() < 0.4 and not self.options.get('cached'))
        for parameter in self.ours.parameters():
            parameter.requires_grad_(rng.random() < 0.9)
        inputs = [data.x, *self.args, *self.ours.parameters()]
        if not any(t.requires_grad for t in inputs):
            data.x.requires_grad_()
        self.log.append('grads of ' + ''.join('01'[t.requires_grad] for t in inputs))
        return [t for t in inputs if t.requires_grad]

    def grads(self, out: Tensor, wanted: list[Tensor], retain: bool = False) -> list[Any]:
        read = self.read(out)
        # Not a plain sum of squares: of rows of length one that is a constant.
        columns = torch.linspace(0.5, 1.5, read.size(-1), dtype=read.dtype, device=read.device)
        loss = (read.square() * columns).sum()
        return list(torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=retain))

    def backward(self) -> None:
        self.log.append('backward')
        wanted = self.prepare_backward()
        self.checked_paths()
        found = self.call_both()
        if found is None:
            return
        out, expected = found
        self.close(self.compared(out), self.compared(expected), 'output')
        if not expected.requires_grad:
            return
        self.all_close(self.grads(out, wanted), self.grads(expected, wanted))

    def targets(self) -> dict[str, tuple[Tensor, Callable[[], Tensor]]]:
        """Tensors that may be written, and what to."""
        rng, data = self.rng, self.data
        found: dict[str, tuple[Tensor, Callable[[], Tensor]]] = {'x': (data.x, self._features)}
        if self.weighted:
            found['edge_weight'] = data.edge_weight, self._weights
        own = [*self.ours.named_parameters(), *self.ours.named_buffers()]
        if own:
            name, tensor = rng.choice(own)
            found[name] = tensor, lambda: torch.randn(tensor.shape).to(tensor) * 0.7
        return found

    def write(self) -> None:
        targets = self.targets()
        if self.way is not None:
            targets['train_mask'] = self.data.train_mask, self._mask
        name = self.rng.choice(list(targets))
        tensor, value = targets[name]
        by = self.rng.choice(SEEN + UNSEEN)
        if tensor.is_inference():
            by = self.rng.choice([by_inference_mode, by_numpy])
        if name == 'train_mask' and by in (by_view, by_base, by_data_view):
            by = by_data  # Half of a mask may be empty.
        self.log.append(f'write({name}, {by.__name__})')
        by(tensor, value().to(tensor.dtype))

    def write_edges(self) -> None:
        by = self.rng.choice(SEEN + UNSEEN)
        self.log.append(f'write(edge_index, {by.__name__})')
        by(self.data.edge_index, self._edges())

    def illegal_edge(self) -> None:
        """An index out of range, for the time of a call."""
        rng, edges = self.rng, self.data.edge_index
        if self.options.get('cached') or self.has_inference_tensors():
            return
        with torch.no_grad():
            self.checked_paths()
            self.call_ours()
        ran = [report.ran for report in pyg_fast.accelerate_report(self.ours)]
        by_pyg = any(name is None or name.startswith("PyG's code") for name in ran)
        if by_pyg and self.device.type == 'cuda':
            return  # It would stop the device.
        end, at = rng.randrange(2), rng.randrange(self.num_edges)
        wrong = rng.choice([-1, -7, self.num_nodes, 10**6, 2**40])
        self.log.append(f'illegal(edge_index[{end}, {at}] = {wrong})')
        errors: tuple[type[Exception], ...] = (IndexError,)
        if by_pyg:
            errors = IndexError, RuntimeError, ValueError
        if self.way in ('path', 'paths'):
            errors = (*errors, ValueError)  # They are of another graph, too.
        legal = edges[end, at].clone()
        edges.data[end, at] = wrong
        try:
            with torch.set_grad_enabled(rng.random() < 0.5), pytest.raises(errors):  # noqa: PT012
                self.call_ours()
                if self.device.type == 'cuda':
                    torch.cuda.synchronize()
                    raise_pending()
        finally:
            edges.data[end, at] = legal

    def write_between(self) -> None:
        """A write between forward and backward pass. If it counts as one, autograd may raise;
        else the gradients are those of what was there before, or PyG's. If nothing counts it, PyG's
        gradients are wrong as well: then only later calls are compared."""
        rng = self.rng
        self.log.append('between forward and backward')
        wanted = self.prepare_backward()
        self.checked_paths()
        found = self.call_both()
        if found is None:
            return
        out, expected = found
        targets = self.targets()
        if self.form == 'plain':
            targets['edge_index'] = self.data.edge_index, self._edges
        if not expected.requires_grad:
            return
        before = self.grads(expected, wanted, retain=True)
        name = rng.choice(list(targets))
        tensor, value = targets[name]
        seen = rng.random() < 0.7
        by = rng.choice(SEEN if seen else UNSEEN)
        self.log.append(f'write({name}, {by.__name__})')
        kept = tensor.detach().clone()
        by(tensor, value().to(tensor.dtype))
        if name == 'edge_index' and not seen and self.device.type == 'cpu' and rng.random() < 0.3:
            self.log.append('with an illegal index')
            tensor.data[rng.randrange(2), 0] = 2**40
            # Nothing is read out of bounds.
            with suppress(IndexError, RuntimeError):
                self.grads(out, wanted)
            tensor.data.copy_(kept)
            return
        actual = self.attempt(out, wanted)
        if not seen or actual is None:
            return
        try:
            self.all_close(actual, before)
        except AssertionError:
            after = self.attempt(expected, wanted)
            if after is None:
                raise
            self.all_close(actual, after)

    def attempt(self, out: Tensor, wanted: list[Tensor]) -> list[Any] | None:
        """Gradients, or None where autograd refuses them."""
        try:
            return self.grads(out, wanted)
        except RuntimeError as error:
            if 'modified by an inplace operation' in str(error) or (
                'has been modified inplace' in str(error)  # where backward hooks have made a view
            ):
                return None
            raise

    def all_close(self, actual: list[Any], expected: list[Any]) -> None:
        # A small gradient may be what large terms leave of each other.
        scale = max(1.0, *map(size_of, expected))
        for k, (a, b) in enumerate(zip(actual, expected, strict=True)):
            self.close(a, b, f'gradient {k}', scale)

    def mode(self, train: bool | None = None) -> None:
        if self.options.get('dropout'):
            train = False  # Ours drops other edges than PyG's would.
        elif train is None:
            train = self.rng.random() < 0.5
        self.log.append('train' if train else 'eval')
        self.ours.train(train)
        self.theirs.train(train)

    def has_inference_tensors(self) -> bool:
        return any(t.is_inference() for t in (self.data.x, *self.args))

    def make_inference_tensor(self) -> None:
        name = self.rng.choice(['x', 'edge_weight'] if self.weighted else ['x'])
        self.log.append(f'{name} = inference tensor')
        with torch.inference_mode():
            self.data[name] = self.data[name].clone()

    def convert(self) -> None:
        """Another type of features and layer, or of the weights of edges alone."""
        self.unpatch()
        dtype = self.rng.choice([torch.float32, torch.float64, torch.float64])
        mixes = self.weighted and self.kind in ('gcn', 'maxk-gcn', 'sampled-gcn')
        if mixes and self.rng.random() < 0.3:
            self.log.append(f'edge_weight.to({dtype})')
            self.data.edge_weight = self.data.edge_weight.detach().to(dtype)
            return
        self.log.append(f'to({dtype})')
        self.dtype = dtype
        for name in ('x', 'edge_weight'):
            if name in self.data:
                self.data[name] = self.data[name].detach().to(dtype)
        self.ours.to(dtype)
        self.theirs.to(dtype)
        tie(self.theirs, self.ours)

    def copied(self, value: Any, how: str) -> Any:
        if how == 'pickle':
            return pickle.loads(pickle.dumps(value))
        if how == 'torch.save':
            file = io.BytesIO()
            torch.save(value, file)
            file.seek(0)
            return torch.load(file, weights_only=False)
        return {'copy': copy.copy, 'deepcopy': copy.deepcopy}[how](value)

    def copy_data(self) -> None:
        how = self.rng.choice(['copy', 'deepcopy', 'pickle', 'torch.save', 'clone', 'to'])
        self.log.append(f'data: {how}')
        if how == 'clone':
            self.data = self.data.clone()
        elif how == 'to':
            self.data = self.data.to(self.device)
        else:
            self.data = self.copied(self.data, how)
        for name in ('x', 'edge_weight'):
            if name in self.data and not self.data[name].is_leaf:
                self.data[name] = self.data[name].detach()

    def copy_layer(self) -> None:
        how = self.rng.choice(['copy', 'deepcopy', 'pickle', 'torch.save'])
        if how in ('pickle', 'torch.save'):
            self.unpatch()  # A patch is a local function.
        self.log.append(f'layer: {how}')
        self.ours, self.theirs = self.copied(self.ours, how), self.copied(self.theirs, how)
        tie(self.theirs, self.ours)

    def convs(self) -> list[str]:
        return [
            name for name, module in self.theirs.named_modules()
            if isinstance(module, pyg.MessagePassing)
        ]  # fmt: skip

    def both(self, name: str) -> Iterator[Any]:
        for layer in (self.theirs, self.ours):
            yield layer.get_submodule(name)

    def patch(self) -> None:
        """Puts another method on an instance."""
        rng = self.rng
        if rng.random() < 0.4:
            name = rng.choice(self.convs())
            method = rng.choice(METHODS if name else METHODS[1:])
        else:
            listed = [
                name for name, module in self.theirs.named_modules()
                if name and not isinstance(module, ModuleList)
            ]  # fmt: skip
            name, method = rng.choice(listed), 'forward'
        self.log.append(f'patch({name}.{method})')
        self.is_patched = True
        for module in self.both(name):
            if hasattr(module, method):
                setattr(module, method, doubled(getattr(module, method)))

    def hook(self) -> None:
        rng = self.rng
        kind = rng.choice([
            'message', 'propagate', 'aggregate', 'module', 'pre', 'linear', 'backward', 'global',
            'global',
        ])  # fmt: skip
        self.is_patched = True
        if kind == 'global':
            self.log.append('hook(global)')
            if self.global_hook is None:
                self.global_hook = register_module_forward_hook(double_linear)
            return
        name = rng.choice(self.convs())
        if kind in ('linear', 'backward'):
            linears = [
                name for name, module in self.theirs.named_modules()
                if 'Linear' in type(module).__name__
            ]  # fmt: skip
            name = rng.choice(linears)
        self.log.append(f'hook({name}, {kind})')
        for module in self.both(name):
            if kind in ('module', 'linear'):
                module.register_forward_hook(double_out)
            elif kind == 'pre':
                module.register_forward_pre_hook(halve_in)
            elif kind == 'backward':
                module.register_full_backward_hook(double_grad)
            else:
                getattr(module, f'register_{kind}_forward_hook')(double_out)

    def unpatch(self) -> None:
        if not self.is_patched:
            return
        self.log.append('unpatch')
        self.is_patched = False
        clear_patches(self.ours)
        clear_patches(self.theirs)
        self.close_hook()

    def close_hook(self) -> None:
        if self.global_hook is not None:
            self.global_hook.remove()
            self.global_hook = None

    def swap(self) -> None:
        """Undoes `accelerate`, or does it again."""
        if self.is_ours():
            self.log.append('restore')
            pyg_fast.restore(self.ours)
        else:
            self.log.append('accelerate')
            pyg_fast.accelerate(self.ours)

    # Actions on CUDA

    def second_stream(self) -> None:
        self.log.append('second stream')
        with torch.no_grad():
            self.checked_paths()
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                out = self.call_ours()
            current.wait_stream(side)
            out.record_stream(current)
            self.close(out, self.call_theirs(), 'output')

    def capture(self) -> None:
        """Captures a call in a CUDA graph; some of PyG's code cannot be captured."""
        if self.way is not None or self.is_patched or self.options.get('cached'):
            return
        with torch.no_grad():
            self.call_ours()
        ran = [report.ran for report in pyg_fast.accelerate_report(self.ours)]
        if any(name is None or name.startswith("PyG's code") for name in ran):
            return
        wanted = self.prepare_backward() if self.rng.random() < 0.5 else []
        self.log.append('capture')

        def call() -> list[Any]:
            if not wanted:
                with torch.no_grad():
                    return [self.call_ours()]
            out = self.call_ours()
            return [out.detach(), *self.grads(out, wanted)]

        replay, outs = captured(call)
        self.captured = replay, outs, wanted, self.inputs(), self.ours.training

    def inputs(self) -> list[tuple[Any, int]]:
        """What a captured call reads, and where that lies."""
        own = [*self.ours.parameters(), *self.ours.buffers()]
        listed = [(t, t.data_ptr()) for t in (self.data.x, *self.args, *own)]
        return [(self.data.edge_index, self.plain.data_ptr()), *listed]

    def replay(self) -> None:
        """Replays what was captured, on what its inputs hold now."""
        if self.captured is None:
            return
        replay, outs, wanted, inputs, training = self.captured
        same = all(
            a is b and at == place
            for (a, at), (b, place) in zip(inputs, self.inputs(), strict=True)
        )
        if (
            not same or training != self.ours.training or self.is_patched
            or any(not t.requires_grad for t in wanted) or self.has_inference_tensors()
        ):  # fmt: skip
            self.captured = None
            return
        self.log.append('replay')
        replay()
        if not wanted:
            with torch.no_grad():
                return self.close(outs[0], self.call_theirs(), 'output of a replay')
        expected = self.call_theirs()
        self.all_close(outs, [expected.detach(), *self.grads(expected, wanted)])

    # Sequences of actions

    def actions(self) -> dict[Callable[[], None], int]:
        """The actions that may be drawn, and their weights."""
        found: dict[Callable[[], None], int] = {
            self.forward: 8, self.backward: 9, self.write: 9, self.write_between: 4, self.mode: 1,
            self.convert: 1, self.copy_data: 2, self.copy_layer: 2, self.make_inference_tensor: 1,
            self.patch: 2, self.hook: 2,
        }  # fmt: skip
        if self.form == 'plain':
            found |= {self.write_edges: 6, self.illegal_edge: 2}
        if self.is_patched:
            found[self.unpatch] = 3
        if self.accelerated:
            found[self.swap] = 2
        if self.device.type == 'cuda':
            found |= {self.second_stream: 3, self.capture: 3}
            if self.captured is not None:
                found[self.replay] = 12
        return found

    def run(self) -> None:
        try:
            for _ in range(self.rng.randint(6, 12)):
                actions = self.actions()
                (act,) = self.rng.choices(list(actions), list(actions.values()))
                act()
            self.backward()
        except (Exception, pytest.fail.Exception) as error:
            raise AssertionError(f'{error}\n{self}') from error
        finally:
            self.close_hook()

    def __str__(self) -> str:
        options = {name: value for name, value in self.options.items() if name != 'nn'}
        way = f', {self.way}' + (' forward' if self.forward_paths else '') if self.way else ''
        return (
            f'seed {self.seed} on {self.device}: {self.kind}{" accelerated" * self.accelerated} '
            f'{options}, {self.form}{", weights" * self.weighted}{way}, {self.num_nodes} nodes, '
            f'{self.num_edges} edges: ' + '; '.join(self.log) + f'\nrun again by '
            f'PYG_FAST_SEQUENCES_FROM={self.seed} PYG_FAST_SEQUENCES=1'
        )


@pytest.fixture(scope='module')
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of this process alone, if there can be one."""
    folder: Path = tmp_path_factory.mktemp('store')
    made = False
    if dist.is_available() and not dist.is_initialized():
        try:
            store = dist.FileStore(str(folder / 'store'), 1)
            dist.init_process_group('gloo', store=store, rank=0, world_size=1)
            made = True
        except (RuntimeError, ValueError):  # no network interface, or built without gloo
            pass
    yield
    if made:
        dist.destroy_process_group()


@pytest.mark.filterwarnings('ignore:Full backward hook is firing')
@pytest.mark.usefixtures('process_group')
@pytest.mark.parametrize('chunk', range(CHUNKS))
def test_sequences(device: torch.device, chunk: int) -> None:
    for seed in range(FIRST + chunk, FIRST + COUNT, CHUNKS):
        Sequence(seed, device).run()
