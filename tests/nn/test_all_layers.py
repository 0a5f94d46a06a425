"""PyG's 59 convolution classes beside their accelerated copies, and the record of what ran."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch_geometric
import torch_geometric.typing
from torch.nn import Module
from torch_geometric.nn import conv as pyg

import pyg_fast
from pyg_fast.nn.message_passing import FusedPropagate
from tests._report import plan_of
from tests.nn import _layers
from tests.nn._layers import (
    BLOCKS,
    CASES,
    KERNEL,
    LEFT_OUT,
    OURS,
    TILES,
    Case,
    arguments,
    assert_alike,
    hub_graph,
    run,
)


def what_ran(layer: Module) -> list[str]:
    """Of each convolution in a layer, in the form of `Case.runs`."""
    found = []
    for report in pyg_fast.accelerate_report(layer):
        ran = report.ran or report.reason or ''
        conv = layer.get_submodule(report.name)
        if ran == 'FusedGPSConv':  # The table says what runs its local layer.
            continue
        if isinstance(conv, FusedPropagate) and ran == type(conv).__name__:
            kernel = TILES if 'over tiles of edges' in plan_of(conv) else KERNEL
            ran = BLOCKS if report.how == 'blocks' else kernel
        found.append(ran.removeprefix("PyG's code: "))
    return found


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
def test_like_pyg(
    case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    if case.layer == 'PANConv' and not torch_geometric.typing.WITH_TORCH_SPARSE:
        pytest.skip('needs torch-sparse')
    if case.layer in ('MeshCNNConv', 'PANConv') and device.type == 'cuda':
        pytest.skip("PyG's code runs, which makes tensors on the CPU or needs a CUDA torch-sparse")
    _layers.use_pyg_lib(monkeypatch)
    few, more = 2**14, 2**18  # bytes: several blocks of these few edges, and of hubs
    torch.manual_seed(1)
    theirs = case.make().to(device, case.dtype)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    tolerance = 1e-9 if case.dtype == torch.float64 else 1e-4
    expected = run(theirs, arguments(case.args, device, case.dtype))
    names = case.args.split()
    # PANConv itself raises an error for an EdgeIndex, and so for a PreparedGraph.
    kinds = '!#' if case.runs in OURS else '' if case.layer == 'PANConv' else '#'
    given = [case.args] + [
        ' '.join(f'{n}{kind}' if n == name else n for n in names)
        for name in ('edges', 'bipartite') if name in names for kind in kinds
    ]  # fmt: skip
    with_hubs = hub_graph(device)
    expected_of_hubs = run(theirs, arguments(case.args, device, case.dtype, with_hubs))
    for one in given:
        limits(bytes_of_message_blocks=few)
        got = run(ours, arguments(one, device, case.dtype))
        assert_alike(got, expected, tolerance)
        limits(bytes_of_message_blocks=more)
        got = run(ours, arguments(one, device, case.dtype, with_hubs))
        assert_alike(got, expected_of_hubs, tolerance)
        ran = what_ran(ours)
        assert ran
        for each in ran:
            # On a GPU tiles have no float64; a CPU has PPFConv's small map without tiles.
            has_maps = case.runs == TILES or case.layer == 'PPFConv'
            by_blocks = has_maps and each == BLOCKS and device.type == 'cuda'
            assert by_blocks or each.startswith(case.runs)
            assert (each in OURS) == (case.runs in OURS)


def test_every_class() -> None:
    """All of PyG 2.8; a newer PyG may have more, which the summary of the run then names."""
    tested = {case.layer for case in CASES}
    known = {name for name in pyg.__all__ if name not in LEFT_OUT}
    assert len(tested) == 59
    assert tested <= known
    new = sorted(known - tested)
    if new and not torch_geometric.__version__.startswith('2.8.'):
        pytest.skip(f'not tested yet: {", ".join(new)}')
    assert new == []


def test_most_run_on_our_kernels() -> None:
    assert len({case.layer for case in CASES if case.is_ours}) >= 50


def test_record() -> None:
    """`python -m tests.nn._layers` writes it."""
    assert _layers.RECORD.read_text() == _layers.record_text()
    assert len({case.name for case in CASES}) == len(CASES)
