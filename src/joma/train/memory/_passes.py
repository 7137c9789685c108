"""What a forward and a backward pass of a model allocate."""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from joma.common.quiet import quietly, reading
from joma.errors import JomaError
from joma.models import enable_checkpointing
from joma.train.memory._kernels import CpuKernels, GpuKernels
from joma.train.memory._live import LiveMemory, Moment

Device = Literal["cuda", "cpu"]
_KERNELS = {"cuda": GpuKernels, "cpu": CpuKernels}


@dataclass(frozen=True)
class Arrival:
    """A parameter's gradient that is complete.

    Attributes:
        parameter: The parameter.
        activations: Bytes of activations at this time, without the gradient.
        logits: Bytes of logits at this time.
    """

    parameter: Tensor
    activations: int
    logits: int


@dataclass(frozen=True)
class TrainingPasses:
    """A forward and a backward pass.

    Attributes:
        moments: What was allocated after each operation, without weights and their gradients.
        arrivals: The parameters in the order in which their gradients were complete.
        saved: Bytes of activations that the forward pass left for the backward pass.
    """

    moments: tuple[Moment, ...]
    arrivals: tuple[Arrival, ...]
    saved: int


def training_passes(
    model: nn.Module,
    batch: int,
    window: int,
    *,
    checkpointing: bool = False,
    device: Device = "cuda",
) -> TrainingPasses:
    """Return what the passes of a training step allocate, by making them.

    Args:
        model: The model, on the meta device: then nothing is computed.
        batch: Number of sequences.
        window: Length of a sequence in tokens.
        checkpointing: Whether each block computes its activations again in the backward pass.
        device: The device for which a model on the meta device stands.

    Raises:
        JomaError: The model does not read tokens, or its operations depend on numbers.
    """
    config: Any = model.config
    vocabulary = _vocabulary(model)
    context = _context(config)
    if context is not None and window > context:
        raise JomaError(f"window must be at most {context} for this model, got {window}")
    place = next(model.parameters()).device
    kernels = _KERNELS[device] if place.type == "meta" else contextlib.nullcontext
    if checkpointing:
        _checkpoint(model, kernels)
    tokens = torch.zeros(batch, window, dtype=torch.long, device=place)

    def is_logits(tensor: Tensor) -> bool:
        return (
            tensor.ndim > 1
            and tensor.shape[-1] == vocabulary
            and (tensor.numel() >= batch * (window - 1) * vocabulary)
        )

    live = LiveMemory(place.type, is_logits)
    arrivals: list[Arrival] = []

    def arrived(parameter: Tensor) -> None:
        assert parameter.grad is not None
        live.know([parameter.grad])
        arrivals.append(Arrival(parameter, live.activations, live.logits))
        parameter.grad = None
        live.arrived += 1

    hooks = [
        one.register_post_accumulate_grad_hook(arrived)
        for one in model.parameters()
        if one.requires_grad
    ]
    what = f"the passes of {type(model).__name__} cannot be followed without numbers"
    try:
        with reading(lambda said: f"{what} ({said})"), quietly(), contextlib.ExitStack() as stack:
            stack.enter_context(live)
            live.know([tokens, *model.parameters(), *model.buffers()])
            stack.enter_context(kernels())
            loss = _loss(model, tokens)
            saved = live.activations
            live.phase = "backward"
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return TrainingPasses(tuple(live.moments), tuple(arrivals), saved)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    known = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"labels": tokens} if "labels" in known else {}
    if "use_cache" in known:
        given["use_cache"] = False
    if "decoder_input_ids" in known:
        given["decoder_input_ids"] = tokens
    output = model(input_ids=tokens, **given)
    loss = getattr(output, "loss", None)
    if loss is None:  # a model without an output layer: what follows it is the user's
        loss = output[0].float().mean()
    return loss


def _checkpoint(model: nn.Module, kernels: Callable[[], Any]) -> None:
    # The recomputed pass runs inside the backward pass, where function modes are switched off.
    settings = {
        "use_reentrant": False,
        "context_fn": lambda: (contextlib.nullcontext(), kernels()),
    }
    with quietly():
        enable_checkpointing(model, settings)


def _vocabulary(model: nn.Module) -> int:
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        embedding = None
    if not isinstance(embedding, nn.Embedding):
        raise JomaError(f"{type(model).__name__} has no embeddings of tokens: it reads no text")
    return embedding.num_embeddings


def _context(config: Any) -> int | None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
