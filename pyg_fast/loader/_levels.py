"""Where the rows of each graph of a dataset lie."""

import warnings
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch_geometric.data.storage import E_KEYS, N_KEYS

from ..errors import ShapeError
from ..graph.csr import EDGE_ATTRS

Ints = npt.NDArray[np.int64]


# The first levels: one row a graph, the nodes, and the edges.
GRAPHS, NODES, EDGES = range(3)


def _names_edges(key: str) -> bool:
    return key in E_KEYS or 'edge' in key


def _names_nodes(key: str) -> bool:
    return key in N_KEYS or 'node' in key


class NumReal(NamedTuple):
    """The numbers of graphs, nodes and edges of a batch that are not of a padding."""

    graphs: int
    nodes: int
    edges: int


class Padding(NamedTuple):
    """The nodes and edges that fill a batch up to the sizes of its bucket, as one more graph."""

    num_nodes: int
    num_edges: int


class Levels:
    """The kinds of rows of a dataset: graphs, nodes, edges, and others with their own numbers of
    rows a graph.

    Args:
        num_nodes: The number of nodes of each graph.
        num_edges: The number of edges of each graph.
    """

    def __init__(self, num_nodes: Ints, num_edges: Ints) -> None:
        self._sizes: list[Ints] = []
        self._numbers: dict[bytes, list[int]] = {}
        self._ptr: Ints | None = None
        #: Increments that are tensors, with one for each graph.
        self.incs: list[Tensor] = []
        for sizes in (np.ones_like(num_nodes), num_nodes, num_edges):
            self._add(sizes)

    def _add(self, sizes: Ints) -> int:
        number = len(self._sizes)
        self._numbers.setdefault(sizes.tobytes(), []).append(number)
        self._sizes.append(sizes)
        self._ptr = None
        return number

    def find(self, key: str, sizes: Ints) -> int | None:
        """The level of an attribute with these numbers of rows: where several have them, its name
        decides, as in PyG."""
        numbers = self._numbers.get(sizes.tobytes())
        if numbers is None:
            return None
        if EDGES in numbers and _names_edges(key):
            return EDGES
        if NODES in numbers and _names_nodes(key):
            return NODES
        return numbers[0]

    def check_rows(self, key: str, sizes: Ints) -> None:
        """Raises if an attribute of edges by its name has too many rows in one graph and too few in
        another: those of a batch may fit by chance, and belong to other edges then. Warns if it
        does not fit otherwise, which is no error: a model may do without."""
        more = sizes - self.sizes(EDGES)
        is_of_graphs = bool((sizes == 1).all())
        if key not in EDGE_ATTRS or is_of_graphs or not more.any():
            return
        graph = int((more != 0).argmax())
        if not ((more > 0).any() and (more < 0).any()):
            warnings.warn(
                f"'{key}' of graph {graph} of the dataset has {sizes[graph]} rows for "
                f'{self.sizes(EDGES)[graph]} edges, so no layer can use that of a batch: give it '
                f"as many rows, or pass exclude_keys=['{key}']",
                stacklevel=5,  # beside the call of GraphLoader
            )
            return
        raise ShapeError(
            f"'{key}' of graph {graph} of the dataset must have a row for each of its "
            f'{self.sizes(EDGES)[graph]} edges, got {sizes[graph]}: mend it, or pass '
            f"exclude_keys=['{key}']"
        )

    def why_unsure(self, key: str, sizes: Ints) -> str | None:
        """Why nobody knows whether an attribute with these numbers of rows is one of edges."""
        numbers = self._numbers.get(sizes.tobytes(), [])
        is_named = _names_edges(key) or _names_nodes(key)
        if NODES in numbers and EDGES in numbers and not is_named:
            return f"all graphs have as many edges as nodes, and '{key}' a row for each"
        if key in EDGE_ATTRS and EDGES not in numbers and len(sizes):
            graph = int((sizes != self.sizes(EDGES)).argmax())
            return (
                f"'{key}' of graph {graph} of the dataset has {sizes[graph]} rows for "
                f'{self.sizes(EDGES)[graph]} edges'
            )
        return None

    def find_or_add(self, key: str, sizes: Ints) -> int:
        """The level of an attribute with these numbers of rows, a new one if there is none."""
        number = self.find(key, sizes)
        return self._add(sizes) if number is None else number

    def add_incs(self, incs: Tensor) -> int:
        """A number for increments that are tensors."""
        self.incs.append(incs)
        return len(self.incs) - 1

    def sizes(self, level: int) -> Ints:
        """The number of rows of each graph."""
        return self._sizes[level]

    @property
    def ptr(self) -> Ints:
        """Of each level the first row of each graph, and the number of rows."""
        if self._ptr is None:
            ptr = np.zeros((len(self._sizes), len(self._sizes[0]) + 1), dtype=np.int64)
            np.cumsum(np.stack(self._sizes), axis=1, out=ptr[:, 1:])
            self._ptr = ptr
        return self._ptr
