"""What optimizers keep of each parameter, and what they need while it moves.

AdamW in eight bits and GaLore make two steps on parameters of the same shapes on the meta device:
what they store is counted, not written down a second time.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from joma.optim import AdamW8bit, GaLoreAdamW
from joma.optim.galore import layout, selection, subspace
from joma.train.memory._live import LiveMemory

OPTIMIZERS = ("adamw", "adamw-8bit", "sgd", "lora", "galore-adamw")
_PLACES: dict[str, tuple[str, Callable[[], Any]]] = {
    "cuda": ("meta", contextlib.nullcontext),
    "cpu": ("cpu", FakeTensorMode),
}
"""Where tensors without numbers are, by device. Optimizers take those on the meta device for those
of a GPU; in FakeTensorMode tensors say that they are on the CPU."""
Side = Literal["short", "left", "right", "smallest"]


@dataclass(frozen=True)
class Cost:
    """What an optimizer takes of memory for a parameter, in bytes.

    Attributes:
        states: What it keeps from step to step, without bases.
        projectors: Bases of subspaces.
        waiting: The gradient as it waits for the norm of all gradients, where that differs from
            the gradient itself; None where it waits as it is.
        workspace: What it needs while the parameter moves.
        buffer: What kernels of the GPU keep for it from step to step.
        is_projected: Whether its gradient is projected.
    """

    states: int
    projectors: int = 0
    waiting: int | None = None
    workspace: int = 0
    buffer: int = 0
    is_projected: bool = False


@dataclass(frozen=True)
class ProjectionSettings:
    """Settings of GaLore, as `GaLoreAdamW` has them.

    Attributes:
        rank: Rank of the subspaces.
        side: Side of the bases.
        bits: 8 for moments in eight bits.
        projector_bits: 8 for bases in eight bits.
        per_layer: Whether parameters move during the backward pass.
    """

    rank: int
    side: Side = "short"
    bits: Literal[8] | None = None
    projector_bits: Literal[8] | None = None
    per_layer: bool = False


def parameter_costs(
    model: nn.Module,
    optimizer: str,
    projection: ProjectionSettings,
    *,
    clip: bool = False,
    device: Literal["cuda", "cpu"] = "cuda",
) -> dict[Tensor, Cost]:
    """Return what an optimizer takes for each parameter of a model that wants a gradient.

    Args:
        model: The model; for "lora" with LoRA in it.
        optimizer: One of `OPTIMIZERS`.
        projection: Settings of GaLore.
        clip: Whether the norm of the whole gradient is clipped.
        device: Where it is trained.

    Raises:
        JomaError: GaLore projects nothing, or a setting is out of range.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    if optimizer in ("adamw", "lora"):  # the fused update of torch needs no workspace
        return {one: Cost(2 * one.nbytes) for one in trained}
    if optimizer == "sgd":
        return {one: Cost(one.nbytes) for one in trained}
    if optimizer == "adamw-8bit":
        return _by_kind(trained, [False] * len(trained), _adamw_8bit, device)
    defaults = {"rank": projection.rank}
    groups = selection.parameter_groups(model, (), defaults)
    members = [
        (entry[1], selection.is_projected(entry[1], group))
        for group in groups
        for entry in group["params"]
    ]

    def galore(samples: _Samples) -> torch.optim.Optimizer:
        return GaLoreAdamW(
            [{"params": [one], "rank": projection.rank if on else None} for one, on in samples],
            rank=projection.rank,
            gap=1,  # each step chooses the subspaces again, as some steps of a training do
            refresh="gap",
            side=projection.side,
            bits=projection.bits,
            projector_bits=projection.projector_bits,
            clip_norm=1.0 if clip else None,
            verbose=False,
        )

    costs = _by_kind([one for one, _ in members], [on for _, on in members], galore, device)
    place, mode = _PLACES[device]
    with mode():
        return _with_batches(costs, projection, place, has_kernels=not clip and device == "cuda")


def _with_batches(
    costs: Mapping[Tensor, Cost], projection: ProjectionSettings, place: str, *, has_kernels: bool
) -> dict[Tensor, Cost]:
    """Return costs where matrices choose their subspaces together, and kernels may move them.

    They choose several at a time unless each parameter moves by itself. The kernels of the GPU take
    matrices of type bfloat16; they need no workspace for the time of a step, and keep a buffer, as
    large as the largest of their launches needs.
    """
    found = dict(costs)
    taken = [one for one, cost in costs.items() if cost.is_projected]
    has_kernels = has_kernels and not projection.projector_bits
    has_kernels = has_kernels and all(one.dtype == torch.bfloat16 for one in taken)
    if projection.per_layer and not has_kernels:
        return found
    searches = [_search(one, projection, place) for one in taken]
    together = [[at] for at in range(len(taken))]
    launches = together
    if not projection.per_layer:
        together = subspace.batches(searches)
        launches = layout.launches([one.numel() for one in taken])
    known: dict[Any, int] = {}
    eight = projection.projector_bits is not None
    for some in together:
        key = tuple(taken[at].shape for at in some)
        if key not in known:
            known[key] = _refresh_workspace([searches[at] for at in some], decodes=eight)
        for at in some:
            moving = 0 if has_kernels else found[taken[at]].workspace
            found[taken[at]] = replace(found[taken[at]], workspace=max(known[key], moving))
    if has_kernels and projection.rank % layout.ALIGNED == 0:
        sizes = [
            layout.buffer_numbers(searches[at].gradient.shape, projection.rank, searches[at].side)
            for at in range(len(taken))
        ]
        buffer = 2 * max(sum(sizes[at] for at in some) for some in launches)
        found[taken[0]] = replace(found[taken[0]], buffer=buffer)
    return found


def _side(parameter: Tensor, projection: ProjectionSettings) -> subspace.Side:
    return subspace.choose_side(
        projection.side,
        (parameter.shape[0], parameter.shape[1]),
        moment_bytes=2 * (1 if projection.bits else parameter.element_size()),
        projector_bytes=1 if projection.projector_bits else parameter.element_size(),
    )


def _search(parameter: Tensor, projection: ProjectionSettings, place: str) -> subspace.BasisSearch:
    """Return the search for a parameter's subspace, without memory."""
    side = _side(parameter, projection)
    gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=place)
    length = parameter.shape[side == "right"]
    old = torch.empty(length, projection.rank, dtype=parameter.dtype, device=place)
    whole = subspace.GradientMatrix(gradient)
    return subspace.BasisSearch(whole, side, projection.rank, old, torch.Generator())


def _refresh_workspace(searches: Sequence[subspace.BasisSearch], *, decodes: bool) -> int:
    """Return bytes that choosing subspaces needs; old bases in eight bits are decoded."""
    live = LiveMemory(searches[0].gradient.matrix.device.type)
    with torch.no_grad(), live:
        for one in searches:
            live.know([one.gradient.matrix, *([] if one.old is None else [one.old])])
            one.gradient.energy()
        if decodes:
            searches = [replace(one, old=_decoded(one.old)) for one in searches]
        for one, basis in zip(searches, subspace.power_bases(searches), strict=True):
            projected = one.gradient.project(basis.to(one.gradient.matrix.dtype), one.side)
            subspace.square_sum(projected)
    return live.peak()


def _decoded(basis: Tensor | None) -> Tensor | None:
    """Return a basis as it is read from eight bits: in float32."""
    return None if basis is None else torch.empty_like(basis, dtype=torch.float32)


_Samples = Sequence[tuple[Tensor, bool]]
"""Parameters, and whether each is projected."""


def _adamw_8bit(samples: _Samples) -> torch.optim.Optimizer:
    return AdamW8bit([one for one, _ in samples])


def _by_kind(
    parameters: Sequence[Tensor],
    projected: Sequence[bool],
    make: Callable[[_Samples], torch.optim.Optimizer],
    device: Literal["cuda", "cpu"],
) -> dict[Tensor, Cost]:
    """Return the costs of parameters, each found on one of its shape, type and treatment."""
    kinds = {
        parameter: (tuple(parameter.shape), parameter.dtype, on)
        for parameter, on in zip(parameters, projected, strict=True)
    }
    place, mode = _PLACES[device]
    with mode():
        samples = {
            kind: nn.Parameter(torch.empty(kind[0], dtype=kind[1], device=place))
            for kind in dict.fromkeys(kinds.values())
        }
        optimizer = make([(sample, kind[2]) for kind, sample in samples.items()])
        costs = {kind: _cost(optimizer, sample, kind[2]) for kind, sample in samples.items()}
    return {parameter: costs[kind] for parameter, kind in kinds.items()}


def _cost(optimizer: torch.optim.Optimizer, sample: Tensor, projected: bool) -> Cost:
    live = LiveMemory(sample.device.type)
    sample.grad = torch.empty_like(sample)
    with live:
        live.know([sample, sample.grad])
        for _ in range(2):
            optimizer.step()
    sample.grad = None
    states = projectors = 0
    waiting = None
    for name, value in optimizer.state[sample].items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            continue
        if name.startswith("basis"):
            projectors += value.nbytes
        else:
            states += value.nbytes
        if name == "exp_avg" and projected:
            waiting = 4 * value.numel()
    return Cost(states, projectors, waiting, live.peak() - states - projectors, 0, projected)
