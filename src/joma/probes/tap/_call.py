"""One attention computation of a model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from joma.errors import JomaError
from joma.probes.attention import AttentionStatistics, attention_statistics, with_sinks

_SCORE_OPTIONS = ("causal", "scale", "padding", "window", "mask", "softcap", "rows")
_HIDDEN_SCORE = -5000.0
"""Some models add −10⁴ to the scores of keys a query must not see."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Queries and keys of one attention module, detached from the graph.

    They are what the softmax is taken of: `statistics` measures exactly that. Where a module takes
    the softmax itself, `scores` holds what it is taken of, and queries and keys have head size 0.

    Attributes:
        module: Path of the module in the model, "model.layers.3.self_attn".
        layer: Number of its layer. Several modules may have the same one (self- and cross-attention
            of a decoder layer, two towers); group by `name`.
        query: (B, H, T, D), position embeddings applied.
        key: (B, Hk, S, D).
        value: (B, Hk, S, Dv); None where only scores, or the modules of a map, are seen.
        scale: Factor of the products; None for 1/√D.
        causal: Whether queries see no later key, a mask aside.
        padding: (B, S), bool, True for real keys.
        window: Keys are seen at a smaller distance.
        mask: Bool, True where seen, or numbers added to the scores.
        softcap: c, where scores are c·tanh(score / c).
        rows: (B, T), bool, True for real queries; None if all are. Padded queries are in no mean:
            in `statistics` they see no key.
        kind: "self" or "cross", after the name of the tower where the model has several: "encoder
            self", "decoder cross", "vision self".
        pass_index: 0 for the first time the module runs within one forward pass of the model, 1
            for the second (a block that several layers share), and so on.
        sinks: (H,), one more score per head that every query sees and that belongs to no key.
        scores: (B, H, T, S), the scores themselves, masks included.
        dropout: Probability with which attention drops keys; no part of `statistics`.
        compute: Computes attention's result as the model would, (B, H, T, Dv); None where only
            scores, or the modules of a map, are seen.
    """

    module: str
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor | None = None
    scale: float | None = None
    causal: bool = True
    padding: Tensor | None = None
    window: int | None = None
    mask: Tensor | None = None
    softcap: float | None = None
    rows: Tensor | None = None
    kind: str = "self"
    pass_index: int = 0
    sinks: Tensor | None = None
    scores: Tensor | None = None
    dropout: float = 0.0
    compute: Callable[[], Tensor] | None = None

    @property
    def name(self) -> str:
        """What identifies this attention: its path, and "#1", "#2", … for later passes."""
        return f"{self.module}#{self.pass_index}" if self.pass_index else self.module

    @property
    def result(self) -> Tensor:
        """What the attention gathers, (B, H, T, Dv), as the taps entered before this one left it.

        Raises:
            JomaError: Only scores, or the modules of a map, are seen.
        """
        if self.compute is None:
            raise self.no_result()
        return self.compute().detach()

    def no_result(self) -> JomaError:
        """Return the error for a result that is not to be had."""
        return JomaError(
            f"the result of {self.module} cannot be read or replaced: it computes attention in a "
            "way of its own"
        )

    def statistics(
        self, *, first: int | None = None, last: int | None = None, received: bool = False
    ) -> AttentionStatistics:
        """Return `attention_statistics` of this call; a padded query sees no key.

        A sink counts as one more outcome: it is part of log-sum-exp and entropy, and takes its
        share from the masses on the keys.
        """
        query, key = self.query, self.key
        options: dict[str, Any] = {name: getattr(self, name) for name in _SCORE_OPTIONS}
        if self.scores is not None:
            query, key = (x.new_zeros(*x.shape[:-1], 1) for x in (query, key))
            options["mask"] = self.scores
        if received and self.sinks is not None:
            raise JomaError(f"received is not measured where there are sinks, as in {self.module}")
        masses: dict[str, Any] = {"first": first, "last": last, "received": received}
        found = attention_statistics(query, key, **options, **masses)
        return found if self.sinks is None else with_sinks(found, self.sinks)

    def uniform(self) -> "AttentionCall":
        """Return the same call with all scores alike: rows spread evenly over the keys they see."""
        mask = self.mask if self.scores is None else self.scores
        if mask is not None and mask.dtype != torch.bool:
            mask = visible(mask)
        query, key = (x.new_zeros(*x.shape[:-1], x.shape[-1] or 1) for x in (self.query, self.key))
        sinks = None if self.sinks is None else torch.zeros_like(self.sinks)
        return replace(self, query=query, key=key, scores=None, mask=mask, sinks=sinks)


def visible(mask: Tensor) -> Tensor:
    """Return where a mask, or finished scores, leave a key visible, bool."""
    if mask.dtype == torch.bool:
        return mask
    return mask > _HIDDEN_SCORE


Handler = Callable[[AttentionCall], Tensor | None]
"""Called with each attention; returns a replacement for `AttentionCall.result`, or None."""
