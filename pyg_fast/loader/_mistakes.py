"""Warnings of what no error shows: seeds and permutations that do not fit the graph."""

import warnings

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage, EdgeStorage

from ..graph.csr import perm_name


def warn_of_empty_mask(data: object, input_nodes: object, stacklevel: int) -> None:
    """Warns of seeds by a mask that is False everywhere: an epoch without batches looks well."""
    mask = input_nodes[-1] if isinstance(data, HeteroData) else input_nodes  # type: ignore[index]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or bool(mask.any()):
        return
    stores = data.node_stores if isinstance(data, (Data, HeteroData)) else ()
    names = [f'{_name(s)}.{key}' for s in stores for key, value in s.items() if value is mask]
    name = f' ({names[0]})' if names else ''
    warnings.warn(
        f"'input_nodes'{name} is a mask of {mask.numel()} nodes that is False everywhere, so the "
        'loader has no batch: give a mask that holds a node',
        stacklevel=stacklevel + 1,
    )


def warn_of_stale_perm(data: object, stacklevel: int) -> None:
    """Warns of a permutation of :class:`~pyg_fast.transforms.ToCSR` that a later transform has
    left behind, or merged as if it were a feature of the edges."""
    for store in data.edge_stores if isinstance(data, BaseData) else ():
        name = perm_name(store)
        if name is None or name not in store or _names_edges_once(store, store[name]):
            continue
        warnings.warn(
            f"'{_name(store)}.{name}' is not the permutation of the {store.num_edges} edges any "
            'more: a transform after ToCSR has added, merged or dropped edges. Apply ToCSR last',
            stacklevel=stacklevel + 1,
        )


def _names_edges_once(store: EdgeStorage, perm: object) -> bool:
    """Whether a permutation, or a part of one, may be that of the edges of a store."""
    if not isinstance(perm, Tensor) or perm.dtype != torch.int64:
        return False
    if perm.shape != (store.num_edges,):
        return False
    if perm.numel() == 0:
        return True
    if int(perm.min()) < 0:
        return False
    found = torch.zeros(int(perm.max()) + 1, dtype=torch.bool, device=perm.device)
    found[perm] = True
    return int(found.sum()) == perm.numel()


def _name(store: BaseStorage) -> str:
    return 'data' if store._key is None else f'data[{store._key!r}]'
