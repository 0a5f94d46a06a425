"""Kernels inside of :func:`torch.compile` and :func:`torch.export.export`."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from importlib.metadata import EntryPoint
from typing import ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._dynamo import OptimizedModule
from torch._dynamo.exc import Unsupported
from torch.export import ExportedProgram
from torch.nn import Module
from torch_geometric import EdgeIndex, Index
from torch_geometric.data.data import BaseData

from ._accelerate import accelerate
from ._alike import naming_keywords
from ._compiled_layers import LayerNotes, note_alike
from ._small_tables import decompositions
from .errors import OptionError
from .graph.graph import prepare_for_compiled
from .graph.small_graphs import has_few_edges, small_graphs
from .message._quiet import OF_FAKE_TENSORS, ignore_own_caches, may_silence, silent
from .nn.message_passing import FusedPropagate
from .ops._numbers import check_flag

P = ParamSpec('P')
T = TypeVar('T')

_REPRS = {kind: kind.__repr__ for kind in (EdgeIndex, Index)}
_WIDE = 512  # With fewer edges than pay for so many features, kernels do not run.

Options: TypeAlias = dict[str, str | int | bool | Callable[..., object]]  # of Inductor


@naming_keywords
def compile(
    model: Module, *, fullgraph: bool = False, dynamic: bool | None = None,
    mode: str | None = None, options: Options | None = None,
) -> Module:  # fmt: skip
    r"""Accelerates the layers of a model and compiles it, with their messages as kernels.

    Short for :obj:`torch.compile(pyg_fast.accelerate(model), backend='pyg_fast', ...)`. The
    backend replaces the messages of accelerated layers by kernels, and leaves everything else to
    Inductor. Graphs among the arguments of a call are prepared before the model runs, once each:
    compiled code cannot keep what it sorts. A message that no kernel computes stays PyG's code, and
    so does one over so few edges that a kernel does not pay: :func:`accelerate_report` tells which.

    Args:
        model (torch.nn.Module): The model, or a single layer.
        fullgraph (bool, optional): As in :func:`torch.compile`. (default: :obj:`False`)
        dynamic (bool, optional): As in :func:`torch.compile`. With :obj:`True` batches of any size
            run the code of the first one. (default: :obj:`None`)
        mode (str, optional): As in :func:`torch.compile`, such as :obj:`"reduce-overhead"`.
            (default: :obj:`None`)
        options (dict, optional): Options of Inductor. (default: :obj:`None`)

    Returns:
        The compiled model.

    Raises:
        TypeError: If :obj:`model` is not a module, or compiled already, or :obj:`fullgraph` or
            :obj:`dynamic` is no such value.
        ValueError: If there is no such :obj:`mode`.

    Example:
        >>> model = pyg_fast.compile(GIN(64, 64, num_layers=3), dynamic=True)
        >>> for batch in loader:
        ...     loss = model(batch.x, batch.edge_index).sum()
    """
    if isinstance(model, OptimizedModule):
        raise TypeError("'model' must not be compiled already: call pyg_fast.compile on the module")
    check_flag('fullgraph', fullgraph)
    if dynamic is not None:
        check_flag('dynamic', dynamic)
    _check_mode(mode)
    _check_options(options)
    model = accelerate(model)
    compiled = torch.compile(
        model, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options
    )
    assert isinstance(compiled, Module)
    layers = list(model.modules())
    prepare = partial(
        _prepare_graphs,
        loops=any(getattr(layer, 'add_self_loops', False) for layer in layers),
        values=any(
            getattr(layer, '_marks', None) is not None
            or getattr(layer, 'edge_dim', None) is not None
            for layer in layers
        ),
    )
    compiled.register_forward_pre_hook(prepare, with_kwargs=True)
    compiled.register_forward_hook(_note_layers)
    compiled.forward = _explaining(compiled.forward, model)
    return compiled


def _explaining(run: Callable[P, T], model: Module) -> Callable[P, T]:
    """Runs compiled code. Where that fails, the model runs once more in eager mode, whose errors
    name what does not fit: those of Dynamo and Inductor tell of what they have made of it."""

    may_silence(OF_FAKE_TENSORS)
    ignore_own_caches()

    @wraps(run)
    def forward(*args: P.args, **kwargs: P.kwargs) -> T:
        before, silent.loggers = silent.loggers, OF_FAKE_TENSORS  # Errors say the same.
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if torch.compiler.is_compiling() or isinstance(error, _OF_COMPILERS):
                raise
            try:
                model(*args, **kwargs)
            except torch.AcceleratorError:  # The GPU takes no more work.
                pass
            except Exception as found:
                if (type(found), str(found)) != (type(error), str(error)):
                    raise found from error
            raise
        finally:
            silent.loggers = before

    return forward


# Errors that eager mode does not have.
_OF_COMPILERS = Unsupported, torch.OutOfMemoryError, torch.AcceleratorError


def _note_layers(module: Module, *_: object) -> None:
    """Notes what has run layers that were not traced, after the first call."""
    if not torch.compiler.is_compiling():
        note_alike(module)
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is _note_layers]:
            del hooks[key]


def _check_mode(mode: str | None) -> None:
    """Raises unless Inductor has the mode; by itself it does so at the first call only."""
    if mode is None:
        return
    from torch._inductor import list_mode_options

    modes = tuple(dict.fromkeys(('default', *list_mode_options())))
    if mode not in modes:
        raise ValueError(f"'mode' must be one of {modes}, got {mode!r}")


def _check_options(options: object) -> None:
    """Raises unless Inductor has the options; by itself it does so at the first call only."""
    if options is None:
        return
    if not isinstance(options, dict):
        raise TypeError(
            f"'options' must be a dictionary of Inductor's options, got {type(options).__name__}"
        )
    from torch._inductor import list_options

    unknown = sorted(map(str, options.keys() - set(list_options())))
    if unknown:
        raise OptionError(
            f"'options' must hold options that torch._inductor.list_options() names, got {unknown}"
        )


def _prepare_graphs(
    module: Module, args: tuple[object, ...], kwargs: dict[str, object], *, loops: bool,
    values: bool,
) -> None:  # fmt: skip
    """Prepares the graphs among the arguments of a call, once each."""
    if torch.compiler.is_compiling():
        return
    for edge_index in _graphs_in((*args, *kwargs.values())):
        if not has_few_edges(edge_index, _WIDE, 'compiled'):
            prepare_for_compiled(edge_index, loops, values)


def _graphs_in(arguments: Iterable[object]) -> Iterator[EdgeIndex]:
    for value in arguments:
        if isinstance(value, EdgeIndex):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _graphs_in(value)
        elif isinstance(value, dict):
            yield from _graphs_in(value.values())
        elif isinstance(value, BaseData):
            yield from _graphs_in(store.get('edge_index') for store in value.edge_stores)


def backend(
    module: torch.fx.GraphModule, examples: list[Tensor | torch.SymInt | int], *,
    mode: str | None = None, options: Options | None = None,
) -> Callable[..., object]:  # fmt: skip
    """The backend :obj:`'pyg_fast'` of :func:`torch.compile`: messages as kernels, then Inductor.

    Args:
        module (torch.fx.GraphModule): What Dynamo captured.
        examples (list): Its inputs.
        mode (str, optional): As in :func:`torch.compile`. (default: :obj:`None`)
        options (dict, optional): Options of Inductor. (default: :obj:`None`)
    """
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    replace_and_note(module)
    patches = dict(list_mode_options(mode)) if mode else {}
    patches |= options or {}
    # Options choose decompositions too.
    with _graphs_print_no_numbers(), config.patch(patches), decompositions() as table:
        compiled = compile_fx(
            module, examples, config_patches=patches or None, decompositions=table
        )
    assert callable(compiled)
    return compiled


@contextmanager
def _graphs_print_no_numbers() -> Iterator[None]:
    """Torch 2.11 prints what it compiles, also for nobody. PyG's graphs print numbers then, which
    tensors of the compiler do not have: it would fail."""
    try:
        for kind in _REPRS:
            kind.__repr__ = object.__repr__
        yield
    finally:
        for kind, own in _REPRS.items():
            kind.__repr__ = own


def replace_and_note(module: torch.fx.GraphModule) -> int:
    """Replaces the messages of a graph by kernels, and notes on layers what runs them; tells how
    many messages."""
    from .message._replace import replace_messages

    notes = LayerNotes()
    notes.read(module)
    count = replace_messages(module, told=notes.note)
    notes.write()
    return count


def _offer_backend() -> None:
    """Makes the name of the backend known where no installed package does, as in a source tree. An
    entry point, as that of the installed package: registered twice a backend is an error."""
    entry = EntryPoint('pyg_fast', f'{__name__}:backend', 'torch_dynamo_backends')
    with suppress(ImportError):  # a private name of torch
        from torch._dynamo.backends.registry import _BACKENDS

        _BACKENDS.setdefault('pyg_fast', entry)


_offer_backend()


def export(
    model: Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None, *,
    dynamic_shapes: dict | tuple | list | None = None, strict: bool = False,
    gradients: bool = False,
) -> ExportedProgram:  # fmt: skip
    r"""Accelerates the layers of a model and exports it, with their messages as kernels.

    As :func:`torch.export.export` of an accelerated model, but that has PyG's operators only. The
    program needs pyg_fast: import it before you load or run the program. It takes plain
    :obj:`edge_index` tensors, which it sorts and checks at each call. Layers with kernels written
    for them, such as :class:`~pyg_fast.nn.FusedGATConv`, keep PyG's operators, and so does a
    message that no kernel computes: the logger :obj:`pyg_fast` tells why at level INFO.

    Args:
        model (torch.nn.Module): The model, or a single layer.
        args (tuple): Arguments of its call.
        kwargs (dict, optional): Arguments by name. (default: :obj:`None`)
        dynamic_shapes (optional): As in :func:`torch.export.export`. The number of edges must have
            a largest value below :math:`2^{31} - 1024`, as in the example.
            (default: :obj:`None`)
        strict (bool): As in :func:`torch.export.export`. (default: :obj:`False`)
        gradients (bool): Whether the program may be trained: kernels then also write what a
            backward pass reads. Without, a backward pass through a kernel raises an error.
            (default: :obj:`False`)

    Returns:
        torch.export.ExportedProgram: The program, which :func:`torch.export.save` and
        :func:`torch._inductor.aoti_compile_and_package` take.

    Raises:
        TypeError: If :obj:`model` is not a module, :obj:`args` not a tuple, :obj:`kwargs` not a
            dictionary, an option not a bool, or a graph among the arguments is prepared.

    Example:
        >>> edges = torch.export.Dim('edges', max=2**30)
        >>> program = pyg_fast.export(
        ...     conv, (x, edge_index), dynamic_shapes=({0: torch.export.Dim('nodes')}, {1: edges}))
        >>> torch.export.save(program, 'conv.pt2')
    """
    from .message._replace import replace_messages

    if not isinstance(args, tuple):
        raise TypeError(
            f"'args' must be a tuple of inputs, got {type(args).__name__}: write "
            'pyg_fast.export(model, (x, edge_index))'
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(
            f"'kwargs' must be a dictionary of inputs by name, got {type(kwargs).__name__}: inputs "
            "without a name belong into the tuple 'args'"
        )
    check_flag('strict', strict)
    check_flag('gradients', gradients)
    for edge_index in _graphs_in((*args, *(kwargs or {}).values())):
        raise TypeError(
            "'args' must hold plain tensors of edges, as the program will take them, got "
            f'{type(edge_index).__name__}: pass edge_index.as_tensor()'
        )
    model = accelerate(model)
    # The sizes of the examples say nothing about those of later calls.
    with _marks_in_export(model), small_graphs('kernel'):
        program = torch.export.export(
            model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict
        )
        before = _outputs(program)
        replace_messages(program.graph_module, gradients)
    for old, new in zip(before, _outputs(program), strict=True):
        if new != old:
            program.graph_signature.replace_all_uses(old, new)
    program.validate()
    return program


def _outputs(program: ExportedProgram) -> list[str]:
    """The names by which the signature of a program knows its outputs."""
    (outputs,) = program.graph.output_node().args
    return [getattr(each, 'name', '') for each in outputs]


@contextmanager
def _marks_in_export(model: Module) -> Iterator[None]:
    before = [
        (layer, layer._marks) for layer in model.modules()
        if isinstance(layer, FusedPropagate) and layer._marks is not None
    ]  # fmt: skip
    try:
        for layer, marks in before:
            layer.__dict__['_marks'] = marks._replace(in_export=True)
        yield
    finally:
        for layer, marks in before:
            layer.__dict__['_marks'] = marks
