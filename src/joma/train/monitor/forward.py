"""What a forward pass over the inputs shows: attention, MLP activity, and Theorem 1."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from joma.common.float32 import float32_products
from joma.errors import JomaError
from joma.probes import AttentionAccumulator, AttentionCall, AttentionMap, watch_attention
from joma.probes.metrics import Metric, collected
from joma.train.monitor.faults import Faults
from joma.train.monitor.inputs import MeasurementInputs
from joma.train.monitor.parts import Parts, Tensors, module_named
from joma.train.monitor.record import Row

KEYS = 128
"""Tokens of the first sequence on which Theorem 1 is measured."""
_STATE = tuple(f"theorem1.{name}" for name in ("first", "predicted", "own", "attention"))


class Theorem1:
    """How far a layer is from Theorem 1 for softmax attention, the joint dynamics of JoMA.

    The theorem says that logits grow with the MLP's weights: dz_l is proportional to
    d Σ_k v_lk² − b̄_l d Σ_k ‖v_k‖², where v_lk = w_k·u_l is how hidden node k, with weights w_k of
    the MLP's lower layer, reads token l, and b̄ the attention. On a real layer u_l is what enters
    the block at position l of the first sequence (128 tokens at most), z the scaled scores of
    a head's query with the keys it sees, b̄ its attention row, between two measurements the mean of
    both; positions that the same enters are copies of one token. What z should have grown by is
    added up from one to the next. Since the learning rates of the two sides are not known, the two
    growths since the first one are compared by their correlation over the keys, averaged over all
    query rows that see 8 keys or more and all heads; the residual is 1 − that mean: 0 where the law
    holds, 1 where the two have nothing to do with each other, 2 where they are opposite.

    The theorem is of gradient descent and one query; its value matrix is the identity, its
    embedding orthogonal, there is no norm between its attention and MLP, and what is learned goes
    through the MLP alone. A real layer breaks all of these, and the residual says how much that
    matters.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._inputs_TD: Tensor | None = None
        self._scores_HTS: Tensor | None = None
        self._seen_HTS: Tensor | None = None
        self._stream: Tensor | None = None
        self._first_HTS: Tensor | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        self._predicted_HTS: Tensor | None = None
        self._module = ""

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what was added up so far, by name."""
        if self._last is None or self._first_HTS is None or self._predicted_HTS is None:
            return
        tensors = (self._first_HTS, self._predicted_HTS, *self._last)
        yield from zip(_STATE, tensors, strict=True)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave; what else is in it is left alone."""
        if all(name in state for name in _STATE):
            first, predicted, own, attention = (state[name].clone() for name in _STATE)
            self._first_HTS, self._predicted_HTS, self._last = first, predicted, (own, attention)

    @contextmanager
    def watching(self, model: nn.Module, parts: Parts) -> Iterator[None]:
        """Keep what enters the block."""
        if self.layer not in parts.blocks:
            raise JomaError(
                f"theorem1 must be a layer whose block and MLP are known, one of "
                f"{sorted(parts.blocks)}, got {self.layer}"
            )
        self._inputs_TD = self._scores_HTS = self._stream = None
        module = module_named(model, parts.blocks[self.layer])

        def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            stream = next(x for x in given if isinstance(x, Tensor) and x.is_floating_point())
            if self._inputs_TD is None and stream.ndim == 3 and not stream.is_nested:
                self._stream = stream

        handle = module.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            self._stream = None  # an activation of the model, large

    def see(self, call: AttentionCall) -> None:
        """Keep the scores of the first sequence."""
        stream = self._stream
        if self._scores_HTS is not None or stream is None:
            return
        self._module = call.module
        query_HTD, key_HSD = (x[0].float()[:, :KEYS] for x in (call.query, call.key))
        key_HSD = key_HSD.repeat_interleave(len(query_HTD) // len(key_HSD), 0)
        if call.scores is not None:
            scores_HTS = call.scores[0].float()[:, :KEYS, :KEYS]
        else:
            scale = query_HTD.shape[-1] ** -0.5 if call.scale is None else call.scale
            with _in_float32(query_HTD.device):  # growth is a small difference
                scores_HTS = scale * query_HTD @ key_HSD.mT
        self._scores_HTS, self._seen_HTS = scores_HTS, seen_keys(call).expand_as(scores_HTS)
        # (B, T, d), or (T, B, d) where sequences come second
        batch_first = stream.shape[0] == call.query.shape[0] and (
            stream.shape[1] == call.query.shape[2]
        )
        inputs_TD = stream[0] if batch_first else stream[:, 0]
        self._inputs_TD = inputs_TD[:KEYS].float()

    def rows(self, lower_KD: Tensor) -> list[Row]:
        """Return the residual, from the second measurement on."""
        scores_HTS, seen_HTS = self._scores_HTS, self._seen_HTS
        if self._inputs_TD is None or scores_HTS is None or seen_HTS is None:
            return []
        with _in_float32(scores_HTS.device):
            return self._residual(scores_HTS, seen_HTS, self._inputs_TD, lower_KD.float())

    def _residual(
        self, scores_HTS: Tensor, seen_HTS: Tensor, inputs_TD: Tensor, lower_KD: Tensor
    ) -> list[Row]:
        own_S = (inputs_TD @ lower_KD.mT).square().sum(-1)
        attention_HTS = scores_HTS.masked_fill(~seen_HTS, -torch.inf).softmax(-1)
        before, self._last = self._last, (own_S, attention_HTS)
        first_HTS = self._first_HTS
        if before is None or first_HTS is None or first_HTS.shape != scores_HTS.shape:
            self._first_HTS, self._predicted_HTS = scores_HTS, torch.zeros_like(scores_HTS)
            return []
        assert self._predicted_HTS is not None, "begun with the first scores"
        mean_HTS = (before[1] + attention_HTS) / 2
        self._predicted_HTS += predicted_growth(
            own_S - before[0], mean_HTS, seen_HTS, same_rows(inputs_TD)
        )
        value = residual(scores_HTS - first_HTS, self._predicted_HTS, seen_HTS)
        return [] if value is None else [Row("theorem1_residual", value, self._module, self.layer)]


@contextmanager
def _in_float32(device: torch.device) -> Iterator[None]:
    """Products of float32 as they are, in a model that may run in autocast."""
    with torch.autocast(device.type, enabled=False), float32_products("ieee"):
        yield


def seen_keys(call: AttentionCall) -> Tensor:
    """Return which keys the rows of the first sequence see, (H or 1, T, S), bool.

    Query t stands at place t + S − T among all S keys; a window reaches to both sides of it.
    """
    T, S = (min(x.shape[2], KEYS) for x in (call.query, call.key))
    offset = call.key.shape[2] - call.query.shape[2]
    seen = torch.ones(1, T, S, dtype=torch.bool, device=call.query.device)
    if call.causal:
        seen = seen.tril(offset)
    if call.window is not None:
        seen = seen.triu(offset + 1 - call.window).tril(offset + call.window - 1)
    if call.padding is not None:
        seen = seen & call.padding[0, :S]
    if call.scores is not None:
        seen = seen & (call.scores[0, :, :T, :S] > -5e3)  # as models hide keys
    if call.mask is not None:
        mask = call.mask[(None,) * (4 - call.mask.ndim)][0, :, :T, :S]
        seen = seen & (mask if mask.dtype == torch.bool else mask > -1e4)
    return seen


def predicted_growth(
    grown_S: Tensor, attention_HTS: Tensor, seen_HTS: Tensor, same_SS: Tensor
) -> Tensor:
    """Growth of the scores of every query with the keys it sees (Theorem 1, softmax), at factor 1.

    That is, dz of Eqn 17, not the growth of Eqn 18's right side, for which b̄ must not move at all:
    the larger Σ_k ‖v_k‖² is to begin with, the less that can be had.

    Args:
        grown_S: by how much Σ_k v_lk² of each key has grown.
        attention_HTS: of the queries meanwhile, 0 on keys they do not see.
        seen_HTS: which keys they see.
        same_SS: which keys are the same token: b̄ is of all its copies, which count once.
    """
    same_SS = same_SS.to(attention_HTS.dtype)
    copies_HTS = (seen_HTS.to(same_SS.dtype) @ same_SS).clamp(min=1)
    total_HT1 = (grown_S * seen_HTS / copies_HTS).sum(-1, keepdim=True)
    return grown_S - total_HT1 * (attention_HTS @ same_SS)


def same_rows(inputs_TD: Tensor) -> Tensor:
    """Which rows of a matrix are the same, (T, T)."""
    _, number_T = inputs_TD.unique(dim=0, return_inverse=True)
    return number_T.unsqueeze(-1) == number_T


def residual(grown_HTS: Tensor, predicted_HTS: Tensor, seen_HTS: Tensor) -> float | None:
    """1 − mean correlation over seen keys, of rows that see 8 or more; None where nothing grew."""
    count_HT1 = seen_HTS.sum(-1, keepdim=True)

    def centred(values: Tensor) -> Tensor:
        values = values.double().where(seen_HTS, 0)
        return (values - values.sum(-1, keepdim=True) / count_HT1).where(seen_HTS, 0)

    left, right = centred(grown_HTS), centred(predicted_HTS)
    sizes = torch.linalg.vector_norm(left, dim=-1) * torch.linalg.vector_norm(right, dim=-1)
    correlation_HT = (left * right).sum(-1) / sizes
    counted = (sizes > 0) & (count_HT1.squeeze(-1) >= 8)
    if not bool(counted.any()):
        return None
    return 1 - float(correlation_HT[counted].mean())


@dataclass(eq=False)
class _Attention:
    """What was seen of one attention: of a module, in one of its passes."""

    layer: int
    kind: str
    real: AttentionAccumulator = field(default_factory=AttentionAccumulator)
    even: AttentionAccumulator = field(default_factory=AttentionAccumulator)


class ForwardPasses:
    """Forward passes over the same inputs, measurement after measurement.

    What fails in here is noted and ends no forward pass: with sharded weights the other processes
    would wait for it.

    Args:
        metrics: The metrics to measure; those of attention, and of Theorem 1, are measured here.
        attention: Where queries and keys are made, for a model that does not say it itself.
        theorem1: Layer on which the residual of Theorem 1 is measured, or None.
        faults: Where failures are noted.

    Attributes:
        theorem1: What measures Theorem 1, or None.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        attention: AttentionMap | None,
        theorem1: int | None,
        faults: Faults,
    ) -> None:
        self._metrics = [metric for metric in metrics if metric.needs == "attention"]
        self._names, self._faults = attention, faults
        of_layer = [metric for metric in metrics if metric.needs == "theorem1"]
        self.theorem1 = Theorem1(theorem1) if of_layer and theorem1 is not None else None
        self._even: dict[str, float] = {}

    def attend(
        self, model: nn.Module, inputs: MeasurementInputs, parts: Parts, lower: Tensor | None
    ) -> list[Row]:
        """Run the model and return what was seen of its attention and of Theorem 1.

        Args:
            model: The model, uncompiled, in evaluation mode.
            inputs: What it is called with.
            parts: Where its blocks are.
            lower: The lower MLP weight of the layer on which Theorem 1 is measured, (K, d).
        """
        seen: dict[str, _Attention] = {}
        theorem = self.theorem1 if lower is not None else None

        def see(call: AttentionCall) -> None:
            if self._faults.is_off("attention", call.name):
                return
            try:
                one = seen.setdefault(call.name, _Attention(call.layer, call.kind))
                one.real.update(call.statistics(**collected(self._metrics)))  # type: ignore[arg-type]
                if call.name not in self._even:
                    one.even.update(call.uniform().statistics())
                if theorem is not None and call.layer == theorem.layer:
                    theorem.see(call)
            except Exception as error:
                seen.pop(call.name, None)
                self._faults.note("attention", error, module=call.name)

        with ExitStack() as stack:
            if theorem is not None:
                stack.enter_context(theorem.watching(model, parts))
            stack.enter_context(watch_attention(model, see, names=self._names))
            inputs.run(model)
        rows: list[Row] = []
        for key, one in seen.items():
            rows += self._faults.tried("attention", lambda k=key, o=one: self._rows(k, o)) or []
        if theorem is not None and lower is not None:
            rows += self._faults.tried("theorem1_residual", lambda: theorem.rows(lower)) or []
        return rows

    def _rows(self, key: str, one: _Attention) -> list[Row]:
        if key not in self._even:
            self._even[key] = float(one.even.compute().layer.entropy)
        means = one.real.compute()
        where: dict[str, Any] = {"module": key, "layer": one.layer, "kind": one.kind}
        rows = [Row("attention_uniform", self._even[key], **where)]
        for metric in self._metrics:
            assert metric.measure is not None, "of attention"
            rows.append(Row(metric.name, float(metric.measure(means.layer)), **where))
            values = metric.measure(means).tolist()
            rows += [Row(metric.name, v, **where, head=head) for head, v in enumerate(values)]
        return rows


@contextmanager
def watching_activity(
    tensors: Tensors, downs: Mapping[str, int | None], metrics: Sequence[Metric], faults: Faults
) -> Iterator[list[Row]]:
    """Yield a list that holds, when the block ends, what is measured of every MLP's activations.

    Args:
        tensors: The model's modules by path.
        downs: By path of an MLP's second linear map, whose input is measured, the layer.
        metrics: The metrics of activations.
        faults: Where failures are noted.
    """
    sums: dict[tuple[str, str], Any] = {}
    rows: list[Row] = []

    def watch(metric: Metric, path: str) -> Callable[..., None]:
        key = metric.name, path

        def update(_: nn.Module, args: tuple[Any, ...]) -> None:
            assert metric.streamed is not None, "monitored"
            try:
                hidden = args[0].detach().flatten(0, -2).float()
                sums.setdefault(key, metric.streamed()).update(hidden)
            except Exception as error:
                sums.pop(key, None)
                faults.note(metric.name, error, module=path)

        return update

    with ExitStack() as stack:
        for path, metric in product(downs, metrics):
            module = tensors.module(path)
            if module is not None and not faults.is_off(metric.name, path):
                hook = module.register_forward_pre_hook(watch(metric, path))
                stack.callback(hook.remove)
        yield rows
    for (name, path), one in sums.items():
        rows.append(Row(name, one.compute(), path, downs[path]))
