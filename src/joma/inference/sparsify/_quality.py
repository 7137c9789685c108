"""What sparse inference costs: recall of the predictors, energy kept, and perplexity."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.common.progress import Progress, no_progress
from joma.errors import JomaError
from joma.inference.sparsify._apply import OF_HEADS, SELECTIONS, check_predictors, kept_of, sparse
from joma.inference.sparsify._fit import LayerActivations, batches, observe
from joma.inference.sparsify._layers import sparse_layers
from joma.inference.sparsify._predictors import Predictor, Predictors

TOP = (0.1, 0.25, 0.5)
"""Shares of the neurons whose part of the energy is reported."""

_MOST_ENERGY = 0.99
_ROWS = 1024


@dataclass(frozen=True)
class LayerQuality:
    """One layer on text that its predictor was not fitted on; means over tokens.

    Energy is Σ score², of scores |activation| · ‖column of the down-projection‖.

    Attributes:
        layer: The number of the layer.
        recall: Share of the oracle's neurons that the predictor chose.
        static_recall: The same of the fixed set that is most important on the fitted text.
        energy: Share of the token's energy in the neurons the predictor chose.
        oracle_energy: The same in as many of the largest.
        static_energy: The same in the fixed set.
        for_99: Share of the neurons that carries 99% of the energy.
        zero: Share of activations that are exactly zero.
        top_energy: Share of the energy in the largest 10, 25 and 50% of the neurons.
        heads_recall: Share of the oracle's heads that the predictor chose; None where heads were
            not fitted.
        heads_energy: Share of Σ score² of the heads in those.
    """

    layer: int
    recall: float
    static_recall: float
    energy: float
    oracle_energy: float
    static_energy: float
    for_99: float
    zero: float
    top_energy: tuple[float, ...]
    heads_recall: float | None = None
    heads_energy: float | None = None


@dataclass(frozen=True)
class PerplexityCost:
    """Perplexity of a model under one selection, next to the dense model on the same windows.

    Attributes:
        selection: "dense", or how neurons were chosen.
        perplexity: exp of the mean loss over windows.
        loss: That mean, in nats a token.
        cost: The mean difference of the loss to the dense model's.
        standard_error: Of that difference, paired over windows.
        kept: Share of the neurons that were computed.
        losses: The loss of each window.
    """

    selection: str
    perplexity: float
    loss: float
    cost: float
    standard_error: float
    kept: float
    losses: tuple[float, ...]

    @property
    def windows(self) -> int:
        """How many windows."""
        return len(self.losses)


def layer_quality(
    model: nn.Module,
    predictors: Predictors,
    windows: Tensor,
    *,
    progress: Progress = no_progress,
    memory: int = 2**31,
) -> list[LayerQuality]:
    """Return how well each layer's predictor does on a text, and how sparse the layer is.

    Args:
        model: The model they were fitted on.
        predictors: The predictors.
        windows: The text, (W, T), other than they were fitted on.
        progress: Called with how far the work is.
        memory: Bytes of observations held at once.
    """
    layers = sparse_layers(model)
    check_predictors(model, predictors, layers)
    heads = bool(predictors.heads)
    seen = observe(model, layers, windows, heads=heads, memory=memory, progress=progress)
    return [_judged(number, predictors, one) for number, one in seen]


@torch.inference_mode()
def _judged(number: int, predictors: Predictors, seen: LayerActivations) -> LayerQuality:
    """Compare what one layer's predictor chooses with what mattered, token by token."""
    facts, neurons = predictors.facts, seen.scores.shape[1]
    keep = kept_of(neurons, facts.mlp_sparsity)
    fixed = predictors.importance[number].topk(keep).indices
    sums = torch.zeros(7 + len(TOP), dtype=torch.float64)
    for states, scores in zip(seen.states.split(_ROWS), seen.scores.split(_ROWS), strict=True):
        recall, kept, energy, member = _chosen(predictors.mlp[number], states, scores, keep)
        ordered = energy.sort(-1, descending=True).values
        shares = ordered.cumsum(-1) / ordered.sum(-1, keepdim=True).clamp(min=1e-30)
        row = [
            recall,
            member[:, fixed].mean(-1),
            kept,
            shares[:, keep - 1],
            energy[:, fixed].sum(-1) / ordered.sum(-1).clamp(min=1e-30),
            ((shares < _MOST_ENERGY).sum(-1) + 1).clamp(max=neurons) / neurons,
            (scores == 0).float().mean(-1),
            *(shares[:, math.ceil(top * neurons) - 1] for top in TOP),
        ]
        sums += torch.stack([column.double().sum().cpu() for column in row])
    means = (sums / len(seen.scores)).tolist()
    of_heads: tuple[float | None, float | None] = None, None
    if number in predictors.heads and seen.head_states is not None and seen.head_scores is not None:
        share = facts.heads_sparsity
        assert share is not None
        keep = kept_of(seen.head_scores.shape[1], share)
        states, scores = seen.head_states, seen.head_scores
        recall, kept, *_ = _chosen(predictors.heads[number], states, scores, keep)
        of_heads = float(recall.mean()), float(kept.mean())
    return LayerQuality(number, *means[:7], tuple(means[7:]), *of_heads)


def _chosen(
    predictor: Predictor, states: Tensor, scores: Tensor, keep: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a predictor's recall and energy kept, each score's energy, and the oracle's choice."""
    device, dtype = predictor.first.device, predictor.first.dtype
    energy = scores.to(device).float().square()
    predicted = predictor(states.to(device, dtype)).topk(keep).indices
    member = torch.zeros_like(energy).scatter_(
        1, energy.argsort(-1, descending=True)[:, :keep], 1.0
    )
    kept = energy.gather(1, predicted).sum(-1) / energy.sum(-1).clamp(min=1e-30)
    return member.gather(1, predicted).mean(-1), kept, energy, member


def perplexity_cost(
    model: nn.Module,
    predictors: Predictors | None,
    windows: Tensor,
    *,
    mlp: float | None = 0.5,
    heads: float | None = None,
    selections: Sequence[str] = SELECTIONS,
    seed: int = 0,
    progress: Progress = no_progress,
) -> list[PerplexityCost]:
    """Return the perplexity of the dense model and of each selection on the same windows.

    Args:
        model: A causal language model.
        predictors: Its predictors; None where no selection needs them.
        windows: The text, (W, T), tokens, at least two windows.
        mlp: As of `sparse`.
        heads: As of `sparse`; selections that have none for heads are left out.
        selections: Those to compare with the dense model.
        seed: Decides what "random" draws.
        progress: Called with how far the work is.
    """
    if len(windows) < 2 or windows.shape[1] < 2:
        raise JomaError(
            "windows must be at least two of at least two tokens, for a standard error, got "
            f"{tuple(windows.shape)}"
        )
    if heads is not None:
        selections = [it for it in selections if it in OF_HEADS]
    dense = _losses(model, windows, "dense", progress)
    results = [("dense", dense, 1.0)]
    for selection in selections:
        settings = {"mlp": mlp, "heads": heads, "selection": selection, "seed": seed}
        with sparse(model, predictors, **settings) as run:
            losses = _losses(model, windows, selection, progress)
        results.append((selection, losses, run.kept if mlp is not None else 1.0))
    found = []
    for selection, losses, kept in results:
        loss, cost = float(losses.mean()), losses - dense
        error = float(cost.std()) / math.sqrt(len(cost))
        numbers = (math.exp(loss), loss, float(cost.mean()), error, kept)
        found.append(PerplexityCost(selection, *numbers, tuple(losses.tolist())))
    return found


@torch.inference_mode()
def _losses(model: nn.Module, windows: Tensor, what: str, progress: Progress) -> Tensor:
    """Return the mean loss of each window, (W,)."""
    found: list[Tensor] = []
    for start, batch in batches(model, windows):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        targets = batch[:, 1:]
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        found.append(losses.view_as(targets).double().mean(-1).cpu())
        progress(f"perplexity, {what}", start + len(batch), len(windows))
    return torch.cat(found)
