"""What ran in the last eager call of a layer, as :func:`pyg_fast.accelerate_report` tells users."""

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
