"""What training a model takes of a GPU's memory, before anything is allocated.

Weights, gradients and states follow from the shapes of the parameters. Which activations a forward
pass keeps is what autograd says of one pass on the meta device, where nothing is computed. The peak
of a step is the largest of four sums: when the backward pass begins, in the middle of it, at its
end, and in the step of the optimizer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from joma.common.checks import check_one_of, whole_number
from joma.common.quiet import quietly, reading
from joma.errors import JomaError
from joma.models import enable_checkpointing
from joma.models.blank import PRESETS, blank_model
from joma.optim import GaLoreAdamW
from joma.optim.galore import ProjectedMatrix

OPTIMIZERS = ("adamw", "adamw-8bit", "sgd", "lora", "galore-adamw")
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

CUBLAS_BYTES = 2 * 32 * 2**20
"""What cuBLAS takes of torch's memory on Hopper, for the forward and for the backward pass."""
_LOGIT_COPIES = 3
"""Tensors as large as the log-probabilities when the backward pass begins: these, their gradient,
and that of the logits."""
_ADAM_BYTES = 44
"""Temporary bytes for each number that moves at once, of which `joma.kernels.moments` says how
many do."""
_SEARCH_BYTES = 28
"""Temporary bytes for each number of the bases that a power iteration makes orthonormal."""


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
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        whole_number("batch", self.batch, 1)
        whole_number("window", self.window, 2)
        check_one_of("dtype", self.dtype, tuple(DTYPES))
        check_one_of("device", self.device, ("cuda", "cpu"))


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
    side: Literal["short", "left", "right", "smallest"] = "short"
    bits: Literal[8] | None = None
    projector_bits: Literal[8] | None = None
    per_layer: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a training takes at its peak, in bytes.

    Attributes:
        optimizer: Name of the optimizer.
        parts: Bytes of each of `PARTS` at the time of the peak.
        phase: When the peak is: "backward", or "step" for that of the optimizer.
        peaks: The largest sum of each phase.
        saved: Bytes of activations that the forward pass keeps for the backward pass.
        parameters: Number of parameters, those of LoRA included.
        projected: Number of matrices that GaLore projects.
    """

    optimizer: str
    parts: Mapping[str, int]
    phase: Literal["backward", "step"]
    peaks: Mapping[str, int]
    saved: int
    parameters: int
    projected: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Activations:
    """Bytes of activations: all that are kept, those of one block, and the log-probabilities."""

    saved: int
    block: int
    logits: int


@dataclass(frozen=True)
class _Costs:
    """Bytes that an optimizer takes: of states, bases, temporaries, and gradients that wait."""

    states: int
    bases: int = 0
    workspace: int = 0
    waiting: int = 0
    projected: int = 0


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
        JomaError: The model is unknown or needs numbers to run, or GaLore projects nothing.
    """
    for name in optimizers:
        check_one_of("optimizer", name, OPTIMIZERS)
    model = blank_model(source, DTYPES[setup.dtype])
    found: dict[str, MemoryEstimate] = {}
    plain = [name for name in optimizers if name != "lora"]
    costs = {name: _costs(name, model, setup, projection) for name in plain}
    kept = _activations(model, setup) if plain else None
    for name in plain:
        per_layer = name == "galore-adamw" and projection.per_layer
        found[name] = _estimate(name, model, costs[name], kept, setup, per_layer=per_layer)
    if "lora" in optimizers:  # last, for it changes the model
        _add_lora(model, projection.rank)
        states = sum(2 * one.nbytes for one in model.parameters() if one.requires_grad)
        found["lora"] = _estimate("lora", model, _Costs(states), _activations(model, setup), setup)
    return [found[name] for name in optimizers]


def _estimate(
    name: str,
    model: nn.Module,
    costs: _Costs,
    kept: _Activations,
    setup: TrainingSetup,
    *,
    per_layer: bool = False,
) -> MemoryEstimate:
    """Return the largest of the sums at four times of a step."""
    trained = [one for one in model.parameters() if one.requires_grad]
    largest = max(one.nbytes for one in trained)
    gradients = sum(one.nbytes for one in trained)
    if per_layer:
        gradients = costs.waiting if setup.clip else 0
    arriving = largest if per_layer else 0
    moves = costs.workspace if per_layer else 0
    stepping = 0 if per_layer and not setup.clip else costs.workspace
    waiting = costs.waiting - costs.unprojected if setup.clip and not per_layer else 0
    times = [  # phase, gradients, activations, logits, workspace
        ("backward", 0, kept.saved, _LOGIT_COPIES * kept.logits, 0),
        ("backward", largest, kept.saved + (kept.block if setup.checkpointing else 0), 0, moves),
        ("backward", gradients + arriving, kept.block, 0, moves),
        ("step", gradients, 0, 0, stepping + waiting),
    ]
    fixed = {
        "weights": sum(one.nbytes for one in (*model.parameters(), *model.buffers())),
        "states": costs.states,
        "projectors": costs.bases,
    }
    constant = CUBLAS_BYTES if setup.device == "cuda" else 0
    phase, *changing = max(times, key=lambda one: sum(one[1:]))
    parts = fixed | dict(zip(("gradients", "activations", "logits", "workspace"), changing))
    parts["workspace"] += constant
    always = sum(fixed.values()) + constant
    peaks = {
        one: always + max(sum(rest) for at, *rest in times if at == one)
        for one in ("backward", "step")
    }
    return MemoryEstimate(
        name,
        {part: parts[part] for part in PARTS},
        phase,
        peaks,
        kept.saved,
        sum(one.numel() for one in model.parameters()),
        costs.projected,
    )


def _costs(
    name: str, model: nn.Module, setup: TrainingSetup, projection: ProjectionSettings
) -> _Costs:
    """Return what an optimizer takes for all parameters of a model."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    if name in ("adamw", "sgd"):  # fused, they need no temporaries
        return _Costs((2 if name == "adamw" else 1) * sum(one.nbytes for one in parameters))
    if name == "adamw-8bit":
        states = sum(_moment_bytes(one.shape, one.dtype, eight=True) for one in parameters)
        return _Costs(states, workspace=_adam_workspace(parameters))
    optimizer = GaLoreAdamW(
        model,
        rank=projection.rank,
        side=projection.side,
        bits=projection.bits,
        projector_bits=projection.projector_bits,
        verbose=False,
    )
    matrices = dict(optimizer.subspaces())
    rest = [one for one in parameters if one not in matrices]
    eight = projection.bits == 8
    states = sum(_moment_bytes(one.shape, one.dtype, eight=eight) for one in rest)
    bases = waiting = workspace = 0
    for parameter, matrix in matrices.items():
        (rows, columns), rank, left = matrix.shape, projection.rank, matrix.side == "left"
        inside = (rank, columns) if left else (rows, rank)
        states += _moment_bytes(inside, parameter.dtype, eight=eight and rows * columns >= SMALL)
        basis = (rows if left else columns, rank)
        size = math.prod(basis)
        if projection.projector_bits == 8:
            bases += size + 4 * math.prod(scale_shape(basis))
        else:
            bases += size * parameter.element_size()
        waiting += 4 * math.prod(inside)
    return _Costs(...)
