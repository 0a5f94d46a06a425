"""The example that writes a layer."""

import importlib
import sys
from pathlib import Path

import pytest
import torch


def test_like_pyg(capsys: pytest.CaptureFixture, device: torch.device) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / 'examples'))
    try:
        example = importlib.import_module('custom_layer')
    finally:
        sys.path.pop(0)
    line = '--nodes 200 --edges 1000 --channels 8 --edge-channels 3 --repeats 1 --device'
    error = example.main([*line.split(), device.type])
    assert error < 1e-4
    out = capsys.readouterr().out
    assert 'fused: ' in out
    assert 'pyg_fast' in out
