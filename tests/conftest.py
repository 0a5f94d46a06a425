"""Fixtures of all tests: devices, real data, seeds; hypothesis settings."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import hypothesis
import pytest
import torch
from _patches import forbid, limits, record_calls  # noqa: F401
from _skipped import *  # noqa: F403

hypothesis.settings.register_profile('default', deadline=None, max_examples=25)
hypothesis.settings.register_profile(
    'ci', hypothesis.settings.get_profile('default'), derandomize=True, database=None
)
hypothesis.settings.register_profile(  # for runs under a sanitizer, which are slow
    'few', hypothesis.settings.get_profile('ci'), max_examples=5
)
hypothesis.settings.load_profile('ci' if os.environ.get('CI') else 'default')

if 'TORCHINDUCTOR_CACHE_DIR' not in os.environ:
    # Inductor keys its cache by the names of ops: that of an earlier commit may hold other shapes.
    os.environ['TORCHINDUCTOR_CACHE_DIR'] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ['TORCHINDUCTOR_CACHE_DIR'], ignore_errors=True)

# What no test needs: Inductor compiles a program for each set of instructions, to see whether it
# runs; Dynamo collects garbage each time that it has compiled something.
os.environ.setdefault('TORCHINDUCTOR_VEC_ISA_OK', '1')
os.environ.setdefault('TORCH_DYNAMO_RUN_GC_AFTER_COMPILE', '0')

if 'PYTEST_XDIST_WORKER' in os.environ:  # One thread for each worker and its processes.
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))
elif 'OMP_NUM_THREADS' not in os.environ:
    torch.set_num_threads(2)


gc.disable()  # during collection, which leaves hardly any garbage


def pytest_collection_finish() -> None:
    """Makes the collector of garbage run seldom, and pass over all that was imported."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# Tests are of kernels: on their graphs PyG's code would be compared with itself.
os.environ.setdefault('PYG_FAST_SMALL_GRAPHS', 'kernel')


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope='session')
def compiled_propagate() -> None:
    """PyG compiles a class for the options of its first instance, such as aggr='median', for which
    later ones would refuse sparse matrices: whichever test came first."""
    # Here, as the process that starts those of pytest-xdist would import it before them.
    from torch_geometric.nn import GINConv, SAGEConv

    SAGEConv(1, 1), GINConv(torch.nn.Identity())


@pytest.fixture(autouse=True, scope='session')
def quick_guards() -> None:
    """Dynamo empties the CPU's caches to time the guards of all that it compiles, for a log."""
    import torch._dynamo.guards

    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


DEVICES = ['cpu', 'cuda'] if torch.cuda.is_available() else ['cpu']


def pytest_report_header() -> str | None:
    return None if 'cuda' in DEVICES else 'no CUDA device: thousands of tests run on the CPU only'


@pytest.fixture(scope='session', params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device of the machine that has kernels."""
    if request.param == 'cuda':
        import pyg_fast

        if not pyg_fast.with_cuda():
            pytest.skip('pyg_fast was built without CUDA')
    return torch.device(request.param)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    return device


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    """Clears the pending errors of raw ops, which the next test would raise otherwise."""
    yield
    if torch.cuda.is_initialized():
        from _raw_ops import raise_pending

        torch.cuda.synchronize()
        with suppress(IndexError):
            raise_pending()


@pytest.fixture(scope='module')
def several_threads() -> Iterator[None]:
    """Runs CPU kernels on three threads: workers of pytest-xdist have only one."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def raises(device: torch.device) -> Callable[..., AbstractContextManager]:
    """`pytest.raises`, where CUDA may report an edge out of range at the next call alone."""

    @contextmanager
    def raised(error: type[Exception], match: str) -> Iterator[None]:
        if device.type != 'cuda' or error is not IndexError:
            with pytest.raises(error, match=match):
                yield
            return
        from _raw_ops import raise_pending

        # CUDA may report any of several invalid edges, and either end of one.
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
