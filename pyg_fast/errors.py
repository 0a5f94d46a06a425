"""The classes of errors about arguments.

Each is also of the class that PyG or torch raises for the same mistake, so that an :obj:`except`
written for them still works. Most other errors about arguments are plain :class:`TypeError`,
:class:`ValueError` and :class:`IndexError`; :doc:`/troubleshooting` has the cure for every text.
"""


class ShapeError(ValueError, RuntimeError):
    """A shape that does not fit: also a :class:`RuntimeError`, as torch raises for one."""


class DtypeError(TypeError, RuntimeError):
    """A dtype that does not fit: also a :class:`RuntimeError`, as torch raises for one."""


class DeviceError(ValueError, RuntimeError):
    """A tensor on another device: also a :class:`RuntimeError`, as torch raises for one."""


class EdgesError(TypeError, ValueError):
    """An object that holds no edges: also a :class:`ValueError`, as PyG raises for one."""


class IndicesError(IndexError, RuntimeError):
    """Integers that choose from what there is not: also a :class:`RuntimeError`, as `one_hot`
    raises for them."""


class OptionError(ValueError, AssertionError, RuntimeError):
    """An argument for which a layer lacks an option, or the other way round: also an
    :class:`AssertionError` or a :class:`RuntimeError`, as PyG's layers raise without text."""


class TypesError(ValueError, KeyError):
    """A type of nodes or edges that a dictionary or a layer does not have: also a
    :class:`KeyError`, as PyG's layers raise for one."""

    __str__ = Exception.__str__  # That of a KeyError quotes the text.


class PaddingError(ValueError):
    """The padding of a batch changes the results of a layer, which a captured step must leave
    out."""


__all__ = [
    'DeviceError', 'DtypeError', 'EdgesError', 'IndicesError', 'OptionError', 'PaddingError',
    'ShapeError', 'TypesError',
]  # fmt: skip
