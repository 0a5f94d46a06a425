"""Mini-batches sampled around links, made on the device that uses them."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.sampler import BaseSampler, NegativeSampling
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.neighbor_sampler import NumNeighborsType
from torch_geometric.typing import EdgeType, InputEdges

from ._links import LinkInput
from ._loader import NamedSampler, SampledLoader
from ._options import (
    BatchOptions,
    OutputTransform,
    SamplingOptions,
    StorageOptions,
    check_bool,
    check_callable,
    check_data,
    check_remote,
    refuse_unsupported,
    resolve_device,
    resolve_fanouts,
    resolve_negatives,
    resolve_replicas,
    resolve_subgraph_type,
)
from ._pipeline import Transform


class FastLinkNeighborLoader(SampledLoader, LinkNeighborLoader):
    r"""PyG's :class:`~torch_geometric.loader.LinkNeighborLoader` on the kernels of
    :class:`FastNeighborLoader`: mini-batches of neighbours sampled around links and around random
    negative ones, made on the device that uses them.

    .. code-block:: python

        loader = FastLinkNeighborLoader(data, num_neighbors=[15, 10], batch_size=1024,
                                        edge_label_index=split.edge_label_index, shuffle=True,
                                        neg_sampling='binary', device='cuda')
        for batch in loader:
            z = model(batch.x, batch.edge_index)
            src, dst = batch.edge_label_index
            loss = F.binary_cross_entropy_with_logits((z[src] * z[dst]).sum(-1), batch.edge_label)

    **Batches** are as PyG's, and have what those of :class:`FastNeighborLoader` have. The ends of
    the links, sorted and each of them once, come first in :obj:`n_id`; with :obj:`disjoint` or
    :obj:`time_attr` each end of a link has a subgraph of its own, and :obj:`batch` is the number of
    the link, for a negative one that of its positive link. About the links they tell, of
    :class:`~torch_geometric.data.HeteroData` in the edge type of the links and its node types:

    - without :obj:`neg_sampling`: :obj:`edge_label_index` :math:`(2, P)`, positions in
      :obj:`n_id`, and :obj:`edge_label` and :obj:`edge_label_time`, if given;
    - binary: the same of the :math:`P` links, then of :math:`\lceil P \cdot \textrm{amount} \rceil`
      negative ones; :obj:`edge_label` is 1 for links and 0 for negatives, or as given, plus 1 if
      the smallest label of all links is 0, and 0 for negatives;
    - triplet: :obj:`src_index` and :obj:`dst_pos_index` :math:`(P)`, and :obj:`dst_neg_index`
      :math:`(P, \textrm{amount})`, or :math:`(P)` for one, and :obj:`seed_time`, if times are
      given. An :obj:`edge_label` of :obj:`data` stays, as PyG's: it is not that of these links.

    **Negatives** are drawn on :obj:`device`: binary ones by both ends, triplets by their
    destination, equally or in proportion to the weights of :obj:`neg_sampling`. As PyG's they may
    be edges by chance, except with :obj:`true_negatives`. With times of nodes a negative exists at
    the time of its link; if no node does, it is the earliest one.

    **The edge that a model is to predict** is in its sampled graph, too, if it is an edge of
    :obj:`data`: the model then learns to find it there. That holds for times, too: an edge is
    sampled from its own time on. With :obj:`drop_seed_edges` a batch has no edge between the ends
    of one of its links, in the direction of the link, and with :obj:`rev_edge_type` in none: choose
    both in undirected graphs.

    For randomness, changed data, memory, CUDA graphs, PyG's interface and arguments that are not
    listed below see :class:`FastNeighborLoader`.

    Args:
        data (Data, HeteroData or (FeatureStore, GraphStore)): The graph.
        num_neighbors (list of int or dict): Most edges per node in each hop, from the
            links outwards, of all edge types or of each; :obj:`-1`: all; :obj:`0`: none.
        edge_label_index (Tensor, optional): The links :math:`(2, |\mathcal{L}|)`, of any integer
            dtype. A copy is made. Of :obj:`HeteroData` a pair of the edge type, which need not be
            one of the graph, and links; or an edge type: all its edges.
            (default: :obj:`None`, all edges)
        edge_label (Tensor, optional): Their labels :math:`(|\mathcal{L}|, *)`.
            (default: :obj:`None`)
        edge_label_time (Tensor, optional): Their times :math:`(|\mathcal{L}|)`, integers, given
            with :obj:`time_attr`. (default: :obj:`None`)
        replace (bool): As in :class:`FastNeighborLoader`. (default: :obj:`False`)
        subgraph_type (SubgraphType or str): The same. With :obj:`"bidirectional"`,
            :obj:`drop_seed_edges` drops both directions. (default: :obj:`"directional"`)
        disjoint (bool): The same. (default: :obj:`False`)
        temporal_strategy (str): The same. (default: :obj:`"uniform"`)
        neg_sampling (NegativeSampling or str, optional): :obj:`"binary"`, :obj:`"triplet"`, or
            PyG's :class:`~torch_geometric.sampler.NegativeSampling` or its arguments as a
            dictionary, with an amount and weights of nodes. (default: :obj:`None`)
        neg_sampling_ratio (float, optional): Binary negatives for each link, as :obj:`neg_sampling`
            tells, too. (default: :obj:`None`)
        time_attr (str, optional): As in :class:`FastNeighborLoader`. (default: :obj:`None`)
        weight_attr (str, optional): As in :class:`FastNeighborLoader`. (default: :obj:`None`)
        transform (callable, optional): The same. (default: :obj:`None`)
        transform_sampler_output (callable, optional): The same; its :obj:`metadata` is PyG's.
            (default: :obj:`None`)
        is_sorted (bool): The same. (default: :obj:`False`)
        filter_per_worker (bool, optional): Without effect. (default: :obj:`None`)
        neighbor_sampler: TypeError: this loader samples itself.
        directed (bool): Deprecated as in PyG. (default: :obj:`True`)
        batch_size (int): Number of links of a batch, without negatives. (default: :obj:`1`)
        shuffle (bool): Shuffle the links in every epoch. (default: :obj:`False`)
        drop_last (bool): Drop a last batch that is smaller. (default: :obj:`False`)
        true_negatives (bool): Never draw an edge of :obj:`data` or a link of
            :obj:`edge_label_index` as a negative: other pairs are as likely as if such were drawn
            again. Two exceptions: if eight draws by weight hit edges, the destination is drawn with
            equal weights; with times of nodes the source of a binary one is drawn first, and if all
            destinations of that time are its neighbours, it gets the earliest one. Takes 16 bytes
            for each edge on the device. (default: :obj:`False`)
        drop_seed_edges (bool): Drop the edges between the ends of the links of a batch from its
            sampled graph, parallel ones too. They are not replaced by others; where each end of a
            link has a subgraph of its own, the node at the other end stays there, without that
            edge. On CUDA a batch waits once more for its size. (default: :obj:`False`)
        rev_edge_type (bool or tuple): Drop their reverses, too, of :obj:`HeteroData` those of this
            type; :obj:`True`: of the same type as the links. (default: :obj:`False`)
        max_age (int, optional): As in :class:`FastNeighborLoader`. (default: :obj:`None`)
        sampler (Sampler, optional): Positions in :obj:`edge_label_index`.
            (default: :obj:`None`)
        batch_sampler (Sampler, optional): Lists of such positions. (default: :obj:`None`)
        input_id (Tensor, optional): :obj:`batch.input_id` of each link.
            (default: :obj:`None`, its position in :obj:`edge_label_index`)

    Raises:
        TypeError: If an argument has a type that is not supported.
        ValueError: If a value or a shape does not fit, or all pairs of nodes are edges with
            :obj:`true_negatives`.
        IndexError: If :obj:`edge_label_index` or the graph have nodes that do not exist.
        RuntimeError: As :class:`FastNeighborLoader`.
    """

    def __init__(
        self,
        data: Data | HeteroData | tuple[FeatureStore, GraphStore],
        num_neighbors: NumNeighborsType,
        edge_label_index: InputEdges = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = 'directional',
        disjoint: bool = False,
        temporal_strategy: str = 'uniform',
        neg_sampling: NegativeSampling | str | dict | None = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Transform | None = None,
        transform_sampler_output: OutputTransform | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: object = None,
        directed: bool = True,
        *,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        true_negatives: bool = False,
        drop_seed_edges: bool = False,
        rev_edge_type: EdgeType | bool = False,
        max_age: int | None = None,
        window: int = 8,
        match: bool = True,
        reorder: bool | None = None,
        cache_ratio: float = 0.0,
        device: torch.device | str | None = None,
        features: str = 'auto',
        topology: str = 'auto',
        seed: int | None = None,
        custom_cls: Callable[[], Data] | None = None,
        input_id: Tensor | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        generator: torch.Generator | None = None,
        rank: int | None = None,
        num_replicas: int | None = None,
        max_device_bytes: int | None = None,
        **kwargs: object,
    ) -> None:
        check_data(data)
        refuse_unsupported(FastLinkNeighborLoader, neighbor_sampler, kwargs)
        check_callable('transform', transform)
        if (edge_label_time is None) != (time_attr is None):
            raise ValueError("'edge_label_time' and 'time_attr' must be given together")
        fanouts, by_type = resolve_fanouts(data, num_neighbors)
        sampling = SamplingOptions(
            fanouts, None, replace, resolve_subgraph_type(subgraph_type, directed), weight_attr,
            is_sorted, transform_sampler_output, by_type, disjoint, time_attr, temporal_strategy,
            max_age,
        )  # fmt: skip
        check_remote(data, sampling)
        batches = BatchOptions(
            batch_size,
            shuffle,
            drop_last,
            *resolve_replicas(rank, num_replicas),
            sampler,
            batch_sampler,
        )
        storage = StorageOptions(
            resolve_device(data, device), features, topology, cache_ratio, max_device_bytes, match,
            reorder if shuffle or reorder is not None else False, window,
        )  # fmt: skip
        negatives = resolve_negatives(neg_sampling, neg_sampling_ratio, true_negatives)
        check_bool('drop_seed_edges', drop_seed_edges)
        if rev_edge_type and not drop_seed_edges:
            raise ValueError("'rev_edge_type' needs drop_seed_edges=True")
        seeds = LinkInput(
            edge_label_index,
            edge_label,
            edge_label_time,
            input_id,
            negatives,
            true_negatives,
            drop_seed_edges,
            rev_edge_type,
        )
        self._set_up(
            data, seeds, sampling, batches, storage, seed, generator, transform, custom_cls
        )
        self.edge_label_index, self.neg_sampling = edge_label_index, negatives

    @property
    def link_sampler(self) -> BaseSampler:
        """Has :obj:`num_neighbors`, as PyG's sampler; it cannot sample."""
        return NamedSampler(self._core.num_neighbors)
