"""One transform with everything that a model on execution paths needs."""

import inspect
from typing import Any

from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import functional_transform
from torch_geometric.transforms import BaseTransform

from ..._alike import naming_keywords
from ..._progress import LARGE, progress
from ...ops._numbers import check_flag
from ...transforms.group_sizes import STRATEGIES, GroupSizes
from ...transforms.to_csr import ToCSR, check_data, check_no_data
from .transform import ExecutionPaths


@functional_transform('prepare')
class Prepare(BaseTransform):
    r"""Sorts a graph and prepares the execution path of each layer (functional name:
    :obj:`prepare`): :class:`~pyg_fast.transforms.ToCSR`,
    :class:`~pyg_fast.transforms.ExecutionPaths` and
    :class:`~pyg_fast.transforms.GroupSizes` in one. Apply it last, on the device where the graph is
    used: copies and :obj:`to` keep the paths with their group sizes, but not those of the graph.
    Its :obj:`repr` then shows each layer's path: active rows, edges, their share of the graph and
    bytes.

    Args:
        num_layers (int): Number of layers of the model.
        mask (str): Name of the mask of training nodes. (default: :obj:`"train_mask"`)
        group_sizes (str, optional): The strategy of
            :class:`~pyg_fast.transforms.GroupSizes`; :obj:`None`: groups have the sizes that suit
            most graphs. (default: :obj:`"regression"`)
        width (int): The number of features to choose group sizes for. (default: :obj:`64`)
        keep_edge_index (bool): As in :class:`~pyg_fast.transforms.ToCSR`. (default: :obj:`True`)
        **kwargs (optional): Additional arguments of
            :class:`~pyg_fast.transforms.ExecutionPaths`.

    Raises:
        TypeError, ValueError, IndexError: As these three transforms.
    """

    @naming_keywords
    def __init__(
        self,
        num_layers: int,
        mask: str = 'train_mask',
        group_sizes: str | None = 'regression',
        width: int = 64,
        keep_edge_index: bool = True,
        **kwargs: Any,
    ) -> None:
        check_no_data('Prepare(num_layers)', num_layers)
        check_flag('keep_edge_index', keep_edge_index)
        unknown = sorted(kwargs.keys() - inspect.signature(ExecutionPaths).parameters.keys())
        if unknown:
            raise TypeError(f'Prepare got unexpected arguments {unknown}')
        if group_sizes is not None and group_sizes not in STRATEGIES:
            raise ValueError(
                f"'group_sizes' must be one of {(*STRATEGIES, None)}, got {group_sizes!r}"
            )
        paths = ExecutionPaths(num_layers, mask, **kwargs)
        # Nobody needs the list of a graph that does not stay.
        keep_edge_index = keep_edge_index and paths.options['keep_graph']
        self.transforms: list[BaseTransform] = [ToCSR(keep_edge_index), paths]
        if group_sizes is not None:
            self.transforms.append(GroupSizes(group_sizes, width))
        self._prepared: list[str] = []

    def forward(self, data: Data | HeteroData) -> Data | HeteroData:
        check_data(data)
        for transform in progress(self.transforms, 'Prepare', shown=data.num_edges >= LARGE):
            data = transform.forward(data)  # `transform(data)` would keep its input alive
        self._prepared = [repr(path) for path in data.execution_paths]
        return data

    def __repr__(self) -> str:
        parts = [repr(transform) for transform in self.transforms]
        if self._prepared:
            parts.append(f'last prepared: {"; ".join(self._prepared)}')
        return f'{type(self).__name__}({", ".join(parts)})'
