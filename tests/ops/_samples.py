"""Arguments of every raw op, found in its test file: :obj:`@sample('spmm')` marks them there."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from ._graphs import GRAPHS, exact


class Given:
    """What samples are made of: a square graph of 30 nodes, and numbers for it.

    Without `full` every optional tensor is None.
    """

    def __init__(
        self, device: torch.device | str, dtype: torch.dtype, index: torch.dtype, full: bool
    ) -> None:
        self.device, self.dtype, self.index, self.full = device, dtype, index, full
        edges = GRAPHS['square']
        self.edge_index = edges.edge_index.to(device, index)
        self.graph = edges.graph(index, device)
        self.acc = torch.float64 if dtype == torch.float64 else torch.float32
        self.num_nodes, self.num_edges = 30, self.graph.num_edges
        self.perm = self.optional(self.graph.perm)
        self.csr = {'rowptr': self.graph.rowptr, 'col': self.graph.col, 'perm': self.perm}
        t = self.graph.t_rowptr, self.graph.t_col, self.graph.t_perm
        names = 't_rowptr', 't_col', 't_perm'
        self.transpose = dict(zip(names, map(self.optional, t), strict=True))
        self.value = self.optional(self.exact(self.num_edges))
        self.a, self.b = (self.exact(self.num_nodes, 9) for _ in range(2))
        self.scaled = {
            name: self.optional(self.random(self.num_nodes))
            for name in ('row_scale', 'col_scale', 'diag')
        }
        self.scales = {name: self.scaled[name] for name in ('row_scale', 'col_scale')}
        self.bias = self.optional(self.exact(9))
        self.seed = torch.tensor([2**40 + 3], device=device)

    def optional(self, tensor: Tensor) -> Tensor | None:
        return tensor if self.full else None

    def exact(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return exact(*size, dtype=dtype or self.dtype, device=self.device)

    def random(self, *size: int) -> Tensor:
        return torch.rand(*size, dtype=self.acc, device=self.device)


Make = Callable[[Given], dict[str, object]]
_samples: dict[str, Make] = {}


def sample(op: str) -> Callable[[Make], Make]:
    """Marks the function that makes the arguments of a raw op, in their order."""

    def register(make: Make) -> Make:
        _samples[op] = make
        return make

    return register


def samples() -> dict[str, Make]:
    """Those of all test files of ops."""
    tests = Path(__file__).parents[1]
    for path in sorted([*tests.glob('ops/test_*.py'), *tests.glob('papers/*/test_op.py')]):
        import_module('.'.join(path.relative_to(tests).with_suffix('').parts))
    return _samples
