"""What training a model takes of a GPU's memory, before anything is allocated.

Weights, gradients and states follow from the shapes of the parameters. Which activations a forward
pass keeps is what autograd says of one pass on the meta device, where nothing is computed. The peak
of a step is the largest of four sums: when the backward pass begins, in the middle of it, at its
end, and in the step of the optimizer.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from joma.common.checks import check_one_of, whole_number
from joma.common.quiet import quietly, reading
from joma.errors import JomaError
from joma.kernels.eight_bits import scale_shape
from joma.kernels.moments import ROWS_AT_ONCE, SMALL, moment_bytes
from joma.models import enable_checkpointing
from joma.models.blank import PRESETS, blank_model
from joma.optim import GaLoreAdamW

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
_ADAM_BYTES = {"eight": 60, "bf16": 32, "fp32": 22}
"""Temporary bytes for each number that Adam moves at once, by how moments are stored."""
_SEARCH_BYTES = 32
"""Temporary bytes for each number of a basis that a power iteration makes orthonormal."""


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
    """Bytes that an optimizer takes.

    Attributes:
        states: Of moments.
        bases: Of subspaces.
        adam: Of temporaries while a parameter moves.
        search: Of temporaries while a subspace is chosen.
        inside: Of all projected gradients, in float32.
        outside: Of all gradients that are not projected.
        projected: Number of projected matrices.
    """

    states: int
    bases: int = 0
    adam: int = 0
    search: int = 0
    inside: int = 0
    outside: int = 0
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
    kept = _activations(model, setup)
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
    arriving = moving = 0
    if per_layer:
        gradients = costs.inside + costs.outside if setup.clip else 0
        arriving, moving = largest, max(costs.search, 0 if setup.clip else costs.adam)
    stepping = max(costs.adam, 0 if per_layer else costs.search) if gradients else 0
    stepping += costs.inside if setup.clip and not per_layer else 0
    recomputed = kept.block if setup.checkpointing else 0
    times: list[tuple[Literal["backward", "step"], int, int, int, int]] = [
        # phase, gradients, activations, logits, workspace
        ("backward", 0, kept.saved, _LOGIT_COPIES * kept.logits, 0),
        ("backward", largest, kept.saved + recomputed, 0, moving),
        ("backward", gradients + arriving, kept.block // 2, 0, moving),
        ("step", gradients, 0, 0, stepping),
    ]
    fixed = {
        "weights": sum(one.nbytes for one in (*model.parameters(), *model.buffers())),
        "states": costs.states,
        "projectors": costs.bases,
    }
    constant = CUBLAS_BYTES if setup.device == "cuda" else 0
    phase, *changing = max(times, key=lambda one: sum(one[1:]))
    names = ("gradients", "activations", "logits", "workspace")
    parts = fixed | dict(zip(names, changing, strict=True))
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
    at_once = min(max(one.numel() for one in parameters), ROWS_AT_ONCE)
    if name == "adamw-8bit":
        states = sum(_moment_bytes(one, one.shape, torch.float32, eight=True) for one in parameters)
        return _Costs(states, adam=_ADAM_BYTES["eight"] * at_once)
    optimizer = GaLoreAdamW(
        model,
        rank=projection.rank,
        side=projection.side,
        bits=projection.bits,
        projector_bits=projection.projector_bits,
        verbose=False,
    )
    matrices, eight = dict(optimizer.subspaces()), projection.bits == 8
    rest = [one for one in parameters if one not in matrices]
    states = sum(_moment_bytes(one, one.shape, one.dtype, eight=eight) for one in rest)
    bases = inside = largest = 0
    for parameter, matrix in matrices.items():
        (rows, columns), rank, left = matrix.shape, projection.rank, matrix.side == "left"
        shape = (rank, columns) if left else (rows, rank)
        states += _moment_bytes(parameter, shape, parameter.dtype, eight=eight)
        basis = (rows if left else columns), rank
        numbers = math.prod(basis)
        if projection.projector_bits == 8:
            bases += numbers + 4 * math.prod(scale_shape(basis))
        else:
            bases += numbers * parameter.element_size()
        inside += 4 * math.prod(shape)
        search = _SEARCH_BYTES * max(rows, columns) * rank
        copied = 4 * rows * columns if setup.device == "cpu" and setup.dtype == "bf16" else 0
        largest = max(largest, search + copied)
    clipped = max((one.nbytes for one in rest), default=0) if setup.clip else 0  # a copy of one
    return _Costs(
        states,
        bases,
        _ADAM_BYTES["eight" if eight else setup.dtype] * at_once + clipped,
        largest,
        inside,
        sum(one.nbytes for one in rest),
        len(matrices),
    )


def _moment_bytes(
    parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, eight: bool
) -> int:
    """Return the bytes of both moments of a shape; small parameters keep theirs in full."""
    return moment_bytes(shape, None if eight and parameter.numel() >= SMALL else dtype)


def _add_lora(model: nn.Module, rank: int) -> None:
    """Freeze a model, and add LoRA in float32 to the matrices that GaLore would project."""
    matrices = dict(GaLoreAdamW(model, rank=1, verbose=False).subspaces())
    model.requires_grad_(False)

    def add(
        layer: Any, given: tuple[Tensor, ...], output: Tensor, first: nn.Linear, second: nn.Linear
    ) -> Tensor:
        added = second(first(given[0].to(torch.float32)))
        return (output + added * 2.0).to(output.dtype)

    for layer in list(model.modules()):
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight in matrices:
            rows, columns = weight.shape if isinstance(layer, nn.Linear) else weight.shape[::-1]
            layer.lora_first = nn.Linear(columns, rank, bias=False, device="meta")
            layer.lora_second = nn.Linear(rank, rows, bias=False, device="meta")
            adapters = {"first": layer.lora_first, "second": layer.lora_second}
            layer.register_forward_hook(functools.partial(add, **adapters))


def _activations(model: nn.Module, setup: TrainingSetup) -> _Activations:
    """Return what a forward pass keeps for the backward pass, as autograd says.

    Raises:
        JomaError: The model does not read tokens, or its operations depend on numbers.
    """
    config: Any = model.config
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if isinstance(context, int) and 0 < context < setup.window:
        raise JomaError(f"window must be at most {context} for this model, got {setup.window}")
    layers = text.num_hidden_layers + (getattr(config, "num_decoder_layers", None) or 0)
    plain, logits = _kept(model, setup)
    block = plain // layers
    if not setup.checkpointing:
        return _Activations(plain, block, logits)
    with quietly():
        enable_checkpointing(model)
    return _Activations(_kept(model, setup)[0], block, logits)


def _kept(model: nn.Module, setup: TrainingSetup) -> tuple[int, int]:
    """Return the bytes of activations and of log-probabilities that autograd keeps in a pass."""
    try:
        vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        raise JomaError(
            f"{type(model).__name__} has no embeddings of tokens: it reads no text"
        ) from None
    known = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    tokens = torch.zeros(setup.batch, setup.window, dtype=torch.long, device="meta")
    arguments = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {
        name: value
        for name, value in (("labels", tokens), ("decoder_input_ids", tokens), ("use_cache", False))
        if name in arguments
    }
    what = f"the passes of {type(model).__name__} cannot be followed without numbers"
    watched = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with reading(lambda said: f"{what} ({said})"), quietly(), _Kernels(), watched:
        model(input_ids=tokens, **given)
    numbers = setup.batch * (setup.window - 1) * vocabulary
    logits = saved = 0
    for tensor in kept.values():
        size = tensor.untyped_storage().nbytes()
        if tensor.ndim > 1 and tensor.shape[-1] == vocabulary and tensor.numel() >= numbers:
            logits += size
        else:
            saved += size
    return saved, logits


class _Kernels(TorchFunctionMode):
    """Makes attention and dropout on the meta device keep what kernels keep.

    There attention would be computed by the formula, with a matrix of all pairs of positions, and
    dropout would keep factors where a GPU keeps a mask of bytes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and args[0].is_meta:  # a condition on numbers
            return True
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3])
        if func is torch.nn.functional.dropout:
            tensor, rate = args[0], kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            if rate > 0 and kwargs.get("training", True):
                return torch.native_dropout(tensor, rate, True)[0]
        return func(*args, **kwargs)


class _FusedAttention(torch.autograd.Function):
    """Fused attention without numbers: it keeps queries, keys, values, output and its sums."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return a tensor of the output's shape, with heads and positions exchanged in memory."""
        *batch, heads, length, _ = query.shape
        shape = (*batch, length, heads, value.shape[-1])
        output = query.new_empty(shape).transpose(-3, -2)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output


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
