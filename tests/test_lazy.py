"""Names that a user seeks in the package itself."""

import subprocess
import sys

import pytest

import pyg_fast


@pytest.mark.parametrize(
    ('name', 'home'),
    [
        ('FusedMessagePassing', 'nn'), ('MaxK', 'nn'), ('FastNeighborLoader', 'loader'),
        ('ToCSR', 'transforms'), ('message_passing', 'ops'),
    ],
)  # fmt: skip
def test_errors_tell_the_module_of_a_name(name: str, home: str) -> None:
    with pytest.raises(AttributeError, match=f'it is pyg_fast.{home}.{name}$'):
        getattr(pyg_fast, name)
    assert hasattr(getattr(pyg_fast, home), name)
    assert not hasattr(pyg_fast, name)


def test_names_of_no_module() -> None:
    code = 'import pyg_fast; pyg_fast.acelerate'
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert "has no attribute 'acelerate'. Did you mean: 'accelerate'?" in run.stderr
