"""Processes that begin with PyTorch, PyG and pyg_fast imported: forks of a server.

Importing them takes 5 s, much longer than most of the scripts that tests run. A fork is as fresh as
a new interpreter otherwise: the server builds no layer and calls no kernel.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

_TESTS = Path(__file__).parent


class _Server:
    """The process that forks; it ends with this one, when its standard input is closed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=_TESTS.parent,
        )  # fmt: skip

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


_server: list[_Server] = []


class Fork:
    """As `subprocess.Popen([sys.executable, *arguments])`, with both outputs captured as text."""

    def __init__(
        self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        if not _server:
            _server.append(_Server())
        self.arguments, self.returncode = arguments, None
        self._folder = TemporaryDirectory()
        self._pid = _server[0].ask(
            arguments=arguments, folder=self._folder.name, cwd=str(cwd or Path.cwd()),
            env=dict(os.environ if env is None else env),
        )  # fmt: skip

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Both outputs, once the process has ended."""
        end = time.monotonic() + timeout
        while self.returncode is None:
            self.returncode = _server[0].ask(wait=self._pid)
            if self.returncode is None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.arguments, timeout)
        out, error = (Path(self._folder.name, name).read_text() for name in ('out', 'error'))
        return out, error

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self._pid, signal.SIGKILL)
            self.communicate()


def run_together(
    script: str, size: int, *arguments: str, codes: Mapping[int, int] | None = None,
    timeout: float = 60,
) -> None:  # fmt: skip
    """Runs a script in several processes, with their numbers as first argument. Each prints `done`
    in time, or ends with its code."""
    root = os.pathsep.join([str(_TESTS.parent), os.environ.get('PYTHONPATH', '')])
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': root}
    workers = [Fork('-c', script, str(rank), *arguments, env=env) for rank in range(size)]
    try:
        for rank, worker in enumerate(workers):
            out, err = worker.communicate(timeout=timeout)
            code = (codes or {}).get(rank, 0)
            assert (worker.returncode, out) == (code, '' if code else 'done\n'), f'{rank}: {err}'
    finally:
        for worker in workers:
            worker.kill()


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *arguments])`, with both outputs captured as text."""
    fork = Fork(*arguments, **options)
    try:
        out, error = fork.communicate()
    finally:
        fork.kill()
    return subprocess.CompletedProcess(arguments, fork.returncode, out, error)


def _serve() -> dict[str, Any] | None:
    """Forks at each request; returns the request in the fork, None at the end."""
    gc.disable()
    import pyg_fast.nn  # noqa: F401

    gc.enable()
    gc.freeze()  # so that forks neither look through nor copy what was imported
    gc.set_threshold(20_000, 20, 20)
    for line in iter(sys.stdin.readline, ''):
        request = json.loads(line)
        if 'wait' in request:
            end, (pid, status) = time.monotonic() + 1, (0, 0)
            while not pid and time.monotonic() < end:
                pid, status = os.waitpid(request['wait'], os.WNOHANG)
                time.sleep(0 if pid else 0.01)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                return request
        print(json.dumps(answer), flush=True)
    return None


def _become(arguments: list[str], folder: str, cwd: str, env: dict[str, str]) -> None:
    """Does what `python *arguments` would."""
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f'{folder}/out', os.O_WRONLY | os.O_CREAT),
        (2, f'{folder}/error', os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(name, flags, 0o600), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if 'OMP_NUM_THREADS' in env:
        import torch

        torch.set_num_threads(int(env['OMP_NUM_THREADS']))
    option = arguments[0]
    what, *sys.argv[1:] = arguments[1:] if option in ('-c', '-m') else arguments
    sys.argv[0] = '-c' if option == '-c' else what
    first = {'-c': '', '-m': cwd}.get(option, str(Path(what).parent))
    named = [path for path in env.get('PYTHONPATH', '').split(os.pathsep) if path]
    sys.path[:1] = [first, *(path for path in named if path not in sys.path)]
    if option == '-m':
        runpy.run_module(what, run_name='__main__', alter_sys=True)
        return
    main = ModuleType('__main__')
    sys.modules['__main__'] = sys.modules['__mp_main__'] = main  # where pickle finds its classes
    if option == '-c':
        code = compile(what, '<string>', 'exec')
    else:
        main.__file__, code = what, compile(Path(what).read_bytes(), what, 'exec')
    exec(code, vars(main))


if __name__ == '__main__':
    sys.path.insert(1, str(_TESTS.parent))  # not installed, as where tests run in the checkout
    if request := _serve():
        _become(**request)
