"""Run a model with some neurons and heads left out for each token, and undo that."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from joma.common.checks import check_one_of, whole_number
from joma.errors import JomaError
from joma.inference.sparsify._fingerprint import model_fingerprint
from joma.inference.sparsify._layers import SparseLayer, columns_of, rows_of, sparse_layers
from joma.inference.sparsify._predictors import Predictor, Predictors
from joma.inference.sparsify._products import largest, rows_times, times_rows

SELECTIONS = ("predicted", "oracle", "magnitude", "static", "random")
"""Ways to choose neurons: the predictors', and four controls."""

_OF_HEADS = ("predicted", "oracle", "random")
_FITTED = ("predicted", "magnitude", "static")
_RUNNING = "_joma_sparse"


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
    gather: bool | None = None,
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
        gather: Whether the rows of the chosen neurons are gathered, or all are computed and the
            others set to zero, which gives the same numbers up to rounding. None gathers where it
            reads less: where tokens × the share that is kept is below 1. With gradients enabled
            nothing is gathered.
        seed: Decides what "random" draws.

    Yields:
        What the model does meanwhile.

    Raises:
        JomaError: The predictors are of another model, or an argument cannot be.
    """
    for name, share in (("mlp", mlp), ("heads", heads)):
        _check_share(name, share)
    check_one_of("selection", selection, SELECTIONS)
    if heads is not None and selection not in _OF_HEADS:
        raise JomaError(f"heads must be None with the selection {selection!r}, got {heads}")
    if gather is not None and not isinstance(gather, bool):
        raise JomaError(f"gather must be True, False or None, got {gather!r}")
    layers = sparse_layers(model)
    if any(hasattr(layer.block, _RUNNING) for layer in layers):
        raise JomaError("sparse must not be nested: the model is inside of a sparse block already")
    if predictors is not None:
        check_predictors(model, predictors, layers)
    elif selection in _FITTED:
        raise JomaError(
            f"predictors must be given for the selection {selection!r}: fit them with "
            "joma.inference.sparsify.fit, or choose oracle or random"
        )
    run = SparseRun()
    draw = _Draw(whole_number("seed", seed, 0))
    with ExitStack() as undo:
        for layer in layers:
            setattr(layer.block, _RUNNING, True)
            undo.callback(delattr, layer.block, _RUNNING)
            if mlp is not None:
                one = _SparseMlp(layer, mlp, selection, predictors, gather, draw, run)
                one.install(undo)
        if heads is not None:
            for before, layer in pairwise(layers):
                _SparseHeads(before, layer, heads, selection, predictors, gather, draw).install(
                    undo
                )
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
    dtype = dtype_name(layers[0])
    neurons = tuple(layer.neurons for layer in layers)
    name = type(model).__name__
    if (facts.width, facts.neurons) != (layers[0].width, neurons):
        raise JomaError(
            f"predictors must be of this model, a {name} of {len(layers)} layers, width "
            f"{layers[0].width} and {neurons[0]} neurons, but are of {facts.source or 'another'}, "
            f"{facts.layers} layers, width {facts.width} and {facts.neurons[0]} neurons"
        )
    if facts.dtype != dtype:
        raise JomaError(
            f"predictors must be fitted in the type the model has, {dtype}, but were fitted in "
            f"{facts.dtype}: load the model in {facts.dtype}, or fit again"
        )
    if facts.fingerprint != model_fingerprint(model):
        raise JomaError(
            f"predictors must be of this model, but were fitted on other weights of the same "
            f"shape ({facts.source or facts.model_class}): fit again"
        )


def dtype_name(layer: SparseLayer) -> str:
    """Return the type a layer computes in, "float32"."""
    return str(rows_of(layer.lower).dtype).removeprefix("torch.")


def kept_of(total: int, sparsity: float) -> int:
    """Return how many of `total` neurons or heads are kept; at least one."""
    return max(1, round((1 - sparsity) * total))


def _check_share(name: str, share: Any) -> None:
    if share is None:
        return
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise JomaError(f"{name} must be a share from 0 to below 1, or None, got {share!r}")


class _Draw:
    """Random scores, the same for the same seed and the same calls."""

    def __init__(self, seed: int) -> None:
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    def __call__(self, tokens: int, outputs: int, device: torch.device) -> Tensor:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return torch.rand(tokens, outputs, generator=self._generators[device], device=device)


def _gathers(tokens: int, share: float, gather: bool | None) -> bool:
    if torch.is_grad_enabled():
        return False
    return tokens * share < 1 if gather is None else gather


def _replace(undo: ExitStack, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Give a module another forward until `undo` ends."""
    own = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]

    def restore() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own  # type: ignore[method-assign]

    undo.callback(restore)


def _mask(index_Tk: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    """Return ones at some places of every row and zeros elsewhere, (T, outputs)."""
    zeros = torch.zeros(len(index_Tk), outputs, dtype=dtype, device=index_Tk.device)
    return zeros.scatter_(1, index_Tk, 1.0)


class _SparseMlp:
    """One MLP of a model, computed in part: its matrices pass k of N neurons on to each other."""

    def __init__(
        self,
        layer: SparseLayer,
        sparsity: float,
        selection: str,
        predictors: Predictors | None,
        gather: bool | None,
        draw: _Draw,
        run: SparseRun,
    ) -> None:
        weight = rows_of(layer.lower)
        self.layer, self.selection, self.gather = layer, selection, gather
        self.keep, self.draw, self.run = kept_of(layer.neurons, sparsity), draw, run
        self.state = self.mask = self.index = None
        self.predictor: Predictor | None = None
        self.dense = {part: part.forward for part in (*layer.inputs, layer.down)}
        self.rows: dict[nn.Module, Tensor] = {}
        if selection in ("predicted", "static", "random") and gather is not False:
            self.rows = {part: rows_of(part).contiguous() for part in layer.inputs}
            self.rows[layer.down] = columns_of(layer.down).contiguous()
        if selection == "predicted":
            assert predictors is not None
            self.predictor = predictors.mlp[layer.layer].to(weight.device)
        elif selection == "static":
            assert predictors is not None
            importance = predictors.importance[layer.layer].to(weight.device)
            self.fixed = largest(importance.unsqueeze(0), self.keep)
        elif selection == "magnitude":
            assert predictors is not None
            self.threshold = predictors.threshold(layer.layer, sparsity)
        elif selection == "oracle":
            self.scale = layer.neuron_scale()

    def install(self, undo: ExitStack) -> None:
        """Take the place of the layer's matrices until `undo` ends."""
        if self.predictor is not None:
            enter = undo.enter_context
            enter(self.layer.block.register_forward_pre_hook(self._see_state, with_kwargs=True))
        _replace(undo, self.layer.lower, self._lower)
        if self.layer.up is not None:
            _replace(undo, self.layer.up, self._up)
        _replace(undo, self.layer.down, self._down)

    def _see_state(self, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.state = given[0] if given else named["hidden_states"]

    def _lower(self, tokens: Tensor) -> Tensor:
        count = tokens.numel() // tokens.shape[-1]
        self.run.tokens += count
        self.index = self.mask = None
        if self.selection == "oracle":
            return self.dense[self.layer.lower](tokens)
        if self.selection == "magnitude":
            gate = self.dense[self.layer.lower](tokens)
            magnitude = self.layer.activation(gate).abs().float()
            # Zeros add nothing: they are left out where most neurons, and so the threshold, are 0.
            self.mask = (magnitude >= self.threshold) & (magnitude > 0)
            self._count(self.mask)
            return gate
        index = self._chosen(count, tokens)
        self.run._kept += count * self.keep / self.layer.neurons
        if _gathers(count, self.keep / self.layer.neurons, self.gather):
            self.run.gathered += count
            self.index = index
            return self._gathered(self.layer.lower, tokens)
        self.mask = _mask(index, self.layer.neurons, tokens.dtype)
        return self.dense[self.layer.lower](tokens)

    def _chosen(self, count: int, tokens: Tensor) -> Tensor:
        """Return the numbers of the neurons to compute, (T, k)."""
        if self.selection == "static":
            return self.fixed.expand(count, -1)
        if self.selection == "random":
            scores = self.draw(count, self.layer.neurons, tokens.device)
        else:
            assert self.predictor is not None
            assert self.state is not None
            scores = self.predictor(self.state.reshape(-1, self.state.shape[-1]))
            self.state = None
        return largest(scores, self.keep)

    def _up(self, tokens: Tensor) -> Tensor:
        assert self.layer.up is not None
        if self.index is not None:
            return self._gathered(self.layer.up, tokens)
        return self.dense[self.layer.up](tokens)

    def _gathered(self, part: nn.Module, tokens: Tensor) -> Tensor:
        assert self.index is not None
        made = rows_times(self.rows[part], tokens.reshape(-1, tokens.shape[-1]), self.index)
        if part.bias is not None:
            made = made + part.bias[self.index]  # type: ignore[index]
        return made.view(*tokens.shape[:-1], self.keep)

    def _down(self, hidden: Tensor) -> Tensor:
        down = self.layer.down
        if self.index is not None:
            made = times_rows(hidden.reshape(-1, self.keep), self.rows[down], self.index)
            if down.bias is not None:
                made = made + down.bias  # type: ignore[operator]
            return made.view(*hidden.shape[:-1], -1)
        if self.selection == "oracle":
            scores = (hidden.float().abs() * self.scale).reshape(-1, self.layer.neurons)
            self.mask = _mask(largest(scores, self.keep), scores.shape[1], hidden.dtype)
            self.run._kept += len(scores) * self.keep / self.layer.neurons
        assert self.mask is not None
        return self.dense[down](hidden * self.mask.view_as(hidden))

    def _count(self, mask: Tensor) -> None:
        self.run._kept = self.run._kept + mask.sum(dtype=torch.float64) / self.layer.neurons


class _SparseHeads:
    """The heads of one layer, of which some add nothing to a token."""

    def __init__(
        self,
        before: SparseLayer,
        layer: SparseLayer,
        sparsity: float,
        selection: str,
        predictors: Predictors | None,
        gather: bool | None,
        draw: _Draw,
    ) -> None:
        if layer.output is None:
            raise JomaError(f"heads must be None: those of layer {layer.layer} were not found")
        self.before, self.layer, self.output = before, layer, layer.output
        self.keep, self.selection = kept_of(layer.heads, sparsity), selection
        self.gather, self.draw, self.state = gather, draw, None
        self.dense = layer.output.forward
        self.rows = columns_of(layer.output).contiguous() if gather is not False else None
        self.predictor: Predictor | None = None
        if selection == "predicted":
            assert predictors is not None
            if layer.layer not in predictors.heads:
                raise JomaError(
                    "heads must be None with these predictors, which were fitted for MLPs alone; "
                    "fit again with --heads-sparsity"
                )
            self.predictor = predictors.heads[layer.layer].to(self.output.weight.device)
        elif selection == "oracle":
            self.gram = layer.head_gram()

    def install(self, undo: ExitStack) -> None:
        """Take the place of the output projection until `undo` ends."""
        undo.enter_context(self.before.lower.register_forward_pre_hook(self._see_state))
        _replace(undo, self.output, self._forward)

    def _see_state(self, lower: nn.Module, given: tuple[Any, ...]) -> None:
        self.state = given[0]

    def _forward(self, found: Tensor) -> Tensor:
        flat = found.reshape(-1, found.shape[-1])
        index = self._chosen(flat)
        size = flat.shape[1] // self.layer.heads
        if _gathers(len(flat), self.keep / self.layer.heads, self.gather):
            assert self.rows is not None
            places = torch.arange(size, device=flat.device)
            places = (index.unsqueeze(-1) * size + places).flatten(1)
            made = times_rows(flat.gather(1, places), self.rows, places)
            if self.output.bias is not None:
                made = made + self.output.bias  # type: ignore[operator]
            return made.view(*found.shape[:-1], -1)
        mask = _mask(index, self.layer.heads, flat.dtype).repeat_interleave(size, 1)
        return self.dense((flat * mask).view_as(found))

    def _chosen(self, flat: Tensor) -> Tensor:
        if self.selection == "random":
            scores = self.draw(len(flat), self.layer.heads, flat.device)
        elif self.selection == "oracle":
            scores = self.layer.head_scores(flat, self.gram)
        else:
            assert self.predictor is not None
            assert self.state is not None
            scores = self.predictor(self.state.reshape(-1, self.state.shape[-1]))
            self.state = None
        return largest(scores, self.keep)
