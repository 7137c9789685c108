"""The losses of steps, kept on their device until a measurement waits for it anyway."""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from joma.errors import JomaError
from joma.train.monitor._faults import Faults

_MANY = 4096


class Losses:
    """Keeps losses that were not recorded yet.

    Args:
        faults: Where losses that are no number are noted.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._kept: list[tuple[int, Tensor | float]] = []

    @property
    def many(self) -> bool:
        """Whether so many wait that they should be taken."""
        return len(self._kept) >= _MANY

    def kept(self, loss: Tensor | float | None) -> Tensor | float | None:
        """Return a copy of a loss, None where there is none or it is not one real number."""
        if loss is None:
            return None
        try:
            return _copied(loss)
        except Exception as error:
            self._faults.note("the loss", error, effect="not recorded")
            return None

    def keep(self, step: int, loss: Tensor | float | None) -> Tensor | float | None:
        """Keep a copy of a step's loss, and return it."""
        copy = self.kept(loss)
        if copy is not None:
            self._kept.append((step, copy))
        return copy

    def take(self) -> tuple[list[int], list[float]]:
        """Return the steps and losses kept, and forget them; waits for their device."""
        kept, self._kept = self._kept, []
        tensors = [loss for _, loss in kept if isinstance(loss, Tensor)]
        if len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1:
            values = iter(torch.stack(tensors).tolist())
        else:
            values = iter([float(tensor) for tensor in tensors])
        losses = [next(values) if isinstance(loss, Tensor) else loss for _, loss in kept]
        return [step for step, _ in kept], losses


def one_number(loss: Tensor | float) -> float:
    """Return a loss as a number; waits for its device.

    Raises:
        JomaError: It is not one real number.
    """
    return float(_copied(loss))


def _copied(loss: Tensor | float) -> Tensor | float:
    if type(loss) is Tensor and loss.ndim == 0 and loss.dtype == torch.float32 and not loss.is_meta:
        return loss.detach().clone()  # the usual case; this runs at every step
    if not isinstance(loss, Tensor):
        if isinstance(loss, str | bytes | complex):
            raise JomaError(f"loss must be one real number, got {loss!r:.40}")
        try:
            return float(loss)
        except OverflowError:
            return math.inf if loss > 0 else -math.inf
    if loss.numel() != 1:
        raise JomaError(f"loss must be one number, got shape {tuple(loss.shape)}")
    if loss.is_complex() or loss.device.type == "meta":
        raise JomaError(f"loss must be one real number, got {loss.dtype} on {loss.device}")
    loss = loss.detach()
    loss = loss.to_local() if isinstance(loss, DTensor) else loss
    # A copy: the graph of a compiled step writes the next loss to the same place.
    return loss.reshape(()).float().clone() if loss.dtype != torch.float64 else loss.clone()
