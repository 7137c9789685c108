"""The arithmetic that bounds rely on, whatever the process does elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from joma.common.float32 import float32_is_coarse, float32_products

_LOCK = threading.RLock()
"""What is set here is set for the whole process, and so are the buffers of captured graphs."""


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """float32 as IEEE has it, without autocast and gradients, on that device, by one thread."""
    # Only what is not so already: entering all of it takes as long as a small kernel.
    with _LOCK, torch.no_grad(), ExitStack() as around:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            around.enter_context(torch.cuda.device(device))
        if torch.is_autocast_enabled(device.type):
            around.enter_context(torch.autocast(device.type, enabled=False))
        if float32_is_coarse():
            around.enter_context(float32_products("ieee"))
        yield


def power_of_two(exponent: Tensor) -> Tensor:
    """2ⁿ in float64 for whole n from −1022 to 1023, by its bits.

    exp2 and ldexp are not exact on every device, and the former is compiled at its first call.
    """
    return (exponent.long() + 1023 << 52).view(torch.float64)
