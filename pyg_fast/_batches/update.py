"""The update of parameters in a captured step."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer calls the model in its step, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get('closure')
    return closure is not None and closure.default is inspect.Parameter.empty


class Update:
    """Lets an optimizer step, as a CUDA graph can hold it.

    Args:
        optimizer: The optimizer. On a GPU its options are set to what a graph can hold.
        scaler: The scaler of its gradients.
        device: Where the parameters are.
        records: Whether steps are recorded: then learning rates are tensors during a step, which
            follow the numbers in :obj:`param_groups`.

    Raises:
        TypeError, ValueError: If a step cannot be recorded with the optimizer.
    """

    def __init__(
        self, optimizer: Optimizer, scaler: GradScaler | None, device: torch.device, records: bool
    ) -> None:
        self.optimizer, self.scaler, self._device = optimizer, scaler, device
        self._records = records
        # Of each group the number, and the tensor that holds it.
        self._rates: dict[int, tuple[float, Tensor]] = {}
        if needs_closure(optimizer):
            raise ValueError(
                f"'optimizer' must step without a closure, got {type(optimizer).__name__}: use "
                'another one, or optimizer=None and step yourself'
            )
        if device.type == 'cuda':
            self._make_capturable()

    def _make_capturable(self) -> None:
        optimizer = self.optimizer
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            # SGD waits for a learning rate on the GPU, but for its fused kernel.
            option = 'fused' if isinstance(optimizer, SGD) else 'capturable'
            if option not in group and group.get('fused'):
                continue
            if option not in group:
                raise ValueError(
                    f"'optimizer': {name} has no option capturable; use Adam, another one that "
                    'has it, or SGD, or optimizer=None and step yourself'
                )
            group[option] = True
            for parameter in group['params']:
                count = optimizer.state.get(parameter, {}).get('step')
                if isinstance(count, Tensor):
                    optimizer.state[parameter]['step'] = count.to(parameter.device)
        # Its first step is not captured, which is no mistake here.
        optimizer.__dict__['_warned_capturable_if_run_uncaptured'] = True
        is_on_gpu = getattr(optimizer, '_step_supports_amp_scaling', False)
        if self.scaler is not None and self.scaler.is_enabled() and not is_on_gpu:
            raise ValueError(
                f"'optimizer': a scaler waits for the GPU to skip steps of {name}: make it with "
                'fused=True'
            )

    def read_rates(self) -> None:
        """Copies learning rates that have changed to where a replay reads them."""
        if not self._records:
            return
        for number, group in enumerate(self.optimizer.param_groups):
            rate = group['lr']
            if number not in self._rates:
                self._rates[number] = (
                    math.nan,
                    torch.zeros((), dtype=torch.float32, device=self._device),
                )
            known, tensor = self._rates[number]
            if isinstance(rate, Tensor):  # Nobody knows when it changes.
                tensor.copy_(rate)
            elif rate != known:
                self._rates[number] = rate, tensor.fill_(rate)

    def step(self) -> None:
        """Updates the parameters."""
        with self._rates_as_tensors():
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()

    @contextmanager
    def _rates_as_tensors(self) -> Iterator[None]:
        groups = self.optimizer.param_groups
        rates = [group['lr'] for group in groups] if self._rates else []
        try:
            for number, (_, tensor) in self._rates.items():
                groups[number]['lr'] = tensor
            yield
        finally:
            for group, rate in zip(groups, rates, strict=False):
                group['lr'] = rate
