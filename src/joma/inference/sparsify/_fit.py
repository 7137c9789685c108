"""Observe what a model does on a text, and fit predictors to it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.common.checks import whole_number
from joma.common.progress import Progress, no_progress
from joma.errors import JomaError
from joma.inference.sparsify._apply import kept_of
from joma.inference.sparsify._layers import SparseLayer, sparse_layers
from joma.inference.sparsify._predictors import (
    Predictor,
    Predictors,
    SparsityFacts,
    model_fingerprint,
    normed,
)
from joma.probes.inputs import run_on_tokens

RANK_RATIO = 0.125
"""Rank of a predictor divided by the model's width, unless given."""

_SMALLEST_DEVIATION = 1e-3
_MOST_WEIGHT, _LEAST_WEIGHT = 4.0, 0.1
_LEAST_TOKENS = 64
_TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
_GATES_KEPT = 2**21
"""Numbers kept of a layer's gates, evenly over the text, to take quantiles of."""


@dataclass(eq=False)
class LayerActivations:
    """One layer on all tokens of a text, in half precision on the CPU.

    Attributes:
        states: The hidden state that enters the block, divided by its rms, (T, d).
        scores: |activation| · ‖column of the down-projection‖ of each neuron, divided by the
            token's largest, (T, N).
        gates: A sample of |act(gate)|.
        head_states: The input of the MLP of the layer before, divided by its rms, (T, d); None for
            layer 0, and where heads are not asked for.
        head_scores: Length of what each head adds, divided by the token's largest, (T, H).
    """

    states: Tensor
    scores: Tensor
    gates: Tensor
    head_states: Tensor | None = None
    head_scores: Tensor | None = None


@dataclass(frozen=True)
class FitSettings:
    """How predictors are fitted.

    Args:
        mlp_sparsity: Share of the neurons that will be left out.
        heads_sparsity: Share of the heads; None fits none for them.
        rank_ratio: Rank of the predictors divided by the width of the model.
        epochs: How often each predictor is shown the text.
        batch: Tokens of one step.
        learning_rate: The largest; it rises for a tenth of the steps and then falls to 0.
        memory: Bytes of observations held at once; with more layers the text is read again.
        seed: Decides the initial weights and the order of tokens.
    """

    mlp_sparsity: float = 0.5
    heads_sparsity: float | None = None
    rank_ratio: float = RANK_RATIO
    epochs: int = 6
    batch: int = 256
    learning_rate: float = 3e-3
    memory: int = 2**31
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {"mlp_sparsity": 1, "heads_sparsity": 1, "rank_ratio": 4, "learning_rate": 1}
        for name, below in bounds.items():
            value = getattr(self, name)
            if value is None and name == "heads_sparsity":
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < below
            ):
                raise JomaError(f"{name} must be above 0 and below {below}, got {value!r}")
        for name in ("epochs", "batch", "memory"):
            whole_number(name, getattr(self, name), 1)
        whole_number("seed", self.seed, 0)


def fit(
    model: nn.Module,
    windows: Tensor,
    settings: FitSettings | None = None,
    *,
    source: str = "",
    corpus: str = "",
    progress: Progress = no_progress,
) -> Predictors:
    """Fit predictors of neurons, and of heads where asked, to a model's activations on a text.

    Args:
        model: A decoder of Hugging Face transformers, in evaluation mode.
        windows: The text, (W, T), tokens. Judge the predictors on another one.
        settings: How; the defaults where None.
        source: What the model is called, for messages.
        corpus: What the text is called.
        progress: Called with how far the work is.

    Raises:
        JomaError: The model's MLPs cannot be made sparse, or there is too little text.
    """
    settings = FitSettings() if settings is None else settings
    layers = sparse_layers(model)
    _check(layers, windows, settings)
    heads = settings.heads_sparsity is not None
    facts = SparsityFacts(
        fingerprint=model_fingerprint(model),
        model_class=type(model).__name__,
        source=source,
        dtype=layers[0].dtype,
        layers=len(layers),
        width=layers[0].width,
        neurons=tuple(layer.neurons for layer in layers),
        heads=layers[0].heads if heads else 0,
        gated=layers[0].up is not None,
        mlp_sparsity=float(settings.mlp_sparsity),
        heads_sparsity=None if not heads else float(settings.heads_sparsity or 0),
        rank_ratio=float(settings.rank_ratio),
        tokens=windows.numel(),
        corpus=corpus,
    )
    made = Predictors(facts, [])
    for number, seen in observe(
        model, layers, windows, heads=heads, memory=settings.memory, progress=progress
    ):
        progress("fitting", number, len(layers))
        _add(made, layers[number], seen, settings)
    progress("fitting", len(layers), len(layers))
    return made


def _check(layers: Sequence[SparseLayer], windows: Tensor, settings: FitSettings) -> None:
    if windows.ndim != 2 or windows.is_floating_point():
        raise JomaError(f"windows must be tokens of shape (W, T), got {tuple(windows.shape)}")
    if windows.numel() < _LEAST_TOKENS:
        raise JomaError(f"windows must have at least {_LEAST_TOKENS} tokens, got {windows.numel()}")
    if len({layer.width for layer in layers}) > 1:
        raise JomaError("predictors need layers of one width")
    if settings.heads_sparsity is None:
        return
    counts = {layer.heads for layer in layers}
    if len(counts) > 1 or 0 in counts:
        raise JomaError("heads_sparsity must be None: the heads of this model were not found")


def batches(model: nn.Module, windows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield batches of windows on the model's device, each with the number of its first."""
    device = next(model.parameters()).device
    size = max(1, _TOKENS_AT_ONCE.get(device.type, 16384) // windows.shape[1])
    for start in range(0, len(windows), size):
        yield start, windows[start : start + size].to(device)


def observe(
    model: nn.Module,
    layers: Sequence[SparseLayer],
    windows: Tensor,
    *,
    heads: bool,
    memory: int,
    progress: Progress,
) -> Iterator[tuple[int, LayerActivations]]:
    """Yield the number of each layer, and what it does on a text.

    Args:
        model: The model.
        layers: All its layers.
        windows: The text, (W, T).
        heads: Whether heads are observed too.
        memory: Bytes of observations held at once; with more layers the text is read again.
        progress: Called with how many windows are read.
    """
    needed = max(2 * windows.numel() * (2 * it.width + it.neurons) for it in layers)
    at_once = max(1, memory // needed)
    every = max(1, windows.numel() * layers[0].neurons // _GATES_KEPT)
    for start in range(0, len(layers), at_once):
        group = range(start, min(start + at_once, len(layers)))
        seen: dict[int, dict[str, list[Tensor]]] = {number: {} for number in group}
        with torch.inference_mode(), ExitStack() as undo:
            for number, into in seen.items():
                _watch(layers, number, into, undo, heads=heads, every=every)
            for first, batch in batches(model, windows):
                run_on_tokens(model, batch)
                what = f"reading, layers {group[0]} to {group[-1]}"
                progress(what, first + len(batch), len(windows))
        for number in group:
            yield number, LayerActivations(**{k: torch.cat(v) for k, v in seen.pop(number).items()})


def _watch(
    layers: Sequence[SparseLayer],
    number: int,
    into: dict[str, list[Tensor]],
    undo: ExitStack,
    *,
    heads: bool,
    every: int,
) -> None:
    """Note what one layer does, by hooks that `undo` takes away."""
    layer, scale = layers[number], layers[number].neuron_scale()

    def note(name: str, found: Tensor) -> None:
        into.setdefault(name, []).append(found.cpu())

    def see_state(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        state = given[0] if given else named["hidden_states"]
        note(name, normed(_by_token(state)).half())

    def see_scores(module: nn.Module, given: tuple[Any, ...]) -> None:
        note("scores", _relative(_by_token(given[0]).abs() * scale))

    def see_gates(module: nn.Module, given: tuple[Any, ...], made: Tensor) -> None:
        note("gates", layer.activation(made).abs().float().flatten()[::every])

    hooks = [
        layer.block.register_forward_pre_hook(
            lambda _, given, named: see_state("states", given, named), with_kwargs=True
        ),
        layer.lower.register_forward_hook(see_gates),
        layer.down.register_forward_pre_hook(see_scores),
    ]
    if heads and number and layer.output is not None:
        gram = layer.head_gram()

        def see_heads(module: nn.Module, given: tuple[Any, ...]) -> None:
            note("head_scores", _relative(layer.head_scores(_by_token(given[0]), gram)))

        hooks += [
            layers[number - 1].lower.register_forward_pre_hook(
                lambda _, given: see_state("head_states", given, {})
            ),
            layer.output.register_forward_pre_hook(see_heads),
        ]
    for hook in hooks:
        undo.enter_context(hook)


def _by_token(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).float()


def _relative(scores: Tensor) -> Tensor:
    greatest = scores.amax(-1, keepdim=True)
    return (scores / greatest.where(greatest > 0, 1)).half()


def _add(
    made: Predictors, layer: SparseLayer, seen: LayerActivations, settings: FitSettings
) -> None:
    """Fit the predictors of one layer and add them."""
    weight = next(layer.lower.parameters())
    device, rank = weight.device, made.facts.rank

    def fitted(states: Tensor, scores: Tensor, sparsity: float, offset: int) -> Predictor:
        keep = kept_of(scores.shape[1], sparsity)
        seed = 1_000_003 * settings.seed + 2 * layer.layer + offset
        found = fit_predictor(states.to(device), scores.to(device), keep, rank, settings, seed)
        return found.to(weight.dtype)

    made.mlp.append(fitted(seen.states, seen.scores, settings.mlp_sparsity, 0))
    total = torch.zeros(layer.neurons, dtype=torch.float64)
    for some in seen.scores.split(_TOKENS_AT_ONCE["cpu"]):
        shares = some.double()
        total += (shares / shares.sum(-1, keepdim=True).clamp(min=1e-30)).sum(0)
    made.importance.append((total / len(seen.scores)).float().to(device))
    ordered = seen.gates.double().sort().values
    places = torch.linspace(0, 1, 101, dtype=torch.float64) * (len(ordered) - 1)
    made.thresholds.append(ordered[places.round().long()].float().to(device))
    if seen.head_states is not None and seen.head_scores is not None:
        share = settings.heads_sparsity
        assert share is not None
        made.heads[layer.layer] = fitted(seen.head_states, seen.head_scores, share, 1)


@torch.enable_grad()
def fit_predictor(
    states_Td: Tensor, scores_TN: Tensor, keep: int, rank: int, settings: FitSettings, seed: int
) -> Predictor:
    """Fit one predictor of which outputs have the `keep` largest scores of each token.

    The loss is the cross entropy of "is among them, and above zero", in which outputs count by how
    far their score is from the one at the edge: to miss a large one costs more.

    Args:
        states_Td: What the predictor reads, divided by its rms.
        scores_TN: The scores.
        keep: How many outputs will be computed.
        rank: The width of the layer between.
        settings: How.
        seed: Decides the initial weights and the order of tokens.
    """
    tokens, width = states_Td.shape
    outputs, device = scores_TN.shape[1], states_Td.device
    generator = torch.Generator().manual_seed(seed)
    mean = states_Td.float().mean(0)
    deviation = states_Td.float().std(0).clamp(min=_SMALLEST_DEVIATION)
    edges_T1 = _edges(scores_TN, keep)
    often = _membership(scores_TN, edges_T1).clamp(0.01, 0.99)
    first = (torch.randn(rank, width, generator=generator) / width**0.5).to(device)
    second = (0.02 * torch.randn(outputs, rank, generator=generator) / rank**0.5).to(device)
    weights = [first, second, torch.log(often / (1 - often))]
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.AdamW(weights, lr=settings.learning_rate, weight_decay=1e-3)
    batch = min(settings.batch, tokens)
    steps = settings.epochs * (tokens // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 10 * (step + 1) / steps, 10 / 9 * (1 - step / steps))
    )
    for _ in range(settings.epochs):
        for some in torch.randperm(tokens, generator=generator).split(batch):
            if len(some) < batch:
                continue
            index = some.to(device)
            states = (states_Td[index].float() - mean) / deviation
            labels, weight = _labels(scores_TN[index].float(), edges_T1[index])
            logits = functional.linear(states @ weights[0].T, weights[1], weights[2])
            loss = functional.binary_cross_entropy_with_logits(logits, labels, weight=weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    first, second, bias = (weight.detach() for weight in weights)
    first = first / deviation
    return Predictor(first, -first @ mean, second, bias)


def _edges(scores: Tensor, keep: int) -> Tensor:
    """Return the smallest score of each token that is among its `keep` largest, (T, 1)."""
    found = [part.float().topk(keep, sorted=True).values[:, -1:] for part in scores.split(4096)]
    return torch.cat(found)


def _labels(scores: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Return which outputs are among the largest and above zero, and how much each counts."""
    labels = ((scores >= edge) & (scores > 0)).float()
    # Where the edge is zero (ReLU) every active neuron counts by its share of the token's mean.
    edge = edge.where(edge > 0, scores.mean(1, keepdim=True)).clamp(min=1e-6)
    return labels, (scores / edge - 1).abs().clamp(max=_MOST_WEIGHT) + _LEAST_WEIGHT


def _membership(scores: Tensor, edges: Tensor) -> Tensor:
    """Return at which share of the tokens each output is among the largest and above zero."""
    total = torch.zeros(scores.shape[1], device=scores.device)
    for part, edge in zip(scores.split(4096), edges.split(4096), strict=True):
        total += _labels(part.float(), edge)[0].sum(0)
    return total / len(scores)
