"""One reading of a text by a model: what is seen of attention, MLPs and the residual stream."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from joma.errors import JomaError
from joma.models.architectures import Architecture, module_path, number_of_layers
from joma.probes._inputs import Reader
from joma.probes._measurement import (
    LAST,
    TOKENS_LOOKED_AT,
    VECTORS_COMPARED,
    Measurement,
    Progress,
)
from joma.probes.activations import ActivationStatistics, ActivationStatisticsAccumulator
from joma.probes.attention import AttentionAccumulator
from joma.probes.embedding import EmbeddingOverlapAccumulator
from joma.probes.watching import AttentionCall, AttentionMap, watch_attention

_OF_ATTENTION = ("entropy", "first", "last", "effective")
_TOP = {0.01: "mlp_top1", 0.1: "mlp_top10"}


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
        architecture: Architecture | None,
        metrics: Sequence[str],
        seed: int,
    ) -> None:
        self._model, self._architecture, self._metrics = model, architecture, metrics
        self._attention: dict[str, _Attention] = {}
        self._modules: dict[str, dict[int, str]] = defaultdict(dict)
        top = tuple(share for share, name in _TOP.items() if name in metrics)
        self._mlp = defaultdict[int, Any](lambda: ActivationStatisticsAccumulator(top=top))
        self._residual = defaultdict[int, Any](
            lambda: EmbeddingOverlapAccumulator(keep=VECTORS_COMPARED, seed=seed)
        )
        self._rows = self._tokens = torch.empty(0, dtype=torch.long)
        self._places = 0

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
            stack.enter_context(self._hooked())
            for batch in reader.batches(device, at_once):
                progress("read the text", batch.start, len(reader))
                self._rows, self._tokens = batch.rows.to(device), batch.tokens.to(device)
                self._places = batch.places
                batch.run(self._model, device)

    def measurements(self) -> list[Measurement]:
        """What was seen."""
        found: list[Measurement] = []
        for attention in self._attention.values():  # in the order of the forward pass
            found += self._of_attention(attention)
        for layer, mlp in sorted(self._mlp.items()):
            found += self._of_mlp(layer, mlp.compute())
        for layer, residual in sorted(self._residual.items()):
            module = self._modules["residual"][layer]
            try:
                overlap = residual.compute().mean
            except ValueError as error:
                raise JomaError(
                    "residual_overlap needs a text with two different tokens at least; leave it "
                    "out of the metrics"
                ) from error
            found.append(Measurement("residual_overlap", module, layer, None, overlap))
        return found

    def _see(self, call: AttentionCall) -> None:
        statistics = call.statistics(
            first=1 if "attention_first" in self._metrics else None,
            last=LAST if "attention_last" in self._metrics else None,
        )
        of = self._attention.setdefault(call.name, _Attention(call.name, call.kind, call.layer))
        of.rows.update(statistics)

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        architecture = self._architecture
        wanted = {metric.partition("_")[0] for metric in self._metrics} & {"mlp", "residual"}
        if not wanted:
            yield
            return
        assert architecture is not None, "`probe` asks for it"
        names = [name for name, _ in self._model.named_parameters(remove_duplicate=False)]
        handles = []
        try:
            for layer in range(number_of_layers(names, architecture)):
                if "mlp" in wanted:
                    module = self._module("mlp", architecture.mlp_down, layer)
                    handles.append(module.register_forward_pre_hook(self._mlp_hook(layer)))
                if "residual" in wanted:
                    module = self._module("residual", architecture.layer, layer)
                    handles.append(module.register_forward_hook(self._residual_hook(layer)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _module(self, what: str, path: str, layer: int) -> nn.Module:
        name = module_path(self._model, path, layer, architecture=self._architecture)
        self._modules[what][layer] = name
        return self._model.get_submodule(name)

    def _mlp_hook(self, layer: int) -> Callable[..., None]:
        def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
            at = self._rows if len(hidden) == self._places else slice(TOKENS_LOOKED_AT)
            self._mlp[layer].update(hidden[at])

        return look

    def _residual_hook(self, layer: int) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            stream = output if isinstance(output, Tensor) else output[0]
            rows = stream.reshape(-1, stream.shape[-1])
            if len(rows) == self._places:  # else it is not known which tokens these are
                self._residual[layer].update(rows[self._rows], self._tokens)

        return look

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

    def _of_mlp(self, layer: int, of: ActivationStatistics) -> list[Measurement]:
        values = {
            "mlp_inactive": of.near_zero,
            "mlp_zero": of.zero,
            "mlp_dead": of.dead / len(of.activity),
            "mlp_kurtosis": of.kurtosis,
            **{_TOP[share]: energy for share, energy in of.top_energy.items()},
        }
        module = self._modules["mlp"][layer]
        return [
            Measurement(metric, module, layer, None, values[metric])
            for metric in self._metrics
            if metric in values
        ]


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
