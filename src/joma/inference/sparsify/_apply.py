"""Run a model with some neurons and heads left out for each token, and undo that.

On a CPU, rows of the chosen neurons alone are read where that is less than all of them.
`embedding_bag` is a weighted sum of rows that copies none, and its gradient by the weights is the
product of every row with a vector: these two are all that a gathered MLP needs. Elsewhere all
neurons are computed and the others set to zero: the same numbers up to rounding.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.common.checks import check_one_of, whole_number
from joma.errors import JomaError
from joma.inference.sparsify._layers import SparseLayer, columns_of, rows_of, sparse_layers
from joma.inference.sparsify._predictors import Predictor, Predictors, model_fingerprint

SELECTIONS = ("predicted", "oracle", "magnitude", "static", "random")
"""Ways to choose neurons: the predictors', and four controls."""
OF_HEADS = ("predicted", "oracle", "random")
"""Those that choose heads as well."""

_RUNNING = "_joma_sparse"
_ROWS_AT_ONCE = 64
"""Rows that one worker adds up; a token's rows are dealt to several."""
_SUM = 0
"""The mode of `embedding_bag` that adds up."""


@dataclass
class SparseRun:
    """What a model did inside of `sparse`, in tokens × layers.

    Attributes:
        tokens: How often an MLP read a token.
        gathered: How often it did so by gathered products; the others were dense and masked.
    """

    tokens: int = 0
    gathered: int = 0
    _kept: Tensor | float = 0.0

    @property
    def kept(self) -> float:
        """The share of neurons that were kept; NaN before the first token."""
        return float(self._kept) / self.tokens if self.tokens else math.nan


@contextmanager
def sparse(
    model: nn.Module,
    predictors: Predictors | None = None,
    *,
    mlp: float | None = 0.5,
    heads: float | None = None,
    selection: str = "predicted",
    seed: int = 0,
) -> Iterator[SparseRun]:
    """Leave neurons and heads out while the block runs; after it the model is as before.

    Args:
        model: A decoder of Hugging Face transformers, in evaluation mode.
        predictors: What `fit` or `load_predictors` returned. The selections oracle and random need
            none.
        mlp: Share of the neurons of every MLP to leave out for each token, from 0 to below 1; None
            leaves the MLPs dense.
        heads: The same of attention heads, in every layer but the first; a head that is left out
            adds nothing to its token, and its keys and values enter the cache all the same.
        selection: How they are chosen: "predicted"; "oracle", the largest |activation| · ‖column
            of the down-projection‖ of the token; "magnitude", those whose gate's activation
            exceeds a threshold fitted on the corpus (neurons alone); "static", the same ones for
            every token, the most important of the corpus (neurons alone); or "random".
        seed: Decides what "random" draws.

    Yields:
        What the model does meanwhile.

    Raises:
        JomaError: The predictors are of another model, or an argument cannot be.
    """
    for name, share in (("mlp", mlp), ("heads", heads)):
        if share is not None and (isinstance(share, bool) or not 0 <= share < 1):
            raise JomaError(f"{name} must be a share from 0 to below 1, or None, got {share!r}")
    check_one_of("selection", selection, SELECTIONS)
    if heads is not None and selection not in OF_HEADS:
        raise JomaError(f"heads must be None with the selection {selection!r}, got {heads}")
    layers = sparse_layers(model)
    if any(hasattr(layer.block, _RUNNING) for layer in layers):
        raise JomaError("sparse must not be nested: the model is inside of a sparse block already")
    if predictors is not None:
        check_predictors(model, predictors, layers)
    elif selection in ("predicted", "magnitude", "static"):
        raise JomaError(
            f"predictors must be given for the selection {selection!r}: fit them with "
            "joma.inference.sparsify.fit, or choose oracle or random"
        )
    run, draw = SparseRun(), _Draw(whole_number("seed", seed, 0))
    with ExitStack() as undo:
        for layer in layers:
            setattr(layer.block, _RUNNING, True)
            undo.callback(delattr, layer.block, _RUNNING)
            if mlp is not None:
                _SparseMlp(layer, mlp, selection, predictors, draw, run).install(undo)
        if heads is not None:
            for before, layer in pairwise(layers):
                _sparse_heads(before, layer, heads, selection, predictors, draw, undo)
        yield run


def check_predictors(
    model: nn.Module, predictors: Predictors, layers: list[SparseLayer] | None = None
) -> None:
    """Raise JomaError unless predictors are of this very model.

    Args:
        model: The model.
        predictors: What is to be used with it.
        layers: What `sparse_layers` found in it, where that is known.
    """
    facts = predictors.facts
    layers = sparse_layers(model) if layers is None else layers
    neurons = tuple(layer.neurons for layer in layers)
    if (facts.width, facts.neurons) != (layers[0].width, neurons):
        raise JomaError(
            f"predictors must be of this model, a {type(model).__name__} of {len(layers)} layers, "
            f"width {layers[0].width} and {neurons[0]} neurons, but are of "
            f"{facts.source or 'another'}, {facts.layers} layers, width {facts.width} and "
            f"{facts.neurons[0]} neurons"
        )
    if facts.dtype != layers[0].dtype:
        raise JomaError(
            f"predictors must be fitted in the type the model has, {layers[0].dtype}, but were "
            f"fitted in {facts.dtype}: load the model in {facts.dtype}, or fit again"
        )
    if facts.fingerprint != model_fingerprint(model):
        raise JomaError(
            f"predictors must be of this model, but were fitted on other weights of the same "
            f"shape ({facts.source or facts.model_class}): fit again"
        )


def kept_of(total: int, sparsity: float) -> int:
    """Return how many of `total` neurons or heads are kept; at least one."""
    return max(1, round((1 - sparsity) * total))


def largest(scores_TN: Tensor, keep: int) -> Tensor:
    """Return the numbers of the `keep` largest scores of every token, (T, k).

    On a CPU they are in rising order, so that rows are read in the order they lie in memory.
    """
    index_Tk = scores_TN.topk(keep, sorted=False).indices
    return index_Tk.sort(-1).values if index_Tk.device.type == "cpu" else index_Tk


def rows_times(rows_Nd: Tensor, tokens_Td: Tensor, index_Tk: Tensor) -> Tensor:
    """Return the product of each token with its rows, (T, k): out[t, j] = rows[index[t, j]] · x[t].

    Args:
        rows_Nd: The matrix, its rows contiguous.
        tokens_Td: The tokens.
        index_Tk: Numbers of the rows of every token, int64.
    """
    tokens, kept = index_Tk.shape
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        tokens_Td.contiguous(),
        rows_Nd,
        index_Tk.reshape(-1),
        torch.arange(tokens) * kept,
        torch.arange(tokens * kept) // kept,
        _SUM,
    ).view(tokens, kept)


def times_rows(weights_Tk: Tensor, rows_Nd: Tensor, index_Tk: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, (T, d): out[t] = Σⱼ w[t, j] rows[index[t, j]].

    Args:
        weights_Tk: The weights.
        rows_Nd: The matrix, its rows contiguous.
        index_Tk: Numbers of the rows of every token, int64.
    """
    tokens, kept = index_Tk.shape
    starts = torch.arange(0, kept, _ROWS_AT_ONCE)
    begins = torch.arange(tokens).unsqueeze(1) * kept + starts
    sums = functional.embedding_bag(
        index_Tk.reshape(-1),
        rows_Nd,
        begins.reshape(-1),
        per_sample_weights=weights_Tk.reshape(-1),
        mode="sum",
    )
    return sums.view(tokens, len(starts), -1).sum(1)


class _Draw:
    """Random scores, the same for the same seed and the same calls."""

    def __init__(self, seed: int) -> None:
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def __call__(self, tokens: int, outputs: int, device: torch.device) -> Tensor:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return torch.rand(tokens, outputs, generator=self._generators[device], device=device)


class _SeenState:
    """The hidden state a predictor reads, kept from where it appears until its layer runs."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._state: Tensor | None = None

    def see(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Keep the input of a module; a forward pre-hook."""
        self._state = given[0] if given else named["hidden_states"]

    def scores(self) -> Tensor:
        """Return the predictor's scores of the tokens, (T, outputs)."""
        assert self._state is not None
        state, self._state = self._state, None
        return self._predictor(state.reshape(-1, state.shape[-1]))


def _replace(undo: ExitStack, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Give a module another forward until `undo` ends."""
    before = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]
    if before is None:
        undo.callback(delattr, module, "forward")
    else:
        undo.callback(setattr, module, "forward", before)


def _mask(index_Tk: Tensor, like: Tensor, outputs: int) -> Tensor:
    """Return ones at some places of every row and zeros elsewhere, (T, outputs)."""
    zeros = like.new_zeros(len(index_Tk), outputs)
    return zeros.scatter_(1, index_Tk, 1.0)


class _SparseMlp:
    """One MLP of a model, computed in part: its matrices pass k of N neurons on to each other."""

    def __init__(
        self,
        layer: SparseLayer,
        sparsity: float,
        selection: str,
        predictors: Predictors | None,
        draw: _Draw,
        run: SparseRun,
    ) -> None:
        weight, number = rows_of(layer.lower), layer.layer
        self._layer, self._selection, self._draw, self._run = layer, selection, draw, run
        self._keep = kept_of(layer.neurons, sparsity)
        self._mask: Tensor | None = None
        self._index: Tensor | None = None
        self._dense = {part: part.forward for part in (*layer.inputs, layer.down)}
        self._rows: dict[nn.Module, Tensor] = {}
        if selection in ("predicted", "static", "random") and weight.device.type == "cpu":
            self._rows = {part: rows_of(part).contiguous() for part in layer.inputs}
            self._rows[layer.down] = columns_of(layer.down).contiguous()
        self._seen: _SeenState | None = None
        if selection == "predicted" and predictors is not None:
            self._seen = _SeenState(predictors.mlp[number].to(weight.device))
        elif selection == "static" and predictors is not None:
            importance = predictors.importance[number].to(weight.device)
            self._fixed = largest(importance.unsqueeze(0), self._keep)
        elif selection == "magnitude" and predictors is not None:
            self._threshold = predictors.threshold(number, sparsity)
        elif selection == "oracle":
            self._scale = layer.neuron_scale()

    def install(self, undo: ExitStack) -> None:
        """Take the place of the layer's matrices until `undo` ends."""
        layer = self._layer
        if self._seen is not None:
            see = self._seen.see
            undo.enter_context(layer.block.register_forward_pre_hook(see, with_kwargs=True))
        _replace(undo, layer.lower, self._lower)
        if layer.up is not None:
            up = layer.up
            _replace(undo, up, lambda tokens: self._product(up, tokens))
        _replace(undo, layer.down, self._down)

    def _lower(self, tokens: Tensor) -> Tensor:
        layer, count = self._layer, tokens.numel() // tokens.shape[-1]
        self._run.tokens += count
        self._index = self._mask = None
        if self._selection == "magnitude":
            gate = self._dense[layer.lower](tokens)
            magnitude = layer.activation(gate).abs().float()
            # Zeros add nothing: they are left out where most neurons, and so the threshold, are 0.
            self._mask = (magnitude >= self._threshold) & (magnitude > 0)
            self._run._kept += self._mask.sum(dtype=torch.float64) / layer.neurons
            return gate
        self._run._kept += count * self._keep / layer.neurons
        if self._selection != "oracle":
            index = self._chosen(count, tokens)
            if self._rows and not torch.is_grad_enabled() and count * self._keep < layer.neurons:
                self._index = index
                self._run.gathered += count
            else:
                self._mask = _mask(index, tokens, layer.neurons)
        return self._product(layer.lower, tokens)

    def _chosen(self, count: int, tokens: Tensor) -> Tensor:
        """Return the numbers of the neurons to compute, (T, k)."""
        if self._selection == "static":
            return self._fixed.expand(count, -1)
        if self._seen is not None:
            return largest(self._seen.scores(), self._keep)
        return largest(self._draw(count, self._layer.neurons, tokens.device), self._keep)

    def _product(self, part: nn.Module, tokens: Tensor) -> Tensor:
        """Return what a matrix makes of the MLP's input: all neurons, or the chosen ones."""
        if self._index is None:
            return self._dense[part](tokens)
        made = rows_times(self._rows[part], tokens.reshape(-1, tokens.shape[-1]), self._index)
        if part.bias is not None:
            made = made + part.bias[self._index]  # type: ignore[index]
        return made.view(*tokens.shape[:-1], self._keep)

    def _down(self, hidden: Tensor) -> Tensor:
        down = self._layer.down
        if self._index is not None:
            made = times_rows(hidden.reshape(-1, self._keep), self._rows[down], self._index)
            if down.bias is not None:
                made = made + down.bias  # type: ignore[operator]
            return made.view(*hidden.shape[:-1], -1)
        if self._selection == "oracle":
            scores = (hidden.float().abs() * self._scale).reshape(-1, self._layer.neurons)
            self._mask = _mask(largest(scores, self._keep), hidden, scores.shape[1])
        assert self._mask is not None
        return self._dense[down](hidden * self._mask.view_as(hidden))


def _sparse_heads(
    before: SparseLayer,
    layer: SparseLayer,
    sparsity: float,
    selection: str,
    predictors: Predictors | None,
    draw: _Draw,
    undo: ExitStack,
) -> None:
    """Let some heads of one layer add nothing to a token until `undo` ends."""
    if layer.output is None:
        raise JomaError(f"heads must be None: those of layer {layer.layer} were not found")
    keep, seen, gram = kept_of(layer.heads, sparsity), None, None
    if selection == "predicted" and predictors is not None:
        if layer.layer not in predictors.heads:
            raise JomaError(
                "heads must be None with these predictors, which were fitted for MLPs alone; fit "
                "again with --heads-sparsity"
            )
        seen = _SeenState(predictors.heads[layer.layer].to(rows_of(layer.output).device))
        undo.enter_context(before.lower.register_forward_pre_hook(seen.see, with_kwargs=True))
    elif selection == "oracle":
        gram = layer.head_gram()

    def masked(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        flat = given[0].reshape(-1, given[0].shape[-1])
        if gram is not None:
            scores = layer.head_scores(flat, gram)
        else:
            scores = draw(len(flat), layer.heads, flat.device) if seen is None else seen.scores()
        mask = _mask(largest(scores, keep), flat, layer.heads)
        mask = mask.repeat_interleave(flat.shape[1] // layer.heads, 1)
        return ((flat * mask).view_as(given[0]),)

    undo.enter_context(layer.output.register_forward_pre_hook(masked))
