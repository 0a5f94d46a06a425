"""Notes on layers what runs them in compiled code, for reports."""

from collections.abc import Iterator
from types import MethodType
from weakref import WeakKeyDictionary

from torch.fx import GraphModule, Node
from torch.nn import Module

from .nn._checks import HOOKED
from .nn._layer import ARGUMENTS, NOT_TOLD, OTHER_BACKEND, FusedLayer, FusedModule, traced
from .nn._modules import hooks_of


class LayerNotes:
    """What runs the layers of a graph that :func:`torch.compile` captures: an empty text for a
    kernel, or why PyG's code does. The first reason of a layer stays, as in eager calls. Only
    layers hold it, and no tensor."""

    def __init__(self) -> None:
        owner = _owner_of_frame()
        self._layers = {str(key): layer for key, layer in traced.items()}
        # A frame of a layer itself has no stack of modules.
        self._root = str(id(owner)) if str(id(owner)) in self._layers else None
        self._found: dict[str, str] = {}

    def read(self, graph: GraphModule) -> None:
        """Notes layers with kernels written for them, whose operators a graph has, and those whose
        `propagate` is PyG's, before messages are replaced."""
        kernels, others = set(), set()
        for node in _nodes_of(graph):
            key = self._key_of(node)
            if key is None:
                continue
            if getattr(node.target, 'namespace', '').startswith('pyg_fast'):
                kernels.add(key)
            elif ', in propagate\n' in node.meta.get('stack_trace', ''):
                others.add(key)
        for key in others - kernels:
            layer = self._layers[key]
            hooked = isinstance(layer, FusedLayer) and any(hooks_of(vars(layer)))
            noted = layer._last_compiled  # in this trace
            noted = ARGUMENTS if noted in (None, '', OTHER_BACKEND, NOT_TOLD) else noted
            reason = HOOKED if hooked else noted
            self._found[key] = type(layer)._fused_why_never(layer) or reason
        for key in kernels:
            self._found[key] = ''

    def note(self, node: Node, reason: str) -> None:
        """Notes the layer that a node belongs to."""
        key = self._key_of(node)
        if key is not None:
            self._found[key] = self._found.get(key) or reason

    def write(self) -> None:
        """Writes all notes to their layers."""
        for key, reason in self._found.items():
            self._layers[key].__dict__['_last_compiled'] = reason

    def _key_of(self, node: Node) -> str | None:
        """The innermost layer of ours that a node belongs to."""
        for key in reversed(node.meta.get('nn_module_stack') or {}):
            key = key.partition('@')[0]  # the id of a module, and the number of its call
            if key in self._layers:
                return key
        return self._root


def _nodes_of(module: GraphModule) -> Iterator[Node]:
    """The nodes of a graph, and of the bodies of its higher-order operators."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            yield from part.graph.nodes


# What ran in compiled code, by the class of the layer.
_noted: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()


def note_alike(model: Module) -> None:
    """Notes what runs layers of a compiled model that Dynamo has not traced: it runs the code of
    one model for another, too, if they are alike. Layers of a class of which some run otherwise
    than others have no note."""
    layers = [layer for layer in model.modules() if isinstance(layer, FusedModule)]
    for layer in layers:
        if layer._last_compiled is not None:
            _noted.setdefault(type(layer), set()).add(layer._last_compiled)
    for layer in layers:
        known = _noted.get(type(layer), set())
        if layer._last_compiled is layer._last_run is None and len(known) == 1:
            layer.__dict__['_last_compiled'] = next(iter(known))


def _owner_of_frame() -> object:
    """The module of the frame that Dynamo compiles: `self`, or the first layer, or that of the
    first method, where a frame goes on after a graph break. None if torch lacks the private name
    that tells, or compiles no frame."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        local = InstructionTranslator.current_tx().output.local_scope
    except (ImportError, AttributeError):
        return None
    # A proxy may raise an error when asked its class.
    owners = (x.__self__ if type(x) is MethodType else x for x in local.values())
    first = (x for x in owners if issubclass(type(x), FusedModule))
    return local['self'] if 'self' in local else next(first, None)
