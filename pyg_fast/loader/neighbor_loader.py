"""Sampled mini-batches, made on the device that uses them."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.loader import NeighborLoader
from torch_geometric.sampler import BaseSampler
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.neighbor_sampler import NumNeighborsType
from torch_geometric.typing import InputNodes

from ._loader import NamedSampler, SampledLoader
from ._options import (
    BatchOptions,
    OutputTransform,
    SamplingOptions,
    StorageOptions,
    check_callable,
    check_data,
    check_remote,
    refuse_unsupported,
    resolve_device,
    resolve_fanouts,
    resolve_replicas,
    resolve_subgraph_type,
    resolve_walks,
)
from ._pipeline import Transform
from ._seeds import NodeInput


class FastNeighborLoader(SampledLoader, NeighborLoader):
    r"""PyG's :class:`~torch_geometric.loader.NeighborLoader` on the kernels of the `"FastGL: A
    GPU-Efficient Framework for Accelerating Sampling-Based GNN Training at Large Scale"
    <https://arxiv.org/abs/2409.14939>`_ paper (ASPLOS 2024): mini-batches of sampled neighbours,
    made on the device that uses them.

    It also takes :class:`~torch_geometric.data.HeteroData`, samples by time, and gives each seed a
    subgraph of its own.

    Neighbours are sampled and renumbered on :obj:`device`. Features that do not fit there stay in
    pinned host memory, from which the GPU reads rows directly; rows that the previous batch
    (*match*) or a cache already has on the device are copied there instead. Of every
    :obj:`window` of batches, the next one shares the most nodes with the previous one
    (*reorder*). On CUDA a thread makes batches ahead on its own stream; on a CPU all kernels use
    torch's threads. There are no worker processes.

    .. code-block:: python

        loader = FastNeighborLoader(data, num_neighbors=[15, 10, 5], batch_size=1024,
                                    input_nodes=data.train_mask, shuffle=True, device='cuda')
        for batch in loader:
            out = model(batch.x, batch.edge_index)[:batch.batch_size]
            loss = F.cross_entropy(out, batch.y[:batch.batch_size])

    **Batches** are as PyG's: a copy of :obj:`data` with the rows of the sampled nodes and edges of
    every node-level and edge-level attribute, and :obj:`edge_index`, :obj:`n_id`, :obj:`e_id`,
    :obj:`input_id`, :obj:`batch_size`, :obj:`num_sampled_nodes`, :obj:`num_sampled_edges`. Seeds
    come first, then other nodes in order of first occurrence. The :obj:`edge_index` is an
    :class:`~torch_geometric.EdgeIndex` sorted by destination that kernels read without sorting,
    also after :func:`~torch_geometric.utils.trim_to_layer`. All of it is on :obj:`device`.
    It is a :class:`~pyg_fast.graph.BatchEdgeIndex`: with :obj:`dynamic=True`
    :func:`pyg_fast.compile` compiles a model once for batches of all sizes, also with
    :func:`~torch_geometric.utils.trim_to_layer` in it, after which layers sort in compiled code.
    For :func:`torch.compile` of PyG's layers use :obj:`edge_index.as_tensor()`.
    For a graph given as :obj:`adj_t` (a :obj:`SparseTensor`, or in layout
    :obj:`torch.sparse_csr`), batches have an :obj:`adj_t` too. Of
    :class:`~torch_geometric.data.HeteroData` each type has all of that, as in PyG;
    :obj:`input_id` and :obj:`batch_size` belong to the type of the seeds.

    **Time.** With :obj:`time_attr` an edge is sampled only if its own time, or that of its source,
    is not later than that of the seed, at every hop:

    .. math::
        \mathcal{E}(i, s) = \{ (j, i) : t_s - \textrm{max\_age} \le t_{(j, i)} \le t_s \}

    Types without the attribute are sampled without time. Each seed then has a subgraph of its own,
    as with :obj:`disjoint`: :obj:`batch` tells the seed of each node.

    **Randomness.** A batch depends only on :obj:`seed`, the number of the epoch and its own number,
    not on :obj:`window`, :obj:`match`, :obj:`reorder` or the device. Every epoch is different;
    :attr:`epoch` is the number of the next one, and may be set to continue after a restart.

    **Changed data.** Attributes on :obj:`device`, attributes that require gradients and, on a CPU,
    all attributes are read when the loader returns a batch, on the stream that uses it: each batch
    sees all earlier writes. For the others, batches read copies made with the loader:

    - attributes on another device: a copy on :obj:`device`;
    - for CUDA, attributes in host memory: a copy on the device or in pinned host memory (pinned and
      shared memory, lists and NumPy arrays are not copied but read while batches are fetched
      ahead);
    - with :obj:`features='sharded'`: this process's rows, a copy that is never made again, also not
      by :meth:`refresh`: write to :obj:`loader.data.x.part`;
    - rows in the cache of :obj:`cache_ratio`;
    - rows that a batch reuses from the previous one (:obj:`match`).

    If an attribute is replaced, or edited so that its version changes (most in-place operations of
    torch), it is copied again before the next batch is fetched, which then reuses no rows. Writes
    by NumPy, through :obj:`.data`, by collectives, fused optimizers, replays of CUDA graphs, other
    processes and a remote store are not noticed: call :meth:`refresh` after them. On CUDA up to
    three batches have been fetched ahead by then. Write to attributes in host memory only between
    two epochs, not while batches are fetched: otherwise a batch may mix old and new rows. The
    seeds, the graph and the weights of :obj:`weight_attr` are read once.

    **Memory.** On CUDA, features and graph stay in host memory if they do not fit: pinned tensors
    and tensors in shared memory (:func:`share_data`) without a copy, others as a pinned copy.

    **CUDA graphs** may be captured while batches are made ahead. If the driver library
    (:obj:`libcuda.so.1`) cannot be opened by that name, capture with
    :obj:`capture_error_mode='thread_local'`. A batch cannot be taken inside a capture.

    **PyG's interface.** It is a :class:`~torch_geometric.loader.NeighborLoader`, for
    :meth:`model.inference(loader)` (on CUDA with :obj:`embedding_device` where the batches are) and
    :class:`~torch_geometric.loader.ZipLoader`; :obj:`loader([3, 5])` makes the batch of these
    seeds. Unpickled loaders and deep copies are made again from the arguments, with
    :attr:`epoch`, without statistics; a shallow copy shares everything except :attr:`epoch`.

    Arguments of PyG's loader and of :class:`torch.utils.data.DataLoader` that are not listed below:

    ================================== =============================================================
    Argument                           Here
    ================================== =============================================================
    :obj:`num_workers`,                Without effect: there are no workers.
    :obj:`persistent_workers`,
    :obj:`prefetch_factor`,
    :obj:`worker_init_fn`,
    :obj:`multiprocessing_context`,
    :obj:`timeout`, :obj:`in_order`,
    :obj:`filter_per_worker`,
    :obj:`dataset`
    :obj:`pin_memory`,                 Without effect: batches are on :obj:`device`.
    :obj:`pin_memory_device`
    :obj:`directed`                    Deprecated as in PyG: :obj:`False` is
                                       :obj:`subgraph_type='induced'`.
    :obj:`neighbor_sampler`,           TypeError: this loader samples itself; use :obj:`transform`.
    :obj:`collate_fn`
    ================================== =============================================================

    Args:
        data (Data, HeteroData or (FeatureStore, GraphStore)): The graph. A remote backend must have
            one type of nodes and edges; its structure is read once, and features by
            :meth:`multi_get_tensor`, for the nodes that do not match.
        num_neighbors (list of int, dict or NumNeighbors): Most edges per node in each hop, from the
            seeds outwards; :obj:`-1`: all; :obj:`0`: none, but not for random walks. Of
            :class:`~torch_geometric.data.HeteroData` for each edge type, or a list by edge type.
        batch_size (int): Number of seeds of a batch. (default: :obj:`1`)
        input_nodes (Tensor or list, optional): The seeds: nodes, or a mask of them. A copy is
            made. Of :class:`~torch_geometric.data.HeteroData` the node type, or a pair of it and
            seeds. (default: :obj:`None`, all nodes)
        replace (bool): Sample with replacement. (default: :obj:`False`)
        shuffle (bool): Shuffle the seeds in every epoch. (default: :obj:`False`)
        drop_last (bool): Drop a last batch that is smaller. (default: :obj:`False`)
        window (int): Number of batches that are sampled ahead. (default: :obj:`8`)
        match (bool): Reuse rows that the previous batch has on the device, if features come from
            host memory, a remote store or other processes; otherwise nothing is matched.
            (default: :obj:`True`)
        reorder (bool, optional): Whether to reorder the batches of a window. (default:
            :obj:`None`, if rows are matched and :obj:`shuffle` is set)
        cache_ratio (float): Share of the nodes, those with most outgoing edges, whose features are
            kept on the device if the others are in host memory. (default: :obj:`0.`)
        device (torch.device or str, optional): The device of the batches.
            (default: :obj:`None`, the device of :obj:`data`)
        features (str): Where features are on CUDA: on the :obj:`"device"`, in :obj:`"host"`
            memory (labels and other rows of at most 16 bytes still go to the device, if they
            fit), or :obj:`"auto"`: attributes go to the device, small ones first, as long as they
            fit. On every device :obj:`"sharded"`: each process of :mod:`torch.distributed` keeps
            an equal part of the rows of node-level attributes, except short ones as above, and
            reads the others' for its batches, as with :class:`ShardedFeatures`. :attr:`data` is
            then a copy that holds these parts, so the whole tensors can be freed.
            (default: :obj:`"auto"`)
        topology (str): The same for the graph, except :obj:`"sharded"`.
            (default: :obj:`"auto"`)
        seed (int, optional): Seed of all randomness; the same seed gives the same batches.
            (default: :obj:`None`, drawn from :obj:`generator`)
        transform (callable, optional): Called with each batch when the loader returns it.
            (default: :obj:`None`)
        sampler (str or Sampler): :obj:`"neighbor"`; or :obj:`"random_walk"`: neighbours are the
            nodes that walks from a node against its edges visit most often, as in the `"Graph
            Convolutional Neural Networks for Web-Scale Recommender Systems"
            <https://arxiv.org/abs/1806.01973>`_ paper, their shares of the visits are
            :obj:`batch.edge_weight`, and batches have no :obj:`e_id` and no edge attributes. Or
            PyTorch's argument of that name: positions in :obj:`input_nodes`.
            (default: :obj:`"neighbor"`)
        subgraph_type (SubgraphType or str): :obj:`"directional"`, :obj:`"bidirectional"` or
            :obj:`"induced"`, as in PyG. (default: :obj:`"directional"`)
        weight_attr (str, optional): Name of an edge-level attribute: edges are sampled in
            proportion to it, those of weight zero only by :obj:`-1`; those of a type without it
            evenly. (default: :obj:`None`)
        disjoint (bool): Give each seed a subgraph of its own. Rows are then not matched with the
            batch before. (default: :obj:`False`)
        time_attr (str, optional): Name of an attribute of nodes or of edges, of integers: sample by
            time. (default: :obj:`None`)
        input_time (Tensor, optional): The time of each seed, of any integer type:
            :obj:`batch.seed_time`. (default: :obj:`None`, the time of its node)
        temporal_strategy (str): :obj:`"uniform"`: any of the edges that are early enough;
            :obj:`"last"`: the latest ones, with :obj:`replace` draws among these.
            (default: :obj:`"uniform"`)
        max_age (int, optional): Leave out edges whose time is earlier than that of the seed by more
            than this. (default: :obj:`None`)
        transform_sampler_output (callable, optional): Called with the
            :class:`~torch_geometric.sampler.SamplerOutput` of each batch (of several types the
            :class:`~torch_geometric.sampler.HeteroSamplerOutput`), whose :obj:`edge` are
            positions in :obj:`data.edge_index`, before attributes are fetched; on CUDA in the
            loader's thread. (default: :obj:`None`)
        is_sorted (bool): Whether edges must be sorted by destination. The loader detects sorted
            edges without it. (default: :obj:`False`)
        custom_cls (callable, optional): Makes the batches of a remote backend.
            (default: :obj:`None`, :class:`~torch_geometric.data.Data`)
        input_id (Tensor, optional): :obj:`batch.input_id` of each seed. (default:
            :obj:`None`, its position in :obj:`input_nodes`, of a mask the node)
        batch_sampler (Sampler, optional): Gives lists of positions in :obj:`input_nodes`, in place
            of :obj:`batch_size`, :obj:`shuffle` and :obj:`drop_last`. (default: :obj:`None`)
        generator (torch.Generator, optional): The generator of the seed.
            (default: :obj:`None`, torch's own)
        rank (int, optional): Number of this replica, if several share the seeds. (default:
            :obj:`None`, this replica has all seeds)
        num_replicas (int, optional): Number of replicas. Each gets the same number of batches, and
            together they get every seed once per epoch. (default: :obj:`None`)
        num_walks (int): Number of random walks per node. (default: :obj:`10`)
        walk_length (int): Number of steps per walk; at most 1024 for all walks of a node.
            (default: :obj:`3`)
        restart (float): Probability to go back to the start before each step.
            (default: :obj:`0.`)
        max_device_bytes (int, optional): Memory that graph and features may use on the device with
            :obj:`"auto"`. (default: :obj:`None`, half of the free memory)

    Raises:
        TypeError: If an argument has a type that is not supported.
        ValueError: If a value or a shape does not fit.
        IndexError: If :obj:`input_nodes` or the graph have nodes that do not exist.
        RuntimeError: If another process cannot make its part of sharded features or its batch, or
            has ended.
    """

    def __init__(
        self,
        data: Data | HeteroData | tuple[FeatureStore, GraphStore],
        num_neighbors: NumNeighborsType,
        batch_size: int = 1,
        input_nodes: InputNodes = None,
        replace: bool = False,
        shuffle: bool = False,
        drop_last: bool = False,
        window: int = 8,
        match: bool = True,
        reorder: bool | None = None,
        cache_ratio: float = 0.0,
        device: torch.device | str | None = None,
        features: str = 'auto',
        topology: str = 'auto',
        seed: int | None = None,
        transform: Transform | None = None,
        sampler: str | Iterable[int] = 'neighbor',
        *,
        subgraph_type: SubgraphType | str = 'directional',
        weight_attr: str | None = None,
        transform_sampler_output: OutputTransform | None = None,
        is_sorted: bool = False,
        custom_cls: Callable[[], Data] | None = None,
        input_id: Tensor | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        generator: torch.Generator | None = None,
        rank: int | None = None,
        num_replicas: int | None = None,
        num_walks: int = 10,
        walk_length: int = 3,
        restart: float = 0.0,
        max_device_bytes: int | None = None,
        disjoint: bool = False,
        time_attr: str | None = None,
        input_time: Tensor | None = None,
        temporal_strategy: str = 'uniform',
        max_age: int | None = None,
        neighbor_sampler: object = None,
        directed: bool = True,
        **kwargs: object,
    ) -> None:
        check_data(data)
        refuse_unsupported(FastNeighborLoader, neighbor_sampler, kwargs)
        check_callable('transform', transform)
        fanouts, by_type = resolve_fanouts(data, num_neighbors)
        sampling = SamplingOptions(
            fanouts, resolve_walks(sampler, num_walks, walk_length, restart), replace,
            resolve_subgraph_type(subgraph_type, directed), weight_attr, is_sorted,
            transform_sampler_output, by_type, disjoint, time_attr, temporal_strategy, max_age,
        )  # fmt: skip
        check_remote(data, sampling)
        batches = BatchOptions(
            batch_size, shuffle, drop_last, *resolve_replicas(rank, num_replicas),
            None if isinstance(sampler, str) else sampler, batch_sampler,
        )  # fmt: skip
        storage = StorageOptions(
            resolve_device(data, device), features, topology, cache_ratio, max_device_bytes, match,
            reorder if shuffle or reorder is not None else False, window,
        )  # fmt: skip
        self._set_up(
            data, NodeInput(input_nodes, input_id, input_time), sampling, batches, storage, seed,
            generator, transform, custom_cls,
        )  # fmt: skip
        self.input_nodes, self.input_id, self.input_time = input_nodes, input_id, input_time

    @property
    def node_sampler(self) -> BaseSampler:
        """Has :obj:`num_neighbors`, as PyG's sampler; it cannot sample."""
        return NamedSampler(self._core.num_neighbors)
