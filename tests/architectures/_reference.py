"""Attention probabilities as the model itself computes them, and ranks by numpy.

Nothing of joma is used. A model built with eager attention computes each softmax in plain sight:
its result is recorded together with the module that asked for it. That the results are the model's
attention is checked against what it returns for `output_attentions=True` (`returned`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SOFTMAX = {torch.softmax, nn.functional.softmax, Tensor.softmax}


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention in one forward pass.

    Attributes:
        module: path of the module that computed it.
        pass_index: how many times it had run before in this forward pass. A module may compute
            several attentions in one run, one for each image of a batch: these share the index.
        probabilities: (B, H, T, S).
        sinks: whether the last column is a sink's mass and no key's.
    """

    module: str
    pass_index: int
    probabilities: Tensor
    sinks: bool = False

    @property
    def key(self) -> str:
        return self.module + (f"#{self.pass_index}" if self.pass_index else "")

    def entropy(self) -> Tensor:
        """−Σ p ln p of each row, (B, H, T), in float64; a sink is one more outcome."""
        p = self.probabilities.double()
        return -torch.special.xlogy(p, p).sum(-1)

    def rows(self, real: Mapping[int, Tensor]) -> Tensor:
        """Entropy of each real query and head, (rows, H); `real` has masks (B, T) by T."""
        entropy = self.entropy().transpose(1, 2)
        rows = real.get(entropy.shape[1])
        return entropy.flatten(0, 1) if rows is None else entropy[rows]


class _Recorder(TorchFunctionMode):
    """Records the softmax of every attention with the module that runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = {module: path for path, module in model.named_modules()}
        self.running: list[nn.Module] = []
        self.runs: Counter[str] = Counter()
        self.seen: list[Attention] = []

    @property
    def path(self) -> str:
        return self.paths[self.running[-1]] if self.running else ""

    def enter(self, module: nn.Module) -> None:
        if not self.running:  # another forward pass of the whole model
            self.runs.clear()
        self.running.append(module)
        self.runs[self.paths[module]] += 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _SOFTMAX and result.ndim == 4:
            self._record(result.detach())
        elif func in _SOFTMAX and result.ndim == 3 and "attn" in self.path:  # heads in the batch
            heads: Any = self.running[-1].num_heads
            self._record(result.detach().unflatten(0, (-1, heads)))
        elif func is nn.functional.multi_head_attention_forward:
            wanted = kwargs | {"need_weights": True, "average_attn_weights": False}
            self._record(func(*args, **wanted)[1].detach())
        return result

    def _record(self, result: Tensor) -> None:
        module, path = self.running[-1], self.path
        sinks = getattr(module, "sinks", None) is not None
        self.seen.append(Attention(path, self.runs[path] - 1, result.clone(), sinks))


@contextmanager
def recording(model: nn.Module) -> Iterator[list[Attention]]:
    """Attentions of a model with eager attention in the block, in the order computed."""
    recorder = _Recorder(model)
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, _: recorder.enter(module)))
        handles.append(
            module.register_forward_hook(
                lambda *_: (recorder.running.pop(), None)[1], always_call=True
            )
        )
    try:
        with recorder:
            yield recorder.seen
    finally:
        for handle in handles:
            handle.remove()


def mean_entropies(
    seen: Iterable[Attention], real: Mapping[int, Tensor] | None = None
) -> dict[str, Tensor]:
    """Mean entropy of each head over real queries, (H,), by key."""
    rows: dict[str, list[Tensor]] = {}
    for attention in seen:
        rows.setdefault(attention.key, []).append(attention.rows(real or {}))
    return {key: torch.cat(parts).mean(0) for key, parts in rows.items()}


def attentions(model: nn.Module, inputs: Mapping[str, Any]) -> list[Attention]:
    """Attentions of `model(**inputs)`, without gradients."""
    with torch.no_grad(), recording(model) as seen:
        model(**inputs)
    return seen


def returned(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """All attention probabilities the model returns when asked to, in no particular order."""
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    return [p for p in _tensors(outputs) if p is not None and p.ndim == 4]


def _tensors(outputs: Any) -> Iterator[Tensor | None]:
    for name, value in outputs.items():
        if hasattr(value, "items"):
            yield from _tensors(value)
        elif "attentions" in name and value is not None:
            yield from value


def stable_rank(matrix: Tensor) -> float:
    """‖W‖²_F / σ₁² by numpy's SVD in float64."""
    values = np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)
    return float((values**2).sum() / values[0] ** 2)
