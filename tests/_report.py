"""What ran in the last eager call of a layer, as :func:`pyg_fast.accelerate_report` tells users."""

from typing import Any

from torch.nn import Module

from pyg_fast import accelerate_report

_PYGS = "PyG's code: "


def what_ran(layer: Module) -> str:
    """Our class, or "PyG's code: " with the reason."""
    ran = accelerate_report(layer)[0].ran
    assert ran is not None, f'{type(layer).__name__} had no call yet, or is not one of ours'
    return ran


def why_pygs(layer: Module) -> str:
    """Why PyG's code ran; '' if ours did."""
    ran = what_ran(layer)
    return ran.removeprefix(_PYGS) if ran.startswith(_PYGS) else ''


def runs_in_blocks(layer: Module) -> bool:
    """Whether our code ran over blocks of edges."""
    return accelerate_report(layer)[0].how == 'blocks'


def plan_of(layer: Any) -> str:
    """What users read of a layer's message: which parts run once for each node, and which for each
    edge. Nothing else tells these apart where results are the same."""
    text = layer.plan
    assert text is not None, f'{type(layer).__name__} had no call yet'
    return text


def why_pygs_maps(layer: Any) -> str:
    """Why PyG's code multiplied by the matrices of relations in HGTConv; '' if ours did."""
    return plan_of(layer).partition(f'relations: {_PYGS}')[2]


def must_fuse(layer: Any) -> Any:
    """The layer, of which a call of PyG's code raises an error, also in compiled code."""
    assert hasattr(layer, '_edges_for_pyg'), f'{type(layer).__name__} asks nobody before PyG runs'
    layer._edges_for_pyg = _refuse
    return layer


def may_leave(layer: Any) -> Any:
    """The layer, free to run PyG's code again."""
    vars(layer).pop('_edges_for_pyg', None)
    return layer


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("PyG's own path was taken")
