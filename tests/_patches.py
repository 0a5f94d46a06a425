"""Fixtures that change the package for one test: no other module knows these places.

A limit divides small inputs from large ones. Tests move it, so that small inputs run what the
package runs on large ones.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import pytest

# By name: where it stands, in the package or in a benchmark.
LIMITS = {
    # Numbers that 32 bits hold, of edges and of nodes.
    'edges_of_int32': ['pyg_fast.sparse.to_csr._INT32_MAX'],
    'nodes_of_edge_sums': ['pyg_fast.ops.edge_sums.MOST_NODES'],
    'nodes_of_layers': ['pyg_fast.nn._checks.MOST_NODES'],
    # Sizes of blocks.
    'chunk_of_edges': ['pyg_fast.sparse.graph.CHUNK', 'pyg_fast.graph.signature.CHUNK'],
    'block_of_planted_edges': ['pyg_fast.datasets._EDGE_BLOCK'],
    'block_of_planted_nodes': ['pyg_fast.datasets._NODE_BLOCK'],
    'rows_staged_at_once': ['pyg_fast.ops.row_blocks._STAGED_AT_ONCE'],
    'rows_of_inference': ['pyg_fast.nn._inference._ROWS'],
    'fewest_rows_of_inference': ['pyg_fast.nn._inference._FEWEST_ROWS'],
    'fewest_rows_of_streams': ['pyg_fast.ops.linear_product._FEWEST_ROWS'],
    'blocks_of_streams': ['pyg_fast.ops.linear_product._MOST_BLOCKS'],
    'bytes_of_message_blocks': ['pyg_fast.message._blocks.MAX_BYTES'],
    'edges_of_block_parts': ['pyg_fast.message._blocks._PART'],
    'grain_of_messages': ['pyg_fast.message._cpu._GRAIN'],
    'edges_of_a_share': ['pyg_fast.message._cpu._MIN_EDGES'],
    'shares_of_messages': ['pyg_fast.message._cpu._MAX_SHARES'],
    # From where on another way is faster.
    'few_edges': ['pyg_fast.graph.small_graphs._LIMITS'],
    'edges_in_groups': ['pyg_fast.sparse.graph._FEW'],
    'edges_in_larger_groups': ['pyg_fast.sparse.graph._SOME'],
    'edges_in_largest_groups': ['pyg_fast.sparse.graph._MANY'],
    'numbers_filled_first': ['pyg_fast.ops.path._MANY'],
    'numbers_scaled_first': ['pyg_fast.ops.product._SCALED_FIRST'],
    'dense_share': ['pyg_fast.ops.product._DENSE_SHARE'],
    'cache_bytes': ['pyg_fast.ops.product._CACHE_BYTES'],
    'wide_vectors': ['pyg_fast.ops.product._WIDE_VECTORS'],
    'additions_on_cuda': ['pyg_fast.ops.aggregate._CUDA_ADDITIONS'],
    'moves_of_scores': ['pyg_fast.ops.edge_scores._MOVES'],
    'edges_guessed': ['pyg_fast.ops.neighbor_sample._MOST_GUESSED'],
    'pairs_by_number': ['pyg_fast.nn.relational._MOST_NUMBERS'],
    'width_of_maps': ['pyg_fast.nn.hgt._LEAST_WIDTH'],
    'values_gathered': ['pyg_fast.message._passes._GATHERED'],
    'captures': ['pyg_fast.message._entry._MAX_CAPTURES'],
    # What was fitted to measurements.
    'fitted_group_sizes': ['pyg_fast.transforms.group_sizes._FITTED'],
    # Sizes of benchmarks.
    'random_graphs': ['benchmarks.aggregate.SIZES'],
    'bytes_of_pygs_messages': ['benchmarks.gat.REFERENCE_BYTES'],
    'edges_looked_at': ['benchmarks.large_graphs._EDGES'],
    'messages_at_once': ['benchmarks.attention._BLOCK'],
}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Moves limits, given by their names in `LIMITS`, until the test ends. A limit that differs by
    device, or by kind of sum, takes one value for all of them, or a dict of some."""

    def move(**values: Any) -> None:
        for name, value in values.items():
            for place in LIMITS[name]:
                module, _, attribute = place.rpartition('.')
                before = getattr(import_module(module), attribute)
                if isinstance(before, dict):
                    some = value if isinstance(value, dict) else dict.fromkeys(
                        [*before, 'cpu', 'cuda'], value)  # fmt: skip
                    value = before | some
                monkeypatch.setattr(import_module(module), attribute, value)

    return move


@pytest.fixture
def record_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Records calls of a function, which run as ever: what `note` makes of the result and the
    arguments of each."""

    def record(
        owner: Any, name: str, note: Callable[..., Any], calls: list[Any] | None = None
    ) -> list[Any]:
        function = getattr(owner, name)
        seen: list[Any] = [] if calls is None else calls

        @wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            seen.append(note(result, *args, **kwargs))
            return result

        monkeypatch.setattr(owner, name, recorded)
        return seen

    return record


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the test fail where code calls a method or reads a property."""

    def refuse(owner: Any, name: str) -> None:
        def called(*args: Any, **kwargs: Any) -> None:
            raise AssertionError(f'{name} was asked')

        is_property = isinstance(getattr(owner, name), property)
        monkeypatch.setattr(owner, name, property(called) if is_property else called)

    return refuse
