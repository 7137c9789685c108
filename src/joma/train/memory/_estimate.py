"""Adds up weights, gradients, states, activations and workspace to the peak of a training step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from joma.common.checks import check_one_of, whole_number
from joma.errors import JomaError
from joma.models.blank import PRESETS, blank_model
from joma.train.memory._lora import add_lora
from joma.train.memory._optimizers import OPTIMIZERS, Cost, ProjectionSettings, parameter_costs
from joma.train.memory._passes import Device, TrainingPasses, training_passes

GIB = 2**30
PARTS = ("weights", "gradients", "states", "projectors", "activations", "logits", "workspace")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CARDS = {
    "rtx-3060": 12,
    "rtx-4080": 16,
    "rtx-3090": 24,
    "rtx-4090": 24,
    "rtx-5090": 32,
    "a10": 24,
    "l4": 24,
    "l40s": 48,
    "v100-16": 16,
    "v100-32": 32,
    "a100-40": 40,
    "a100-80": 80,
    "h100-80": 80,
    "h200-141": 141,
    "b200-192": 192,
}
"""Memory of cards by name, as their makers give it; drivers leave a few per cent less."""

_CUBLAS = 2 * 32 * 2**20
"""Bytes that cuBLAS takes of torch's memory on Hopper: 32 MiB for each of two threads, that of the
forward and that of the backward pass. Older cards take 8 MiB for each."""

Phase = Literal["forward", "backward", "step"]


@dataclass(frozen=True)
class TrainingSetup:
    """How a model is trained.

    Attributes:
        batch: Number of sequences in a pass.
        window: Length of a sequence in tokens.
        checkpointing: Whether blocks compute their activations again in the backward pass.
        dtype: "bf16" or "fp32": type of the weights and all that is computed with them.
        clip: Whether the norm of the whole gradient is clipped.
        device: "cuda" for a GPU, or "cpu".
    """

    batch: int = 1
    window: int = 2048
    checkpointing: bool = False
    dtype: Literal["bf16", "fp32"] = "bf16"
    clip: bool = False
    device: Device = "cuda"

    def __post_init__(self) -> None:
        whole_number("batch", self.batch, 1)
        whole_number("window", self.window, 2)
        check_one_of("dtype", self.dtype, tuple(DTYPES))
        check_one_of("device", self.device, ("cuda", "cpu"))


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a training takes at its peak, in bytes.

    Attributes:
        optimizer: Name of the optimizer.
        parts: Bytes of each of `PARTS` at the time of the peak.
        phase: When the peak is: "forward", "backward" or "step", that of the optimizer.
        peaks: The largest sum of each phase.
        saved: Bytes of activations that the forward pass leaves for the backward pass.
        parameters: Number of parameters, those of LoRA included.
        projected: Number of matrices that GaLore projects.
    """

    optimizer: str
    parts: Mapping[str, int]
    phase: Phase
    peaks: Mapping[str, int]
    saved: int
    parameters: int
    projected: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Peak:
    """Bytes of what changes during a step, at one time."""

    phase: Phase
    activations: int = 0
    logits: int = 0
    gradients: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.gradients + self.workspace


def estimate_memory(
    source: str | Path,
    setup: TrainingSetup,
    projection: ProjectionSettings,
    optimizers: Sequence[str] = OPTIMIZERS,
) -> list[MemoryEstimate]:
    """Return what training a model takes with each of several optimizers.

    AdamW and SGD, which has momentum, are those of torch, fused; LoRA is that of peft with the rank
    of `projection`, trained by AdamW in float32.

    Args:
        source: What `joma.models.blank.blank_model` takes.
        setup: How it is trained.
        projection: Settings of GaLore.
        optimizers: Some of `OPTIMIZERS`.

    Raises:
        JomaError: The model is unknown or cannot be followed, or GaLore projects nothing.
    """
    for name in optimizers:
        check_one_of("optimizer", name, OPTIMIZERS)
    model = blank_model(source, DTYPES[setup.dtype])
    found: dict[str, MemoryEstimate] = {}
    for with_lora in (False, True):  # in this order: LoRA changes the model
        names = [name for name in optimizers if (name == "lora") == with_lora]
        if not names:
            continue
        if with_lora:
            add_lora(model, projection.rank)
        costs = {
            name: parameter_costs(model, name, projection, clip=setup.clip, device=setup.device)
            for name in names
        }
        passes = training_passes(
            model,
            setup.batch,
            setup.window,
            checkpointing=setup.checkpointing,
            device=setup.device,
        )
        for name in names:
            per_layer = name == "galore-adamw" and projection.per_layer
            waits = name == "galore-adamw" and setup.clip
            peaks = list(_peaks(passes, costs[name], per_layer, waits))
            found[name] = _estimate(name, model, passes, costs[name], peaks, setup.device)
    return [found[name] for name in optimizers]


def _estimate(
    name: str,
    model: nn.Module,
    passes: TrainingPasses,
    costs: Mapping[Tensor, Cost],
    peaks: Sequence[_Peak],
    device: Device,
) -> MemoryEstimate:
    highest = max(peaks, key=lambda peak: peak.total)
    buffers = (_CUBLAS if device == "cuda" else 0) + sum(cost.buffer for cost in costs.values())
    fixed = {
        "weights": sum(one.nbytes for one in (*model.parameters(), *model.buffers())),
        "states": sum(cost.states for cost in costs.values()),
        "projectors": sum(cost.projectors for cost in costs.values()),
    }
    parts = {
        **fixed,
        "gradients": highest.gradients,
        "activations": highest.activations,
        "logits": highest.logits,
        "workspace": highest.workspace + buffers,
    }
    always = sum(fixed.values()) + buffers
    by_phase = {
        phase: always + max((one.total for one in peaks if one.phase == phase), default=0)
        for phase in ("forward", "backward", "step")
    }
    return MemoryEstimate(
        name,
        {part: parts[part] for part in PARTS},
        highest.phase,
        by_phase,
        passes.saved,
        sum(one.numel() for one in model.parameters()),
        sum(cost.is_projected for cost in costs.values()),
    )


def _peaks(
    passes: TrainingPasses, costs: Mapping[Tensor, Cost], per_layer: bool, waits: bool
) -> Iterator[_Peak]:
    """Yield what is allocated at the times of a step that can be its peak.

    Args:
        passes: The passes.
        costs: What the optimizer takes for each parameter.
        per_layer: Whether parameters move during the backward pass.
        waits: Whether gradients, projected where they are, wait for the norm of all.
    """
    kept = [0]
    """Bytes of gradients that exist after a number of them have arrived."""
    for arrival in passes.arrivals:
        cost, whole = costs[arrival.parameter], arrival.parameter.nbytes
        if per_layer:
            waiting = whole if cost.waiting is None else cost.waiting
            whole = waiting if waits else 0
        kept.append(kept[-1] + whole)
    for moment in passes.moments:
        yield _Peak(
            "backward" if moment.phase == "backward" else "forward",
            moment.activations,
            moment.logits,
            kept[moment.arrived],
            moment.workspace,
        )
    moved = [(one, costs[one.parameter]) for one in passes.arrivals]
    if per_layer:
        for before, (arrival, cost) in zip(kept, moved, strict=False):
            moves_now = cost.is_projected or not waits  # or its subspace is chosen
            yield _Peak(
                "backward",
                arrival.activations,
                arrival.logits,
                before + arrival.parameter.nbytes,
                cost.workspace if moves_now else 0,
            )
    # With per_layer the subspaces are chosen as gradients arrive, and not in the step.
    together = [cost for _, cost in moved if not (per_layer and cost.is_projected)]
    workspace = max((cost.workspace for cost in together), default=0)
    if not per_layer and waits:
        workspace += sum(cost.waiting or 0 for _, cost in moved)
    if not per_layer or waits:
        yield _Peak("step", gradients=kept[-1], workspace=workspace)


def card_memory(card: str) -> float:
    """Return the memory of a card in GiB.

    Args:
        card: A name of `CARDS`, or a number of GiB.

    Raises:
        JomaError: No card has the name, and it is no positive number.
    """
    if card.lower() in CARDS:
        return float(CARDS[card.lower()])
    try:
        memory = float(card)
    except ValueError:
        memory = -1.0
    if not 0 < memory < float("inf"):
        known = ", ".join(CARDS)
        raise JomaError(f"card must be a number of GiB or one of {known}, got {card!r}")
    return memory


def default_rank(source: str | Path) -> int:
    """Return the rank that a preset is trained with in the paper, else a quarter of the width.

    Args:
        source: What `joma.models.blank.blank_model` takes.
    """
    if str(source) in PRESETS:
        return PRESETS[str(source)].rank
    model = blank_model(source)
    width = model.get_input_embeddings().embedding_dim  # type: ignore[operator]
    return max(1, int(width) // 4)
