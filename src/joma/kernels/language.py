"""What the language models of Fig. 6 and 8 wait for: dropout, layer norm of a sum, cross-entropy.

All take E networks side by side, and on a GPU a kernel computes each in one pass over memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from joma import random
from joma.kernels.choice import has_kernels

_MAX_WIDTH = 256
"""The longest row of which a program has several at once."""


class Dropout:
    """Which numbers of a step are dropped: decided by seed, place in the network, step and index.

    Args:
        seeds_E: Seeds of the members.
        step: Step of the training, an int or a tensor that counts on the device.
        share: Share of the numbers that is dropped.
    """

    def __init__(self, seeds_E: Tensor, step: int | Tensor, share: float) -> None:
        self.seeds_E, self.step, self.share = seeds_E, step, share
        # Members of equal seed drop the same, which is then drawn once. To find them a GPU would
        # have to wait for it, and could not capture it.
        self._seeds_S, self._of_E = seeds_E, None
        if share and not seeds_E.is_cuda:
            own_S, of_E = seeds_E.unique(return_inverse=True)
            if len(own_S) < len(seeds_E):
                self._seeds_S, self._of_E = own_S, of_E

    def __call__(self, x: Tensor, place: str) -> Tensor:
        """Return x, (E, ...), with some of it 0 and the rest scaled up to the same mean.

        Args:
            x: Numbers, (E, ..., width).
            place: Name of the stream that decides.
        """
        if self.share == 0:
            return x
        if _has_row_kernels(x):
            from joma.kernels import _language_kernels

            return _language_kernels.dropped(x, self, place)
        width = x.shape[-1]
        drawn_width = width + -width % 4  # the generator makes four at a time
        count = x[0].numel() // width * drawn_width
        drawn = random.uniform(self._seeds_S, f"dropout.{place}", self.step, count)
        kept = drawn >= self.share
        if self._of_E is not None:
            kept = kept.index_select(0, self._of_E)
        kept = kept.view(*x.shape[:-1], drawn_width)[..., :width]
        return x * kept.to(x.dtype) / (1 - self.share)


def norm_of_sum(
    x: Tensor,
    linear: tuple[Tensor, Tensor],
    residual: Tensor,
    norm: tuple[Tensor, Tensor],
    drop: Dropout,
    place: str,
) -> Tensor:
    """Return the layer norm of residual + dropout(x·weight + bias), (E, B, T, width).

    Args:
        x: Input of the linear map, (E, B, T, in).
        linear: Its weight (E, in, width) and bias (E, 1, width).
        residual: What its output is added to, (E, B, T, width).
        norm: Scale and shift of the layer norm, (E, width) each.
        drop: What is dropped of the output.
        place: Name of the stream that decides it.
    """
    (weight, bias), (scale_ED, shift_ED), kind = linear, norm, x.dtype
    rows, weight = x.flatten(1, 2), weight.to(kind)
    if _has_row_kernels(residual):
        from joma.kernels import _language_kernels

        y = torch.bmm(rows, weight).view_as(residual)
        return _language_kernels.norm_of_sum(y, bias, residual, scale_ED, shift_ED, drop, place)
    y = torch.baddbmm(bias.to(kind), rows, weight).view_as(residual)
    total = residual + drop(y, place)
    scale, shift = (p.to(kind)[:, None, None] for p in norm)
    return torch.addcmul(shift, functional.layer_norm(total, total.shape[-1:]), scale)


def cross_entropies(
    x: Tensor, linear: tuple[Tensor, Tensor], targets_N: Tensor, weights_N: Tensor, words: int
) -> Tensor:
    """Return the weighted cross-entropy of each member, (E,), from what its output layer reads.

    On a GPU the logits become their own gradients in place, so that they are written once and read
    three times, and no others of their size are made.

    Args:
        x: Input of the output layer, (E, N, width).
        linear: Weight (E, width, columns) and bias (E, 1, columns) of the output layer.
        targets_N: The right words.
        weights_N: How much each counts.
        words: How many words there are; the other columns stand for none.
    """
    weight, bias = linear
    if has_kernels(x.device) and weight.dtype.itemsize <= 4:
        from joma.kernels import _language_kernels

        settings: tuple[Any, ...] = targets_N, weights_N.float(), words
        return _language_kernels.cross_entropies(x, weight, bias, *settings)
    logits_ENV = torch.baddbmm(bias.to(x.dtype), x, weight)[..., :words]
    targets_EN = targets_N.expand(len(x), -1)
    each_EN = functional.cross_entropy(
        logits_ENV.flatten(0, 1), targets_EN.flatten(), reduction="none"
    ).view_as(targets_EN)
    return (each_EN * weights_N.to(each_EN.dtype)).sum(-1)


def _has_row_kernels(x: Tensor) -> bool:
    fits = x.shape[-1] <= _MAX_WIDTH and x.dtype.itemsize <= 4
    return has_kernels(x.device) and fits
