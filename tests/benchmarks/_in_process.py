"""Scripts that a benchmark starts, in this process."""

import contextlib
import io
import runpy
import sys


def run_script(command: list[str]) -> str:
    """What a script prints that is run with the arguments behind its path."""
    out, argv, path = io.StringIO(), sys.argv, sys.path.copy()
    sys.argv = command
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(command[0], run_name='__main__')
    finally:
        sys.argv, sys.path[:] = argv, path
    return out.getvalue()
