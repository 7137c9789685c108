"""What is done to a training to make it sick."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from benchmarks.findings._case import ARCHITECTURES, Case
from benchmarks.findings._models import Matrix, blocks, matrix, mlp_bias, stacks

SEQUENCES = 48
"""Training sequences where a model is to over-fit."""
NOISE = 0.5
"""Share of training labels that are random under label noise."""


@dataclass
class Plant:
    """How a training differs from a healthy one; each default is that of a healthy one.

    Attributes:
        rate: Factor on the learning rate at a step.
        sign: Factor on the loss before its backward pass.
        garbage: Whether the batch of a step is random tokens.
        after: Called after each optimizer step with the number of it.
        left_out: Parameters the optimizer is not given.
        noise: Share of labels that are random.
        sequences: How many training sequences there are, None for new ones at each step.
    """

    rate: Callable[[int], float] = lambda step: 1.0
    sign: Callable[[int], float] = lambda step: 1.0
    garbage: Callable[[int], bool] = lambda step: False
    after: Callable[[int], None] = lambda step: None
    left_out: set[nn.Parameter] = field(default_factory=set)
    noise: float = 0.0
    sequences: int | None = None


def plant(case: Case, model: Any) -> Plant:
    """Return what is done to the training of a case, after doing what is done at its start."""
    kind = case.variant
    block = blocks(model, case)[case.layer] if case.layer is not None else None
    # Each way of planting is in both halves of the evidence.
    other_way = (case.seed + ARCHITECTURES.index(case.architecture)) % 2 == 1
    if case.state in ("healthy", "sweep") or kind.startswith("rate_"):
        return Plant()
    if kind in ("collapse_one", "collapse_all", "bounce"):
        chosen = [block] if kind == "collapse_one" else _all_blocks(model, case)
        return Plant(after=_Sharpen(case, chosen, back=kind == "bounce"))
    if kind.startswith("rank_"):
        part = matrix(block, case.architecture, kind.removeprefix("rank_"))
        return Plant(after=_Flatten(part, 0 if other_way else case.steps // 5))
    if kind == "nan":
        layers = blocks(model, case)
        part = matrix(layers[len(layers) // 2], case.architecture, "down")
        return Plant(after=_PoisonAt(part, case.steps * 3 // 5))
    if kind == "diverging_ascent":
        return Plant(sign=lambda step: -1.0 if step > case.steps // 2 else 1.0)
    if kind == "diverging_rate":
        begin = case.steps * 2 // 5
        return Plant(rate=lambda step: min(1.05 ** max(step - begin, 0), 1e4))
    if kind == "dead_mlp":
        with torch.no_grad():
            mlp_bias(block, case.architecture).fill_(-20.0)
        return Plant()
    if kind == "frozen":
        assert block is not None
        block.requires_grad_(False)
        return Plant()
    if kind == "not_optimized":
        assert block is not None
        return Plant(left_out=set(block.parameters()))
    if kind in ("duplicated", "tied"):
        assert case.layer is not None
        _share(blocks(model, case), case.layer, whole=kind == "duplicated")
        return Plant()
    if kind == "bad_init":
        # transformers begins decoders with weights of 0.02, much below 1/√width.
        factor = 10 if case.architecture in ("encoder", "t5") else 60
        with torch.no_grad():
            for one in _all_blocks(model, case):
                for weight in one.parameters():
                    if weight.ndim > 1:
                        weight.mul_(factor)
        return Plant()
    if kind == "overfitting":
        return Plant(sequences=SEQUENCES)
    if kind == "label_noise":
        return Plant(noise=NOISE)
    if kind == "spike":
        begin = case.steps // 2
        if other_way:
            return Plant(garbage=lambda step: begin < step <= begin + 4)
        return Plant(rate=lambda step: 10.0 if begin < step <= begin + 3 else 1.0)
    raise ValueError(f"unknown variant {kind!r}")


def _all_blocks(model: Any, case: Case) -> list[Any]:
    return [one for stack in stacks(case) for one in blocks(model, replace(case, stack=stack))]


class _Sharpen:
    """Scales queries and keys up from 20% to 40% of the steps, and down again from 50% to 70%.

    At the top a query and a key have components of about `size`, so that scores differ by about
    size² between keys and attention rests on one token.
    """

    def __init__(self, case: Case, chosen: list[Any], *, back: bool) -> None:
        self._up = case.steps // 5, case.steps * 2 // 5
        self._down = case.steps // 2, case.steps * 7 // 10
        self._back = back
        self._size = 2.5 if case.architecture == "t5" else 4.5  # T5 does not divide by √d
        self._matrices = [
            matrix(one, case.architecture, part) for one in chosen for part in ("q", "k")
        ]
        self._factors: list[float] = []

    def __call__(self, step: int) -> None:
        """Scale by what one step takes."""
        if step == self._up[0]:
            span = self._up[1] - self._up[0]
            for one in self._matrices:
                weight = one.get()
                wanted = self._size * math.sqrt(weight.shape[0])
                self._factors.append((wanted / float(weight.norm())) ** (1 / span))
        if self._up[0] <= step < self._up[1]:
            for one, factor in zip(self._matrices, self._factors, strict=True):
                one.set(one.get() * factor)
        if self._back and self._down[0] <= step < self._down[1]:
            share = (self._up[1] - self._up[0]) / (self._down[1] - self._down[0])
            for one, factor in zip(self._matrices, self._factors, strict=True):
                one.set(one.get() / factor**share)


class _Flatten:
    """Takes the rank of a matrix towards 1 after each step, its Frobenius norm unchanged.

    From step 0 it is of rank 1 throughout; from a later step on, all but the leading direction
    shrink by 5% a step.
    """

    def __init__(self, part: Matrix, begin: int) -> None:
        self._part, self._begin = part, begin
        if begin == 0:
            self._shrink(0.0)

    def __call__(self, step: int) -> None:
        """Shrink all but the leading direction."""
        if step >= self._begin:
            self._shrink(0.0 if self._begin == 0 else 0.95)

    def _shrink(self, factor: float) -> None:
        weight = self._part.get()
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        flat = s.clone()
        flat[1:] *= factor
        flat *= s.norm() / flat.norm()
        self._part.set((u * flat) @ v)


class _PoisonAt:
    """Sets one weight to NaN at a step."""

    def __init__(self, part: Matrix, at: int) -> None:
        self._part, self._at = part, at

    def __call__(self, step: int) -> None:
        """Set it, if this is the step."""
        if step == self._at:
            weight = self._part.get()
            weight[0, 0] = float("nan")
            self._part.set(weight)


def _share(layers: nn.ModuleList, layer: int, *, whole: bool) -> None:
    """Let a layer be the one before it: the very module, or another with the same parameters."""
    if whole:
        layers[layer] = layers[layer - 1]
        return
    mine = dict(layers[layer].named_modules())
    for path, module in layers[layer - 1].named_modules():
        if path in mine:
            for name, parameter in module.named_parameters(recurse=False):
                if name in mine[path]._parameters:
                    setattr(mine[path], name, parameter)
