"""What runs a step again: a CUDA graph, or on a CPU the same code."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

_WARMUP = 2

View_co = TypeVar('View_co', covariant=True)
View = TypeVar('View')


class Inputs(Protocol[View_co]):
    """Memory that a recorded step reads."""

    def view(self) -> View_co:
        """New objects that read the memory. A step gets them, and may change them."""


class Recorder(Protocol):
    """Records steps."""

    #: Whether a step must have run before, so that its optimizer has its state.
    needs_state: bool
    #: Whether steps run on padded batches, which have few sizes.
    pads: bool

    def record(self, inputs: Inputs[View], step: Callable[[View], object]) -> Callable[[], object]:
        """Makes a function that runs the step on what the inputs hold when it is called.

        It returns the same tensors each time. Recording may run the step: the caller restores what
        that changes.
        """


class Direct:
    """Records nothing: every call runs the step."""

    needs_state = pads = False

    def record(self, inputs: Inputs[View], step: Callable[[View], object]) -> Callable[[], object]:
        return lambda: step(inputs.view())


class CudaGraphs:
    """Records CUDA graphs, which share their memory: only one runs at a time.

    Args:
        device: Where the steps run.
    """

    needs_state = pads = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, inputs: Inputs[View], step: Callable[[View], object]) -> Callable[[], object]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for number in range(_WARMUP):
                # The first run may wait: kernels get compiled.
                self._warm_up(lambda: step(inputs.view()), is_last=number == _WARMUP - 1)
            view = inputs.view()
        torch.clear_autocast_cache()  # Replays read parameters, not copies of these.
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                out = step(view)
        finally:
            torch.clear_autocast_cache()
            current.wait_stream(self._stream)
        held = (view, inputs, out)

        def replay() -> object:
            graph.replay()
            return held[-1]

        return replay

    @staticmethod
    def _warm_up(run: Callable[[], object], is_last: bool) -> None:
        mode = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode('error' if is_last else mode)
            run()
        except RuntimeError as error:
            if 'synchronizing CUDA operation' not in str(error):
                raise
            raise RuntimeError(
                'capture: the step waits for the GPU, which a CUDA graph cannot; see the line '
                'above. Give layers sizes (batch.num_graphs, output_size=), multiply by masks in '
                'place of indexing with them, and use pyg_fast.accelerate(model)'
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def recorder_of(device: torch.device) -> Recorder:
    """What records steps on a device."""
    return CudaGraphs(device) if device.type == 'cuda' else Direct()
