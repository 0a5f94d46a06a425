"""Kernels inside of :func:`torch.compile`."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn import Module

from ._accelerate import accelerate

ModelT = TypeVar('ModelT', bound=Module)


def compile(
    model: Module, *, fullgraph: bool = False, dynamic: bool | None = None,
    mode: str | None = None, options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    r"""Accelerates the layers of a model and compiles it, with their messages as kernels.

    Short for :obj:`torch.compile(pyg_fast.accelerate(model), backend='pyg_fast', ...)`. The
    backend replaces the messages of accelerated layers by kernels, and leaves everything else to
    Inductor. A message that no kernel computes stays PyG's code, and so does one over so few edges
    that a kernel does not pay; the logger :obj:`pyg_fast` tells at level INFO what became a kernel,
    and why not.

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
        TypeError: If :obj:`model` is not a module.

    Example:
        >>> model = pyg_fast.compile(GIN(64, 64, num_layers=3), dynamic=True)
        >>> for batch in loader:
        ...     loss = model(batch.x, batch.edge_index).sum()
    """
    return torch.compile(
        accelerate(model), fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode,
        options=options,
    )


def backend(
    module: torch.fx.GraphModule, examples: list[Any], *, mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """The backend :obj:`'pyg_fast'` of :func:`torch.compile`: messages as kernels, then Inductor.

    Args:
        module (torch.fx.GraphModule): What Dynamo captured.
        examples (list): Its inputs.
        mode (str, optional): As in :func:`torch.compile`. (default: :obj:`None`)
        options (dict, optional): Options of Inductor. (default: :obj:`None`)
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    from .message._region import replace_messages

    replace_messages(module)
    patches = dict(list_mode_options(mode)) if mode else {}
    patches |= options or {}
    compiled: Any = compile_fx(module, examples, config_patches=patches or None)
    return compiled
