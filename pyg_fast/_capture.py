"""A training step as one CUDA graph."""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Batch, Data

from ._batches import CapturedBatchStep
from ._batches.runs import check_one_device, how_to_load
from ._batches.step import check_loss, check_requires_grad
from ._batches.update import needs_closure
from ._scores import check_forward, check_loss_fn
from .errors import DtypeError, ShapeError
from .graph.small_graphs import small_graphs
from .loader import GraphLoader

Forward = Callable[[Module, Data], Tensor]
_WARMUP = 3


@overload
def capture(
    model: Module, data: Data, optimizer: Optimizer,
    loss_fn: Callable[[Tensor, Tensor], Tensor], *, mask: str | None = 'train_mask',
    forward: Forward | None = None,
) -> 'CapturedStep': ...  # fmt: skip
@overload
def capture(
    model: Module, data: GraphLoader, optimizer: Optimizer | None,
    loss_fn: Callable[[Any, Batch], Tensor], *,
    forward: Callable[[Module, Batch], Any] | None = None, compile: bool = False,
    scaler: GradScaler | None = None, check: bool = True,
) -> CapturedBatchStep: ...  # fmt: skip
def capture(
    model: Module,
    data: Data | GraphLoader,
    optimizer: Optimizer | None,
    loss_fn: Callable[..., Tensor],
    *,
    mask: str | None = 'train_mask',
    forward: Callable[..., Any] | None = None,
    compile: bool = False,
    scaler: GradScaler | None = None,
    check: bool = True,
) -> 'CapturedStep | CapturedBatchStep':
    r"""A training step that a GPU runs as one CUDA graph: on small graphs most of a step is Python
    code and the start of kernels, which a graph does once. The step is that of one graph, or of
    the batches of a :class:`~pyg_fast.loader.GraphLoader`.

    **One graph**

    .. code-block:: python

        lr = torch.tensor(0.01, device='cuda')
        optimizer = torch.optim.Adam(model.parameters(), lr, capturable=True)
        step = pyg_fast.capture(model, data, optimizer, F.cross_entropy)
        for epoch in range(200):
            loss = step()

    A step clears the gradients, computes
    :obj:`loss_fn(forward(model, data)[index], data.y[index])` for the nodes of :obj:`mask`, and
    updates the parameters. The first three calls run as usual, so that kernels get compiled and
    the optimizer gets its state; the next one captures the graph, and all others replay it. Every
    call is one step of training. Dropout draws new numbers each time.

    The graph reads features, labels and parameters where they are: you may write into them, and a
    scheduler may write into the learning rate. If an attribute of :obj:`data`, a parameter or
    buffer, the mode of a module or an option of the optimizer is replaced, the step is captured
    anew. All else, such as the nodes of :obj:`mask`, a rate of dropout or other tensors that
    :obj:`loss_fn` and :obj:`forward` read, is as it was at the capture: call
    :meth:`CapturedStep.reset` before you change it.

    On a CPU every call runs as usual.

    **Batches of small graphs**

    .. code-block:: python

        loader = GraphLoader(dataset, 256, shuffle=True, device='cuda', pad='buckets')
        step = pyg_fast.capture(model, loader, optimizer, loss_fn)  # loss_fn(out, batch)
        for epoch in range(100):
            for loss in step.epoch():  # or: for batch in loader: loss = step(batch)
                ...

    On a CPU every call runs as usual, on batches without padding; the loader need not pad. On a GPU
    there is one CUDA graph for each size of padded batches. A smaller last batch, and one above
    the largest size, runs as usual; :attr:`num_eager` counts them. A step computes
    :obj:`loss_fn(forward(model, batch), batch)` and updates the parameters; each batch is exactly
    one step. In :obj:`step.epoch()` such graphs also make the batches, which takes less time than a
    batch of the loader. Results are those of the batch without padding:

    * :obj:`loss_fn` gets outputs and labels of graphs without the graph of the padding. Of outputs
      of nodes or edges it must leave out the padding by :obj:`batch.node_mask` or
      :obj:`batch.edge_mask`.
    * The mean, the variance and the running statistics of a batch norm of nodes, edges or graphs
      are those of the real rows.
    * Before a size is captured, a step with padding is compared with one without (dropout and
      autocast off). If outputs, gradients or buffers differ by more than :math:`10^{-4}`,
      relative to the largest, an error names the layer.

    The model sees the graph of the padding as one graph more: :obj:`batch.num_graphs` counts it.
    :obj:`batch.batch` and :obj:`batch.ptr` know their sizes, so layers without a :obj:`size` do not
    wait for the GPU. Strings and other objects are not in batches that a model sees.

    All sizes share one state of the optimizer and the memory of gradients, which :obj:`.grad`
    shows after each step. The optimizer is used as written: its option :obj:`capturable` is set (of
    SGD :obj:`fused`), and its learning rates may change as usual. Its hooks become part of the
    graph, for example one that clips gradients. With :obj:`optimizer=None` a step adds to the
    gradients and does nothing else, for example to accumulate them over several batches.

    Args:
        model (torch.nn.Module): The model.
        data (torch_geometric.data.Data or GraphLoader): The data, on the device of the model, or
            the loader of batches, on a GPU with :obj:`pad='buckets'`.
        optimizer (torch.optim.Optimizer, optional): The optimizer. For one graph on a GPU it must
            be one with :obj:`capturable=True`, or :obj:`torch.optim.SGD` with :obj:`fused=True`;
            its learning rate must be a tensor on the GPU, since a number would never change.
        loss_fn (Callable): The loss: :obj:`loss_fn(out[mask], data.y[mask])` for one graph,
            :obj:`loss_fn(out, batch)` for batches.
        mask (str, optional): The name of the training nodes in :obj:`data`: a boolean mask, or
            indices. With :obj:`None` the loss is that of all nodes. Of one graph only.
            (default: :obj:`"train_mask"`)
        forward (Callable, optional): The output, from :obj:`(model, data)` or
            :obj:`(model, batch)`. (default: :obj:`None`, :obj:`model(data.x, data.edge_index)` or
            :obj:`model(batch)`)
        compile (bool): Whether Inductor compiles :obj:`forward`; of batches only.
            (default: :obj:`False`)
        scaler (torch.amp.GradScaler, optional): Scales the loss; of batches only. On a GPU the
            optimizer must have :obj:`fused=True`. (default: :obj:`None`)
        check (bool): Whether to compare a step with padding with one without; of batches only.
            (default: :obj:`True`)

    Shapes:
        - **output of** :obj:`forward`: :math:`(|\mathcal{V}|, *)`; for batches anything
        - **output of the step:** the loss :math:`()`

    Raises:
        TypeError: If an argument has a wrong type, the mask holds other numbers than truth values
            or indices, or a loss of PyTorch is given for batches.
        ValueError: If :obj:`data` has no :obj:`mask` or no :obj:`y`, or the mask selects no node,
            does not fit :obj:`y` or is given for batches; a loss is not one number; no parameter of
            the model is the optimizer's; the loader does not pad, on a GPU or with :obj:`compile`;
            the model is a :obj:`DataParallel` or has a batch norm that cannot leave out padding; or
            a CUDA graph cannot hold the optimizer.
        IndexError: If the indices of :obj:`mask` name a node that :obj:`y` does not have.
        RuntimeError: When the step is captured, if it waits for the GPU or cannot be captured.
    """
    if isinstance(data, GraphLoader):
        if mask not in (None, 'train_mask'):
            raise ValueError(
                "'mask' is of one graph: 'data' must be a Data for it; loss_fn may read a mask of "
                'the batch'
            )
        check_loss_fn('loss_fn', loss_fn, 'batch')
        step = CapturedBatchStep(
            model,
            data,
            optimizer,
            loss_fn,
            forward=forward,
            compile=compile,
            scaler=scaler,
            check=check,
        )
        if optimizer is not None:
            _check_parameters(model, optimizer)
        return step
    if isinstance(data, (DataLoader, Dataset, list, tuple)):
        raise TypeError(
            f"'data' must be a Data or a GraphLoader, got {type(data).__name__}: for batches "
            f'{how_to_load(model, data)}'
        )
    for name, given, default in (
        ('compile', compile, False), ('scaler', scaler, None), ('check', check, True),
    ):  # fmt: skip
        if given is not default:
            raise ValueError(f"{name!r} is of batches: 'data' must be a GraphLoader for it")
    for name, value, kind, text in (
        ('model', model, Module, 'a Module'), ('data', data, Data, 'a Data or a GraphLoader'),
        ('optimizer', optimizer, Optimizer, 'an Optimizer'),
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise TypeError(f"'{name}' must be {text}, got {type(value).__name__}")
    check_one_device(model)
    check_loss_fn('loss_fn', loss_fn, None)
    check_forward(forward)
    if mask is not None and not isinstance(mask, str):
        raise TypeError(
            "'mask' must be the name of a mask in 'data', such as 'train_mask', or None, got "
            f'{type(mask).__name__}: store it, data.train_mask = mask'
        )
    if mask is not None:
        _check_nodes(data, mask)
    assert isinstance(optimizer, Optimizer)
    _check_parameters(model, optimizer)
    if needs_closure(optimizer):
        raise ValueError(
            f"'optimizer' must step without a closure, got {type(optimizer).__name__}: use another "
            'one'
        )
    if _device(model).type == 'cuda':
        _check_optimizer(optimizer)
    return CapturedStep(model, data, optimizer, loss_fn, mask, forward)


def _check_nodes(data: Data, name: str) -> None:
    """Raises unless the training nodes are a mask or indices, of some nodes that have labels."""
    nodes, y = data.get(name), data.get('y')
    if not isinstance(nodes, Tensor) or nodes.dim() != 1:
        raise ValueError(f"'data' must have a vector {name!r}, or 'mask' must be None")
    if not isinstance(y, Tensor) or y.dim() == 0:
        got = 'a number' if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"'data.y' must be a tensor of labels, a row for each node, got {got}: store them, or "
            'pass mask=None and a loss_fn that reads the output alone'
        )
    if nodes.dtype not in (torch.bool, torch.int32, torch.int64):
        raise DtypeError(
            f"'data.{name}' must be a bool mask or indices of nodes, got {nodes.dtype}: "
            f'data.{name}.bool() is a mask'
        )
    if nodes.numel() == 0 or (nodes.dtype == torch.bool and not bool(nodes.any())):
        raise ValueError(
            f"'data.{name}' must select nodes, got none of {y.size(0)}: the mean of no losses is "
            'NaN'
        )
    if nodes.dtype == torch.bool:
        if nodes.size(0) != y.size(0):
            raise ShapeError(
                f"'data.{name}' must have shape [{y.size(0)}], as there are rows of 'data.y', got "
                f'{list(nodes.shape)}'
            )
        return
    low, high = (int(each) for each in nodes.aminmax())
    if nodes.size(0) == y.size(0) > 2 and low >= 0 and high <= 1:
        raise DtypeError(
            f"'data.{name}' must be a bool mask or indices of nodes, got a 0 or 1 for each "
            f'of {y.size(0)} nodes: data.{name}.bool() is a mask'
        )
    if low < -y.size(0) or high >= y.size(0):
        raise IndexError(
            f"'data.{name}' must hold nodes in [0, {y.size(0)}), got values from {low} to {high}"
        )


def _check_parameters(model: Module, optimizer: Optimizer) -> None:
    """Raises if the optimizer trains another model."""
    trained = {id(p) for group in optimizer.param_groups for p in group['params']}
    own = {id(p) for p in model.parameters()}
    if own and trained.isdisjoint(own):
        raise ValueError(
            "'optimizer' must hold parameters of 'model', got none of them: make it of "
            'model.parameters()'
        )


class CapturedStep:
    """A training step, made by :func:`capture`. Calling it trains once and returns the loss."""

    def __init__(
        self, model: Module, data: Data, optimizer: Optimizer,
        loss_fn: Callable[[Tensor, Tensor], Tensor], mask: str | None, forward: Forward | None,
    ) -> None:  # fmt: skip
        self.model, self.data, self.optimizer = model, data, optimizer
        self.loss_fn, self.mask, self.forward = loss_fn, mask, forward
        self.reset()

    def reset(self) -> None:
        """Drops the captured graph; the next calls make another one."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None
        self._index: Tensor | None = None
        self._side: torch.cuda.Stream | None = None
        self._num_calls = 0
        self._held: list[object] = []
        self._state: list[object] = []

    def __repr__(self) -> str:
        if _device(self.model).type != 'cuda':
            state = 'runs as usual on a CPU'
        elif self._graph is None:
            state = f'not captured yet, after {self._num_calls} of {_WARMUP} first calls'
        else:
            state = 'captured'
        return (
            f'{type(self).__name__}({type(self.model).__name__}, '
            f'{type(self.optimizer).__name__}, mask={self.mask!r}; {state})'
        )

    def __call__(self) -> Tensor:
        """Trains once.

        Returns:
            Tensor: The loss, detached, of shape :math:`()`.
        """
        device = _device(self.model)
        if device.type != 'cuda':
            return self._train()
        # A graph has no host time to save. The backward pass may call layers, too (checkpoints).
        with torch.cuda.device(device), small_graphs('kernel'):
            return self._on_gpu()

    def _on_gpu(self) -> Tensor:
        held, state = self._current()
        if state != self._state:
            self.reset()
            _check_optimizer(self.optimizer)
            self._held, self._state = held, state
        if self._num_calls < _WARMUP:
            return self._warm_up()
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._loss = self._train()
            self._graph = graph
        self._graph.replay()
        assert self._loss is not None
        return self._loss.clone()  # The next replay writes into it.

    def _train(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        model, data = self.model, self.data
        if self.forward is None:
            out = model(data.x, data.edge_index)
        else:
            out = self.forward(model, data)
        y = data.y
        index = self._nodes()
        if index is not None:
            _check_output(out, data[self.mask], self.mask)
            out, y = out[index], y[index]
        try:
            loss = self.loss_fn(out, y)
        except AttributeError as error:
            if not str(error).startswith("'Tensor' object has no attribute"):
                raise
            raise TypeError(
                "'loss_fn' must take the output and the labels of one graph, loss_fn(out, y); a "
                f'batch is what it gets with a GraphLoader: {error}'
            ) from error
        check_loss(loss)
        check_requires_grad(loss)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _nodes(self) -> Tensor | None:
        """The training nodes as indices: a CUDA graph cannot count a mask."""
        if self.mask is None:
            return None
        mask = self.data[self.mask]
        if not mask.is_cuda:
            return mask
        if self._index is None:
            self._index = mask.nonzero().view(-1) if mask.dtype == torch.bool else mask
        return self._index

    def _warm_up(self) -> Tensor:
        self._nodes()
        if self._side is None:
            self._side = torch.cuda.Stream()
        stream, side = torch.cuda.current_stream(), self._side
        mode = torch.cuda.get_sync_debug_mode()
        side.wait_stream(stream)
        # The first calls may wait: layers prepare graphs, the optimizer its state.
        last = self._num_calls == _WARMUP - 1
        try:
            torch.cuda.set_sync_debug_mode('error' if last else mode)
            with torch.cuda.stream(side):  # As in a capture.
                loss = self._train()
        except RuntimeError as error:
            if 'synchronizing CUDA operation' not in str(error):
                raise
            raise RuntimeError(
                'capture: the training step waits for the GPU, which a CUDA graph cannot; see the '
                "line above. PyG's own layers do so on a plain edge_index: use "
                'pyg_fast.accelerate(model), and indices instead of boolean masks'
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        stream.wait_stream(side)
        loss.record_stream(stream)
        self._num_calls += 1
        return loss

    def _current(self) -> tuple[list[object], list[object]]:
        """The objects whose memory the graph reads, and what is fixed at the capture."""
        model, groups = self.model, self.optimizer.param_groups
        options = [(k, v) for group in groups for k, v in group.items() if k != 'params']
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [v for _, v in options if isinstance(v, Tensor)]
        data = self.data.to_dict()
        held = [*tensors, *data.values()]
        state = [
            *data,
            *map(id, held),  # No other object has it while this one is held.
            *((t.data_ptr(), t.shape, t.requires_grad) for t in held if isinstance(t, Tensor)),
            *(module.training for module in model.modules()),
            *((k, v) for k, v in options if not isinstance(v, Tensor)),
        ]
        return held, state


def _check_output(out: object, nodes: Tensor, name: str | None) -> None:
    """Raises unless a model has computed a row for each node of a mask."""
    if not isinstance(out, Tensor):
        raise TypeError(
            f"'forward' must return a tensor, a row for each node, got {type(out).__name__}: pass "
            "forward=, or mask=None and a loss_fn of the model's output"
        )
    if nodes.dtype == torch.bool and (out.dim() == 0 or out.size(0) != nodes.size(0)):
        raise ShapeError(
            f"'forward' must return a row for each of the {nodes.size(0)} nodes of 'data.{name}', "
            f'got shape {list(out.shape)}'
        )


def _device(model: Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device('cpu'))


def _check_optimizer(optimizer: Optimizer) -> None:
    """Raises unless a CUDA graph can hold the optimizer's step."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        # SGD waits for a learning rate on the GPU, but for its fused kernel.
        option = 'fused' if isinstance(optimizer, SGD) else 'capturable'
        if option not in group:
            raise ValueError(
                f"'optimizer': {name} has no option capturable; use Adam, another one that has it, "
                'or SGD with fused=True'
            )
        if not group[option]:
            raise ValueError(f"'optimizer': a CUDA graph cannot hold {name}; add {option}=True")
        lr = group['lr']
        if not (isinstance(lr, Tensor) and lr.is_cuda):
            raise ValueError(
                f"'optimizer': the learning rate of {name} is {lr!r}, which a CUDA graph would "
                "never change: make it with lr=torch.tensor(0.01, device='cuda')"
            )
