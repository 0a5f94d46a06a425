"""Compiled models in DistributedDataParallel, in two processes."""

from pathlib import Path

import _forks

STEPS = """
import copy, datetime, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GATConv, LEConv
import pyg_fast
from tests._compiled import Backend

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = LEConv(4, 4), GATConv(4, 4)

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)


torch.manual_seed(0)
net = Net().double()
parts = [
    (torch.randn(20, 4, dtype=torch.double), torch.randint(20, (2, 60 + k))) for k in range(2)
]
expected = copy.deepcopy(net)
(sum(expected(*part).square().sum() for part in parts) / 2).backward()
ways = {
    'inside': lambda net: DistributedDataParallel(pyg_fast.compile(net, dynamic=True)),
    'around': lambda net: pyg_fast.compile(
        DistributedDataParallel(pyg_fast.accelerate(net)), dynamic=True),
}
with pyg_fast.small_graphs('kernel'):
    for way, make in ways.items():
        pyg_fast._compile.backend = backend = Backend()
        own = copy.deepcopy(net)
        model = make(own)  # Without a name its reducer would end before the backward pass.
        model(*parts[rank]).square().sum().backward()
        assert backend.kernels > 0, way
        for got, wanted in zip(own.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(got.grad, wanted.grad, msg=lambda m: f'{way}: {m}')
dist.barrier()
dist.destroy_process_group()
print('done')
"""


def test_gradients_are_averaged(tmp_path: Path) -> None:
    _forks.run_together(STEPS, 2, str(tmp_path), timeout=120)
