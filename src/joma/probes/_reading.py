"""One reading of a text by a model: what is seen of attention, MLPs and the residual stream."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from joma.models import Found
from joma.probes import _checks
from joma.probes._measurement import LAST, Measurement, Progress
from joma.probes._reading_parts import PartsReading
from joma.probes.attention import AttentionAccumulator, AttentionMeans
from joma.probes.watching import AttentionCall, AttentionMap, watch_attention

_TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 16384}
_OF_ATTENTION = ("entropy", "first", "last", "effective")


class Reading:
    """One reading of a text, and what was seen of every layer."""

    def __init__(
        self,
        model: nn.Module,
        parts: Found | None,
        metrics: Sequence[str],
        windows: Tensor,
        sample: int,
        seed: int,
    ) -> None:
        self._model, self._metrics = model, metrics
        self._attention: dict[int, AttentionAccumulator] = {}
        self._modules: dict[str, dict[int, str]] = defaultdict(dict)
        self._parts = PartsReading(model, parts, metrics, sample, seed)
        self._looked_at = _sampled(windows, _checks.whole("sample", sample, 1), seed)

    def run(
        self,
        windows: Tensor,
        batch: int | None,
        attention: AttentionMap | None,
        progress: Progress,
    ) -> None:
        """Reads all windows."""
        device = next(self._model.parameters()).device
        at_once = batch or max(1, _TOKENS_AT_ONCE.get(device.type, 16384) // windows.shape[1])
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(_evaluating(self._model))
            if any(metric.startswith("attention") for metric in self._metrics):
                stack.enter_context(watch_attention(self._model, self._see, names=attention))
            stack.enter_context(self._parts.hooked())
            for start in range(0, len(windows), at_once):
                progress("read the text", start, len(windows))
                rows = windows[start : start + at_once]
                places = self._looked_at[start : start + at_once].reshape(-1)
                self._parts.begin(
                    places.nonzero().squeeze(1).to(device),
                    rows.reshape(-1)[places].to(device),
                    places.numel(),
                )
                _forward(self._model, rows.to(device))

    def measurements(self) -> list[Measurement]:
        """What was seen."""
        found: list[Measurement] = []
        for layer, attention in sorted(self._attention.items()):
            found += self._of_attention(layer, attention.compute())
        return found + self._parts.measurements()

    def _see(self, call: AttentionCall) -> None:
        statistics = call.statistics(
            first=1 if "attention_first" in self._metrics else None,
            last=LAST if "attention_last" in self._metrics else None,
        )
        self._attention.setdefault(call.layer, AttentionAccumulator()).update(statistics)
        self._modules["attention"][call.layer] = call.module

    def _of_attention(self, layer: int, means: AttentionMeans) -> list[Measurement]:
        module, found = self._modules["attention"][layer], []
        for name in _OF_ATTENTION:
            metric = f"attention_{name}"
            if metric not in self._metrics:
                continue
            whole, heads = getattr(means.layer, name), getattr(means, name)
            found.append(Measurement(metric, module, layer, None, float(whole)))
            found += [
                Measurement(metric, module, layer, head, value)
                for head, value in enumerate(heads.tolist())
            ]
        return found


def _forward(model: nn.Module, tokens: Tensor) -> None:
    """Runs the model's body: its head would be a large part of the work, for nothing."""
    body = getattr(model, "base_model", model)
    if hasattr(model, "config") and hasattr(body, "get_input_embeddings"):  # one of transformers
        body(input_ids=tokens, use_cache=False)
    else:
        model(tokens)


def _sampled(windows: Tensor, sample: int, seed: int) -> Tensor:
    """Which tokens are looked at, (number, length), bool."""
    generator = torch.Generator().manual_seed(_checks.whole("seed", seed, 0))
    chosen = torch.zeros(windows.numel(), dtype=torch.bool)
    chosen[torch.randperm(windows.numel(), generator=generator)[:sample]] = True
    return chosen.view_as(windows)


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
