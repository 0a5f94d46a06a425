"""Says which option of a layer's constructor does not fit."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, MessagePassing
from torch_geometric.nn.aggr import Aggregation

from .._alike import did_you_mean, option_error
from ..errors import ShapeError
from ..message._fallback import users_class
from ..ops._numbers import check_share
from ._explain_call import as_parts
from ._explain_code import EXPLAINED

T = TypeVar('T')
P = ParamSpec('P')
# Options that are whole numbers, and the least that each may be: -1 is that of the first input.
_LEAST = {
    'in_channels': -1, 'hidden_channels': 0, 'out_channels': 0, 'channels': 1, 'num_layers': 1,
    'heads': 1, 'edge_dim': -1,
}  # fmt: skip
# Names of aggregations that others may be meant for.
_AGGRS = 'add', 'sum', 'mean', 'max', 'min', 'mul', 'var', 'std', 'softmax', 'powermean', 'median'


def naming_options(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """A constructor of a layer or a model, whose errors name the option that does not fit."""

    @functools.wraps(init)
    def naming(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            init(self, *args, **kwargs)
        except EXPLAINED as error:
            _explain_options(self, init, args, kwargs, error)
            raise

    return naming


def _options_of(cls: type) -> list[str]:
    """The options of a class of layers; none of what stands below PyG's."""
    init = vars(cls).get('__init__')
    return list(inspect.signature(init).parameters) if init and cls is not Module else []


def _explain_options(
    of: object, init: Callable, args: Sequence[object], kwargs: Mapping[str, object],
    error: Exception,
) -> None:  # fmt: skip
    found = re.search(r"got an unexpected keyword argument '(\w+)'$", str(error))
    if found is not None and found[1] in kwargs:
        known = [name for base in type(of).__mro__ for name in _options_of(base)]
        raise option_error(found[1], type(of).__name__, dict.fromkeys(known)) from error
    try:
        given = inspect.signature(init).bind(None, *args, **kwargs).arguments
    except TypeError:  # It says which argument is missing, or not known.
        return
    given = given | given.get('kwargs', {})
    for name, least in _LEAST.items():
        value = given.get(name)
        for part in as_parts(value):
            if name not in given or (name == 'edge_dim' and part is None):
                continue
            if isinstance(part, bool) or not isinstance(part, (int, np.integer)):
                got = type(part).__name__
                raise TypeError(f"'{name}' must be an integer, got {got}") from error
            if part < least:
                raise ValueError(f"'{name}' must be at least {least}, got {part}") from error
    dropout, aggr = given.get('dropout', 0.0), given.get('aggr')
    if not isinstance(dropout, (int, float)):
        raise TypeError(f"'dropout' must be a number, got {type(dropout).__name__}") from error
    if str(error).startswith("'aggr' must"):
        return
    parts = as_parts(aggr)
    is_known = all(part is None or isinstance(part, (str, Aggregation)) for part in parts)
    wrong = [p for p in parts if p and str(error).startswith(f'Could not resolve {p!r}')]
    if not is_known or wrong:
        alike = did_you_mean(wrong[0], _AGGRS) if wrong and type(wrong[0]) is str else ''
        raise ValueError(
            f"'aggr' must be a name such as 'mean', an Aggregation, or a list of these, got "
            f'{aggr!r}{alike}'
        ) from error
    if 'embed_dim must be divisible' in str(error):
        raise ValueError(
            f"'channels' must be a multiple of 'heads', got {given.get('channels')} and "
            f'{given.get("heads")}'
        ) from error


def check_init(module: object) -> None:
    """Raises for a layer whose constructor has not called that of PyG."""
    if isinstance(module, MessagePassing) and 'inspector' not in vars(module):
        name = users_class(module).__name__
        raise AttributeError(
            f"'{name}.__init__' must call super().__init__(), and set attributes after it"
        )


def check_attributes(conv: Any) -> None:
    """Raises unless attributes that a program may have set later are what the layer takes."""
    if isinstance(conv, (GATConv, GATv2Conv)):
        check_share('dropout', conv.dropout)
        slope = conv.negative_slope
        if isinstance(slope, bool) or not isinstance(slope, (int, float)):
            raise TypeError(f"'negative_slope' must be a number, got {type(slope).__name__}")
    elif not isinstance(conv, GCNConv):
        return
    bias = conv.bias
    if isinstance(bias, Tensor):
        several = getattr(conv, 'concat', False)
        wanted = conv.heads * conv.out_channels if several else conv.out_channels
        if list(bias.shape) not in ([wanted], [1]):
            raise ShapeError(
                f"'bias' must have shape {[wanted]}, a number for each channel of the layer, got "
                f'{list(bias.shape)}'
            )
