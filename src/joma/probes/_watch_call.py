"""What one attention module was about to do, and who is told."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from joma.probes.attention import AttentionStatistics, attention_statistics

HOW = (
    "say where its queries and keys are made, such as "
    "names=AttentionMap(query='blocks.{layer}.q', key='blocks.{layer}.k', heads=8)"
)
"""What to do about a model that does not tell."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Queries and keys of one attention module in one forward pass, cut from the graph.

    What the softmax was taken of: `attention_statistics` with these arguments. Dropout is no part.

    Attributes:
        module: the module's path in the model, "model.layers.3.self_attn".
        layer: its number.
        query: (B, H, T, D), positions and all applied.
        key: (B, Hk, S, D).
        scale: of the products; None for 1/√D.
        causal: whether queries see no later key, a mask aside.
        padding: (B, S), bool, True for real keys.
        window: keys are seen at a smaller distance.
        mask: bool, True where seen, or numbers added to the scores.
        softcap: c, where scores are c·tanh(score / c).
    """

    module: str
    layer: int
    query: Tensor
    key: Tensor
    scale: float | None = None
    causal: bool = True
    padding: Tensor | None = None
    window: int | None = None
    mask: Tensor | None = None
    softcap: float | None = None

    def statistics(
        self, *, first: int | None = None, last: int | None = None, received: bool = False
    ) -> AttentionStatistics:
        """`attention_statistics` of this call."""
        return attention_statistics(
            self.query,
            self.key,
            causal=self.causal,
            scale=self.scale,
            padding=self.padding,
            window=self.window,
            mask=self.mask,
            softcap=self.softcap,
            first=first,
            last=last,
            received=received,
        )


@dataclass(eq=False)
class Watch:
    """What `watch_attention` has seen so far.

    Attributes:
        calls: how many times attention was computed.
        modules: paths of the modules that did, in the order they were first seen.
    """

    see: Callable[[AttentionCall], None] = field(repr=False)
    calls: int = 0
    modules: list[str] = field(default_factory=list)

    def tell(self, call: AttentionCall) -> None:
        """Hands a call on, unless it only repeats one: checkpointing does so going backward."""
        if torch._C._current_graph_task_id() != -1:
            return
        self.calls += 1
        if call.module not in self.modules:
            self.modules.append(call.module)
        with torch.no_grad():
            self.see(call)


def layer_of(path: str, module: nn.Module, otherwise: int) -> int:
    """A module's layer: what it says itself, else the last number in its path."""
    own = getattr(module, "layer_idx", None)
    if isinstance(own, int):
        return own
    numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path)
    return int(numbers[-1]) if numbers else otherwise
