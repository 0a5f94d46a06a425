"""A pytest plugin: `--skipped` runs the tests that the last run skipped."""

from typing import Any

import pytest

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
    """Adds the tests that a process of pytest-xdist skipped during collection."""
    _skipped.extend(getattr(node, 'workeroutput', {}).get(_SKIPPED, ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    cache = getattr(session.config, 'cache', None)
    if hasattr(session.config, 'workeroutput'):
        session.config.workeroutput[_SKIPPED] = _skipped
    elif cache and not session.config.option.collectonly:
        cache.set(_SKIPPED, sorted({*_skipped}))
