"""Whole training on batches of molecules, with loading: beside PyG, eager and compiled.

python -m benchmarks molecules                       everything below
python -m benchmarks molecules --quick               a minute or less
python -m benchmarks molecules --parts train         or any of
    train     a step with its loading, for epochs of shuffled graphs
    loader    making a batch alone
    first     the first epoch of a captured and compiled model, which compiles, in a new process
    evaluate  outputs of a model for an epoch, on request
python -m benchmarks molecules --models gin,gcn      also gps, gine, gatv2, pna, schnet
python -m benchmarks molecules --sizes 32,256,2048   graphs of a batch, for each model
python -m benchmarks molecules --precisions high     float32 products on tensor cores: TF32
python -m benchmarks molecules --eager-only          without torch.compile, which takes long

GIN and GCN are those of OGB: five layers of 300 channels, embeddings of atoms and bonds; GPS has
64 channels. Each contender trains a copy of the same model, at first on the same batches. PyG's
model takes tensors and is compiled once for all sizes; passes before the first measurement compile
what it needs. All contenders of a cell compute in the same precision: `highest` and `high` are
torch's settings for products of float32.
"""
import copy
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import pyg_fast

from . import _harness, _turns
from ._harness import Bench, Contender, Option, Result, exact, norm_error, worst
from ._minibatch import Workers
from ._molecules import ATOMS, BUCKETS, KINDS, Kind, adam, loss_of, molecules, our_loader, seeded
from .typed_loader import pyg_name, workers_of

PARTS = ('train', 'loader', 'first', 'evaluate')
AT_HAND, COMPILED = 'PyG, batches at hand', 'compile(PyG), batches at hand'
EAGER, CAPTURED, BOTH = 'ours, eager', 'ours, captured', 'ours, captured and compiled'
OURS, PADDED = 'ours', 'ours, padded'
COLD, WARM = 'ours, cold caches, s', 'ours, warm caches, s'
TRAIN, EVALUATE, MAKING, FIRST = (
    'A training step', 'An evaluation', 'Making a batch', 'The first epoch, compiled')
LOADER_GOALS = {32: 0.08, 256: 0.1, 2048: 0.3}
_ROUNDS = 5  # at most: each is a pass over many batches
_MOST_GRAPHS = 32768  # of a pass
_LEAST_BATCHES = 8
_WARM_UP = 60.0  # seconds at most in which a rival compiles before it is measured
PRECISIONS = ('highest', 'high')
# Allowed errors of outputs and of the first loss. Products of TF32 round each factor by up to
# 2**-11, in up to ten maps of a model, one after another.
_FIRST = {'highest': 1e-4, 'high': 10 * 2**-11}
_MEAN = 0.05  # of the mean loss, in which Adam amplifies rounding


def num_batches(bench: Bench, size: int) -> int:
    """Batches of a pass: fewer of large ones."""
    return min(bench.args.batches, max(_LEAST_BATCHES, _MOST_GRAPHS // size))


class Graphs:
    """Molecules, made once for all models and sizes."""

    def __init__(self) -> None:
        self._made: dict[bool, list[Data]] = {}

    def take(self, count: int, positions: bool = False) -> list[Data]:
        if len(self._made.get(positions, [])) < count:
            self._made[positions] = molecules(count, positions)
        return self._made[positions][:count]


class Model:
    """A model in its first state; PyG's is compiled once."""

    def __init__(self, kind: Kind, bench: Bench, graphs: Sequence[Data]) -> None:
        torch.manual_seed(0)
        self.kind, self.width = kind, bench.args.width or kind.width
        self.first = kind.make(self.width, bench.args.depth, graphs).to(bench.device)

    @functools.cached_property
    def compiled(self) -> tuple[nn.Module, Callable[..., Tensor]]:
        """A copy, and what runs it."""
        model = copy.deepcopy(self.first)
        return model, torch.compile(model, dynamic=True)


class Case:
    """A model on batches of one size."""

    def __init__(
        self, model: Model, graphs: list[Data], size: int, bench: Bench, precision: str,
    ) -> None:
        self.model, self.graphs, self.size, self.bench = model, graphs, size, bench
        self.tolerance = _FIRST[precision]
        self.kind, self.device = model.kind, bench.device
        self.at_hand = list(self.pyg_loader(0))

    def pyg_loader(self, workers: int) -> Iterable[Any]:
        return PyGLoader(self.graphs, self.size, workers, self.device)

    def our_loader(self, pad: str | None = None) -> Any:
        return our_loader(self.graphs, self.size, self.device, pad)

    def outputs(self, run: Callable[..., Tensor], batch: Any) -> Tensor:
        return self.kind.call(run, batch)

    def contender(
        self, name: str, make: Callable[[str], Callable[[], Any]], check: Callable[[Any], float],
    ) -> Contender:
        return Contender(name, lambda: make(name), name in (EAGER, CAPTURED, BOTH), check,
                         len(self.at_hand))

    def rivals(self) -> dict[str, int]:
        """PyG with its loader: the numbers of workers."""
        return {pyg_name(workers): workers for workers in self.bench.args.workers}


class Training(Case):
    """Passes of training from the same first state."""

    @functools.cached_property
    def expected(self) -> Tensor:
        return self.make(AT_HAND)()

    def step(
        self, run: Callable[..., Tensor], optimizer: torch.optim.Optimizer, batch: Any,
    ) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(self.outputs(run, batch), batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def pass_over(
        self, run: Callable[..., Tensor], optimizer: torch.optim.Optimizer,
        batches: Iterable[Any],
    ) -> Callable[[], Tensor]:
        def once() -> Tensor:
            return torch.stack([self.step(run, optimizer, batch) for batch in batches])
        return once

    def make(self, name: str) -> Callable[[], Tensor]:
        if name == COMPILED:
            return self.make_compiled()
        model = copy.deepcopy(self.model.first)
        if name == AT_HAND:
            return self.pass_over(model, adam(model), self.at_hand)
        if name in self.rivals():
            return self.pass_over(model, adam(model), self.pyg_loader(self.rivals()[name]))
        model = pyg_fast.accelerate(model)
        if name == EAGER:
            return self.pass_over(model, adam(model), self.our_loader())
        step = pyg_fast.capture(
            model, self.our_loader(BUCKETS), adam(model), loss_of, forward=self.kind.call,
            compile=name == BOTH)
        return lambda: torch.stack(list(step.epoch()))

    def make_compiled(self) -> Callable[[], Tensor]:
        model, run = self.model.compiled
        self.warm_up(functools.partial(self.step, run, adam(model)))
        model.load_state_dict(self.model.first.state_dict())
        return self.pass_over(run, adam(model), self.at_hand)

    def warm_up(self, step: Callable[[Any], Tensor]) -> None:
        """Passes until one compiles nothing anew, for a minute at most."""
        end, known = time.perf_counter() + _WARM_UP, -1
        while num_compiled() != known:
            known = num_compiled()
            for batch in self.at_hand:
                step(batch)
                if time.perf_counter() > end:
                    _harness.log(f'  {COMPILED}: still compiles after {_WARM_UP:g} s')
                    return

    def check(self, losses: Tensor) -> float:
        right = self.expected
        return worst([
            float((losses[0] - right[0]).abs() / (self.tolerance * right[0])),
            float((losses.mean() - right.mean()).abs() / (_MEAN * right.mean()))])

    def contenders(self, eager_only: bool) -> list[Contender]:
        compiled = [] if eager_only else [COMPILED]
        ours = [*[BOTH] * (not eager_only), CAPTURED, EAGER]
        return [self.contender(name, self.make, self.check)
                for name in (*ours, *self.rivals(), AT_HAND, *compiled)]

    def facts(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """The goal, and ratios that goals are of."""
        times = {name: result.median_ms or math.nan for name, result in results.items()}
        best = min(times[name] for name in (BOTH, CAPTURED) if name in times)
        loading = min((times[name] for name in self.rivals()), default=math.nan)
        return {
            **({'goal, ms': self.kind.goals.get(self.size)} if self.bench.cuda else {}),
            "PyG's loader / ours": loading / best,
            'PyG, eager / ours, eager': min(loading, times[AT_HAND]) / times[EAGER]}


class Evaluation(Case):
    """Outputs for all graphs, of a model as it is at first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trained = copy.deepcopy(self.model.first).eval()
        self.expected = self.make(AT_HAND)()

    def make(self, name: str) -> Callable[[], Tensor]:
        model = self.trained
        batches = self.at_hand if name == AT_HAND else (
            self.pyg_loader(self.rivals()[name]) if name in self.rivals() else
            self.our_loader(BUCKETS if name == CAPTURED else None))
        if name in (EAGER, CAPTURED):
            model = pyg_fast.accelerate(copy.deepcopy(model))
        if name == CAPTURED:
            run = pyg_fast.capture_inference(model, batches, forward=self.kind.call)
            return lambda: torch.cat([out for out, _ in run.epoch()])

        @torch.no_grad()
        def once() -> Tensor:
            return torch.cat([self.outputs(model, batch) for batch in batches])
        return once

    def check(self, outputs: Tensor) -> float:
        return norm_error([outputs], [self.expected.double()], self.tolerance)

    def contenders(self) -> list[Contender]:
        return [self.contender(name, self.make, self.check)
                for name in (CAPTURED, EAGER, *self.rivals(), AT_HAND)]


class PyGLoader(Workers):
    """PyG's loader, whose batches come to the device."""

    def __init__(
        self, graphs: list[Data], size: int, workers: int, device: torch.device,
    ) -> None:
        super().__init__(DataLoader(
            graphs, size, shuffle=True, generator=seeded(), num_workers=workers,
            persistent_workers=workers > 0, pin_memory=device.type == 'cuda' and workers > 0))
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch.to(self.device, non_blocking=True)


def num_compiled() -> int:
    return torch._dynamo.utils.counters['stats']['unique_graphs']


# Parts ------------------------------------------------------------------------------------------

def sizes_of(bench: Bench, name: str) -> Sequence[int]:
    return bench.args.sizes or KINDS[name].usual_sizes


def titled(title: str, precision: str) -> str:
    """A section's, which tells the precision if it is not torch's default."""
    return title if precision == 'highest' else f'{title}, {precision}'


def each_case(
    bench: Bench, graphs: Graphs, title: str, kind: type[Case],
) -> Iterable[tuple[str, str, Any]]:
    """The sections, names and cases of all precisions, models and sizes; Dynamo forgets a model
    after its last size."""
    before = torch.get_float32_matmul_precision()
    for precision, name in itertools.product(bench.args.precisions, bench.args.models):
        torch.set_float32_matmul_precision(precision)
        of, sizes = KINDS[name], sizes_of(bench, name)
        count = {size: size * num_batches(bench, size) for size in sizes}
        known = graphs.take(max(count.values()), of.positions)
        model = Model(of, bench, known)
        for size in sizes:
            case = kind(model, known[:count[size]], size, bench, precision)
            yield titled(title, precision), f'{of.title}, {size:,} graphs', case
        torch._dynamo.reset()
        _harness.free(bench.cuda)
    torch.set_float32_matmul_precision(before)


def run_train(bench: Bench, graphs: Graphs) -> None:
    for title, name, case in each_case(bench, graphs, TRAIN, Training):
        bench.measure(
            title, name, case.model.width, case.contenders(bench.args.eager_only),
            bench.few(_ROUNDS), label='channels', memory=True, facts=case.facts)


def run_evaluate(bench: Bench, graphs: Graphs) -> None:
    for title, name, case in each_case(bench, graphs, EVALUATE, Evaluation):
        bench.measure(
            title, name, case.model.width, case.contenders(), bench.few(_ROUNDS),
            label='channels')


def run_loader(bench: Bench, graphs: Graphs) -> None:
    """A pass over all batches, which come to the device."""
    for size in bench.args.sizes or tuple(LOADER_GOALS):
        count = num_batches(bench, size)
        known = graphs.take(size * count)
        expected = last_of(PyGLoader(known, size, 0, bench.device))

        def ours(pad: str | None, known: list[Data] = known, size: int = size) -> Any:
            return our_loader(known, size, bench.device, pad)

        def theirs(workers: int, known: list[Data] = known, size: int = size) -> Any:
            return PyGLoader(known, size, workers, bench.device)

        makers = [
            (OURS, functools.partial(ours, None)), (PADDED, functools.partial(ours, BUCKETS)),
            *((pyg_name(workers), functools.partial(theirs, workers))
              for workers in bench.args.workers)]
        goal = {'goal, ms': LOADER_GOALS.get(size)} if bench.cuda else {}
        bench.measure(
            MAKING, f'{size:,} graphs', len(ATOMS), [
                Contender(name, lambda load=load: functools.partial(last_of, load()),
                          name in (OURS, PADDED), functools.partial(batch_error, expected), count)
                for name, load in makers],
            bench.few(_ROUNDS), label='columns', facts=lambda _, goal=goal: goal,
            pairs=[(PADDED, pyg_name(workers)) for workers in bench.args.workers])


def last_of(batches: Iterable[Any]) -> Any:
    for batch in batches:
        last = batch
    return last


def batch_error(right: Any, batch: Any) -> float:
    """Zero if a batch has the same graphs; its edges may have another order, and padding follow."""
    nodes, edges = right.num_nodes, right.edge_index.size(1)

    def edges_of(data: Any) -> tuple[Tensor, Tensor]:
        ends = torch.stack(tuple(data.edge_index[:, mask(data)]))
        return torch.cat([ends, data.edge_attr[mask(data)].t()]).unique(
            dim=1, return_counts=True)

    def mask(data: Any) -> Any:
        return data.edge_mask if 'edge_mask' in data else slice(edges)

    found, known = edges_of(batch), edges_of(right)
    return exact(all([
        torch.equal(batch.x[:nodes], right.x), torch.equal(batch.batch[:nodes], right.batch),
        torch.equal(batch.y[:right.num_graphs], right.y),
        *(torch.equal(a, b) for a, b in zip(found, known, strict=True))]))


def run_first(bench: Bench, _: Graphs) -> None:
    """Of the smallest size, in processes that begin with empty caches of compilers, and then with
    full ones."""
    args = bench.args
    for precision, name in itertools.product(args.precisions, args.models):
        kind, size = KINDS[name], min(sizes_of(bench, name))
        width = args.width or kind.width
        facts: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            for which in (COLD, WARM):
                found = first_epoch(
                    folder, name, precision, size, args.first_batches, width, args.depth,
                    bench.device)
                facts[which] = found['seconds']
        facts['sizes'] = found['sizes']  # of batches
        bench.add(
            titled(FIRST, precision), f'{kind.title}, {size:,} graphs', width, {},
            label='channels', facts=facts)


def first_epoch(folder: str, *command: Any) -> dict[str, Any]:
    """What :func:`._molecules.first_epoch` tells in a process with its caches in a folder."""
    caches = {'TORCHINDUCTOR_CACHE_DIR': 'inductor', 'TRITON_CACHE_DIR': 'triton',
              'CUDA_CACHE_PATH': 'cuda'}
    tree = Path(pyg_fast.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, _turns.__file__, tree, '_molecules', *map(str, command)],
        env=os.environ | {key: os.path.join(folder, part) for key, part in caches.items()},
        stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f'{command[0]}: the first epoch failed, see above')
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'molecules', __doc__, argv, parts=PARTS, on_request=('evaluate',),
        models=_harness.names('model', tuple(KINDS), {
            'quick': ('gin', 'gps'), 'usual': tuple(KINDS)}),
        sizes=Option({'quick': (4,), 'usual': None}, _harness.integers, 'graphs of a batch'),
        precisions=_harness.names('precision', PRECISIONS, ('highest',)),
        batches=Option({'quick': 3, 'cuda': 20, 'cpu': 8}, help='of a pass, at most'),
        first_batches=Option({'quick': 3, 'usual': 100}, help='of the first epoch'),
        width=Option({'quick': 20, 'usual': None}, help='of all models'),
        depth=Option({'quick': 1, 'usual': 5}),
        workers=Option({'quick': (0,), 'cuda': (0, 8), 'cpu': (0, 2)}, workers_of,
                       "numbers of workers of PyG's loaders"),
        eager_only=Option(False), notes=[
            'A step is loading, forward, backward and Adam (fused), wall time with Python: the '
            'time of an epoch of shuffled batches, divided by their number. At hand: on the device '
            'before, the same in each epoch. Molecules have 26 nodes and 56 edges on average. '
            'The first epoch: capturing, compiling and training, in a process of its own.'])
    parts = {'train': run_train, 'loader': run_loader, 'first': run_first, 'evaluate': run_evaluate}
    graphs = Graphs()
    for part, run in parts.items():
        if bench.has(part) and not (part == 'first' and bench.args.eager_only):
            run(bench, graphs)
    bench.finish()


if __name__ == '__main__':
    main()
