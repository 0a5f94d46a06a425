"""Fixtures of all tests: devices, real data, seeds; hypothesis settings; `--skipped`."""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from torch_geometric.nn import GINConv, SAGEConv

hypothesis.settings.register_profile('default', deadline=None, max_examples=25)
hypothesis.settings.register_profile(
    'ci', hypothesis.settings.get_profile('default'), derandomize=True, database=None
)
hypothesis.settings.register_profile(  # under a sanitizer, which slows all down
    'few', hypothesis.settings.get_profile('ci'), max_examples=5
)
hypothesis.settings.load_profile('ci' if os.environ.get('CI') else 'default')

if 'PYTEST_XDIST_WORKER' in os.environ:  # Processes of their own, and of theirs.
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))
elif 'OMP_NUM_THREADS' not in os.environ:
    torch.set_num_threads(2)


_SKIPPED = 'pyg_fast/skipped'  # where pytest's cache keeps what the last run skipped
_skipped: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--skipped', action='store_true', help='run only what the last run skipped, and what does '
        'more with packages that may have been installed since (marked `optional`)',
    )  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption('--skipped'):
        return
    cache = getattr(config, 'cache', None)  # -p no:cacheprovider
    last = cache.get(_SKIPPED, None) if cache else None
    if last is None:
        raise pytest.UsageError('--skipped: the cache holds no run before this one')
    last = {*last}

    def again(item: pytest.Item) -> bool:
        file = item.nodeid.split('::')[0]  # may skip as a whole
        return item.nodeid in last or file in last or bool(item.get_closest_marker('optional'))

    config.hook.pytest_deselected(items=[item for item in items if not again(item)])
    items[:] = filter(again, items)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, 'wasxfail'):
        _skipped.append(report.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Adds what a process of pytest-xdist has skipped while it collected."""
    _skipped.extend(getattr(node, 'workeroutput', {}).get(_SKIPPED, ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    cache = getattr(session.config, 'cache', None)
    if hasattr(session.config, 'workeroutput'):
        session.config.workeroutput[_SKIPPED] = _skipped
    elif cache and not session.config.option.collectonly:
        cache.set(_SKIPPED, sorted({*_skipped}))


def pytest_collection_finish() -> None:
    """Lets collections of garbage, of which tests make many, pass over all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope='session')
def compiled_propagate() -> None:
    """PyG compiles a class for the options of its first instance, such as aggr='median', for which
    later ones would refuse sparse matrices: whichever test came first."""
    SAGEConv(1, 1), GINConv(torch.nn.Identity())


@pytest.fixture(scope='session', params=['cpu', 'cuda'])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that has kernels."""
    if request.param == 'cuda':
        import pyg_fast

        if not torch.cuda.is_available():
            pytest.skip('no CUDA device')
        if not pyg_fast.with_cuda():
            pytest.skip('pyg_fast was built without CUDA')
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    """What raw ops report of edges out of range is no error of the next test."""
    yield
    if torch.cuda.is_initialized():
        from pyg_fast.ops._edges import raise_pending

        torch.cuda.synchronize()
        with suppress(IndexError):
            raise_pending()


@pytest.fixture
def raises(device: torch.device) -> Callable[..., AbstractContextManager]:
    """`pytest.raises`, where CUDA may report an edge out of range at the next call alone."""

    @contextmanager
    def raised(error: type[Exception], match: str) -> Iterator[None]:
        if device.type != 'cuda' or error is not IndexError:
            with pytest.raises(error, match=match):
                yield
            return
        from pyg_fast.ops._edges import raise_pending

        # Of several such edges, and of both ends of one, any may be reported.
        match = 'edge_index' if 'edge_index' in match else match
        with pytest.raises(IndexError, match=match):  # noqa: PT012
            yield
            torch.cuda.synchronize()
            raise_pending()

    return raised


@pytest.fixture(scope='session')
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Copies `name` of a collection of real graphs and gives the collection's folder.

    `Planetoid(data_root('Planetoid', 'Cora'), 'Cora')` reads the copy; so does
    `numpy.load(data_root('structure', 'ca_astroph.npz') / 'ca_astroph.npz')`.
    """
    if 'PYG_FAST_DATA' not in os.environ:
        pytest.skip('PYG_FAST_DATA names no folder of real graphs')
    source = Path(os.environ['PYG_FAST_DATA'])
    target = tmp_path_factory.mktemp('data')

    def copied(collection: str, name: str) -> Path:
        place, copy = source / collection / name, target / collection / name
        if not place.exists():
            pytest.skip(f'PYG_FAST_DATA has no {collection}/{name}')
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            if place.is_dir():  # contents only: the source may be read-only, the copy must not be
                shutil.copytree(place, copy, copy_function=shutil.copyfile)
                for folder in [copy, *filter(Path.is_dir, copy.rglob('*'))]:
                    folder.chmod(0o755)
            else:
                shutil.copyfile(place, copy)
        return copy.parent

    return copied
