"""One reading of a text by a model: what is seen of attention, MLPs and the residual stream."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from joma.models import Found
from joma.probes._inputs import Reader
from joma.probes._measurement import LAST, Measurement, Progress
from joma.probes._reading_parts import PartsReading
from joma.probes.attention import AttentionAccumulator
from joma.probes.tap import AttentionCall, AttentionMap, watch_attention

_OF_ATTENTION = ("entropy", "first", "last", "effective")


@dataclass(eq=False)
class _Attention:
    """What was seen of one attention: one module in one pass."""

    name: str
    kind: str
    layer: int
    rows: AttentionAccumulator = field(default_factory=AttentionAccumulator)


class Reading:
    """One reading of a text, and what was seen of every layer."""

    def __init__(
        self,
        model: nn.Module,
        parts: Found | None,
        metrics: Sequence[str],
        sample: int,
        seed: int,
    ) -> None:
        self._model, self._metrics = model, metrics
        self._attention: dict[str, _Attention] = {}
        self._parts = PartsReading(model, parts, metrics, sample, seed)

    def run(
        self,
        reader: Reader,
        at_once: int | None,
        attention: AttentionMap | None,
        progress: Progress,
    ) -> None:
        """Read everything."""
        device = next(self._model.parameters()).device
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(_evaluating(self._model))
            if any(metric.startswith("attention") for metric in self._metrics):
                stack.enter_context(watch_attention(self._model, self._see, names=attention))
            stack.enter_context(self._parts.hooked())
            for batch in reader.batches(device, at_once):
                progress("read the text", batch.start, len(reader))
                self._parts.begin(batch.rows.to(device), batch.tokens.to(device), batch.places)
                batch.run(self._model, device)

    def measurements(self) -> list[Measurement]:
        """What was seen."""
        found: list[Measurement] = []
        for attention in self._attention.values():  # in the order of the forward pass
            found += self._of_attention(attention)
        return found + self._parts.measurements()

    def _see(self, call: AttentionCall) -> None:
        statistics = call.statistics(
            first=1 if "attention_first" in self._metrics else None,
            last=LAST if "attention_last" in self._metrics else None,
        )
        of = self._attention.setdefault(call.name, _Attention(call.name, call.kind, call.layer))
        of.rows.update(statistics)

    def _of_attention(self, of: _Attention) -> list[Measurement]:
        means, found = of.rows.compute(), []
        for name in _OF_ATTENTION:
            metric = f"attention_{name}"
            if metric not in self._metrics:
                continue
            heads = [None, *range(len(means.rows))]
            values = [getattr(means.layer, name).item(), *getattr(means, name).tolist()]
            found += [
                Measurement(metric, of.name, of.layer, head, value, kind=of.kind)
                for head, value in zip(heads, values, strict=True)
            ]
        return found


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every part as it was after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
