"""What predictors are fitted to: hidden states of a model on a text, and what mattered next."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from joma.common.progress import Progress
from joma.inference.sparsify._layers import SparseLayer
from joma.inference.sparsify._predictors import normed
from joma.probes.inputs import run_on_tokens

_TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
_GATES_KEPT = 2**21
"""Numbers kept of a layer's gates, evenly over the text, to take quantiles of."""


@dataclass(eq=False)
class Observed:
    """One layer on all tokens of a text, in half precision on the CPU.

    Attributes:
        states: The hidden state that enters the block, divided by its rms, (T, d).
        scores: |activation| · ‖column of the down-projection‖ of each neuron, divided by the
            token's largest, (T, N).
        head_states: The input of the MLP of the layer before, divided by its rms, (T, d); None for
            layer 0, and where heads are not asked for.
        head_scores: Length of what each head adds, divided by the token's largest, (T, H).
        gates: A sample of |act(gate)|.
    """

    states: Tensor
    scores: Tensor
    head_states: Tensor | None
    head_scores: Tensor | None
    gates: Tensor


@dataclass(eq=False)
class _Seen:
    """The parts of `Observed` as batches add to them."""

    states: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    head_states: list[Tensor] = field(default_factory=list)
    head_scores: list[Tensor] = field(default_factory=list)
    gates: list[Tensor] = field(default_factory=list)

    def whole(self) -> Observed:
        heads = (
            (torch.cat(self.head_states), torch.cat(self.head_scores)) if self.head_states else None
        )
        states, scores = torch.cat(self.states), torch.cat(self.scores)
        gates = torch.cat(self.gates)
        return Observed(states, scores, *(heads or (None, None)), gates)


def batches(model: nn.Module, windows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield batches of windows on the model's device, each with the number of its first."""
    device = next(model.parameters()).device
    size = max(1, _TOKENS_AT_ONCE.get(device.type, 16384) // windows.shape[1])
    for start in range(0, len(windows), size):
        yield start, windows[start : start + size].to(device)


def observe(
    model: nn.Module,
    layers: Sequence[SparseLayer],
    chosen: Sequence[int],
    windows: Tensor,
    *,
    heads: bool,
    progress: Progress,
    what: str = "reading",
) -> dict[int, Observed]:
    """Return what some layers do on a text.

    Args:
        model: The model.
        layers: All its layers.
        chosen: The numbers of those to observe.
        windows: The text, (W, T).
        heads: Whether heads are observed too.
        progress: Called with how many windows are read.
        what: What that is called.
    """
    seen = {number: _Seen() for number in chosen}
    every = max(1, windows.numel() * layers[0].neurons // _GATES_KEPT)
    with torch.inference_mode(), _watching(layers, seen, heads, every):
        for start, batch in batches(model, windows):
            run_on_tokens(model, batch)
            progress(what, start + len(batch), len(windows))
    return {number: one.whole() for number, one in seen.items()}


@contextmanager
def _watching(
    layers: Sequence[SparseLayer], seen: dict[int, _Seen], heads: bool, every: int
) -> Iterator[None]:
    with ExitStack() as undo:
        for number, into in seen.items():
            layer = layers[number]
            see = partial(_see_state, into.states)
            undo.enter_context(layer.block.register_forward_pre_hook(see, with_kwargs=True))
            gate = partial(_see_gate, into.gates, layer, every)
            undo.enter_context(layer.lower.register_forward_hook(gate))
            neuron = partial(_see_scores, into.scores, layer.neuron_scale())
            undo.enter_context(layer.down.register_forward_pre_hook(neuron))
            if heads and number and layer.output is not None:
                before = partial(_see_input, into.head_states)
                undo.enter_context(layers[number - 1].lower.register_forward_pre_hook(before))
                head = partial(_see_heads, into.head_scores, layer, layer.head_gram())
                undo.enter_context(layer.output.register_forward_pre_hook(head))
        yield


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _halved(scores: Tensor) -> Tensor:
    largest = scores.amax(-1, keepdim=True)
    return (scores / largest.where(largest > 0, 1)).to("cpu", torch.float16)


def _see_state(
    into: list[Tensor], block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    _see_input(into, block, (given[0] if given else named["hidden_states"],))


def _see_input(into: list[Tensor], module: nn.Module, given: tuple[Any, ...]) -> None:
    into.append(normed(_flat(given[0]).float()).to("cpu", torch.float16))


def _see_scores(
    into: list[Tensor], scale: Tensor, module: nn.Module, given: tuple[Any, ...]
) -> None:
    into.append(_halved(_flat(given[0]).float().abs() * scale))


def _see_heads(
    into: list[Tensor], layer: SparseLayer, gram: Tensor, module: nn.Module, given: tuple[Any, ...]
) -> None:
    into.append(_halved(layer.head_scores(_flat(given[0]), gram)))


def _see_gate(
    into: list[Tensor],
    layer: SparseLayer,
    every: int,
    module: nn.Module,
    given: tuple[Any, ...],
    made: Tensor,
) -> None:
    into.append(layer.activation(made).abs().float().flatten()[::every].cpu())
