"""What a language model of Fig. 6 and 8 is made of: its settings, a block, and what it drops."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma import random
from joma.errors import JomaError
from joma.models.layers import LayerNorm, Linear
from joma.models.transformer import Watch


@dataclass(frozen=True)
class LanguageConfig:
    """What a language model is made of; the defaults are those of Fig. 6.

    Attributes:
        vocabulary: words there are.
        layers: blocks of attention and MLP.
        width: of the residual stream.
        hidden: nodes of each MLP.
        heads: of each attention; they divide the width.
        length: the longest sequence.
        dropout: share of the numbers that are set to 0 in training.
    """

    vocabulary: int
    layers: int
    width: int = 200
    hidden: int = 200
    heads: int = 1
    length: int = 35
    dropout: float = 0.2

    @property
    def columns(self) -> int:
        """Columns of the output layer: the words, and some that stay 0 for alignment."""
        return self.vocabulary if self.vocabulary < 1024 else -(-self.vocabulary // 128) * 128

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "width", "hidden", "heads", "length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise JomaError(f"{name} must be a whole number from 1 on, got {value!r}")
        if self.width % 2 or self.width % self.heads:
            raise JomaError(
                f"width must be even and a multiple of the {self.heads} heads, got {self.width}"
            )
        if not 0 <= self.dropout < 1:
            raise JomaError(f"dropout must lie in [0, 1), got {self.dropout!r}")


class Dropout:
    """Which numbers of a step are dropped: decided by seed, place in the network, step and index.

    Args:
        seeds_E: of the members.
        step: of the training, an int or a tensor that counts on the device.
        share: of the numbers, dropped.
    """

    def __init__(self, seeds_E: Tensor, step: int | Tensor, share: float) -> None:
        self.step, self.share = step, share
        # Members of equal seed drop the same, which is then drawn once. To find them a GPU would
        # have to wait for it, and could not capture it.
        self.seeds_S, self.of_E = seeds_E, None
        if not seeds_E.is_cuda:
            own_S, of_E = seeds_E.unique(return_inverse=True)
            if len(own_S) < len(seeds_E):
                self.seeds_S, self.of_E = own_S, of_E

    def __call__(self, x: Tensor, place: str) -> Tensor:
        """x, (E, ...), with some of it 0 and the rest scaled up to the same mean."""
        if self.share == 0:
            return x
        width = x.shape[-1]
        drawn_width = width + -width % 4  # the generator makes four at a time
        count = x[0].numel() // width * drawn_width
        drawn = random.uniform(self.seeds_S, f"dropout.{place}", self.step, count)
        kept = drawn >= self.share
        if self.of_E is not None:
            kept = kept.index_select(0, self.of_E)
        kept = kept.view(*x.shape[:-1], drawn_width)[..., :width]
        return x * kept.to(x.dtype) / (1 - self.share)


def keep_all(x: Tensor, place: str) -> Tensor:
    """What takes the place of dropout outside training."""
    del place
    return x


class LanguageBlock(nn.Module):
    """Attention and MLP, each with dropout, a residual sum and layer norm after it.

    Args:
        config: of the network.
        members: E.
    """

    def __init__(self, config: LanguageConfig, members: int) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.queries_keys_values = Linear(members, width, 3 * width)
        self.projection = Linear(members, width, width)
        self.norm_attention = LayerNorm(members, width)
        self.lower = Linear(members, width, config.hidden)
        self.upper = Linear(members, config.hidden, width)
        self.norm_mlp = LayerNorm(members, width)

    def forward(
        self, x: Tensor, drop: Callable[[Tensor, str], Tensor], layer: int, watch: Watch | None
    ) -> Tensor:
        """Maps (E, B, T, width) to the same shape."""
        added = drop(self.projection(self._attended(x, drop, layer, watch)), f"{layer}.attended")
        x = self.norm_attention(x + added)
        hidden = functional.relu(self.lower(x))
        if watch is not None:
            watch("hidden", layer, hidden)
        added = self.upper(drop(hidden, f"{layer}.hidden"))
        return self.norm_mlp(x + drop(added, f"{layer}.mlp"))

    def fused(
        self, x: Tensor, drop: Any, layer: int, entropies: list[Tensor] | None = None
    ) -> Tensor:
        """`forward` by the kernels for a GPU, which add the biases; entropies are appended."""
        from joma.models import _language_kernels as kernels
        from joma.models._short_attention_kernel import attended, attended_measured

        def normed(linear: Linear, y: Tensor, x: Tensor, norm: LayerNorm, place: str) -> Tensor:
            settings = norm.weight, norm.bias, drop, f"{layer}.{place}"
            return kernels.sum_norm(linear.product(y), bias_of(linear), x, *settings)

        joined = self.queries_keys_values
        if entropies is None:
            y = attended(joined.product(x), bias_of(joined), drop, f"{layer}.attention")
        else:
            y, entropy_EBT = attended_measured(joined.product(x), bias_of(joined))
            entropies.append(entropy_EBT)
        x = normed(self.projection, y, x, self.norm_attention, "attended")
        y = kernels.relu(self.lower.product(x), bias_of(self.lower), drop, f"{layer}.hidden")
        return normed(self.upper, y, x, self.norm_mlp, "mlp")

    def _attended(
        self, x: Tensor, drop: Callable[[Tensor, str], Tensor], layer: int, watch: Watch | None
    ) -> Tensor:
        joined = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(2, 3) for part in joined.unbind(3))  # (E, B, heads, T, D)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        length = x.shape[2]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        if watch is not None:
            watch("attention", layer, weights)
        return (drop(weights, f"{layer}.attention") @ v).transpose(2, 3).flatten(-2)

    @torch.no_grad()
    def draw(self, seeds_E: Tensor) -> None:
        """Torch's own: Xavier for queries, keys and values together, 0 for attention's biases."""
        for name, layer in self.named_children():
            if isinstance(layer, Linear | LayerNorm):
                layer.draw(f"block.{name}", seeds_E)
        together = self.queries_keys_values.weight
        bound = math.sqrt(6 / (together.shape[1] + together.shape[2]))
        draw_uniform(together, "block.queries_keys_values.weight", seeds_E, bound)
        for layer in (self.queries_keys_values, self.projection):
            bias_of(layer).zero_()


def bias_of(linear: Linear) -> Tensor:
    """The bias of a layer that has one."""
    assert linear.bias is not None
    return linear.bias


def draw_uniform(parameter: Tensor, stream: str, seeds_E: Tensor, bound: float) -> None:
    """Fills a parameter (E, ...) uniformly on ± bound."""
    drawn = random.uniform(seeds_E, stream, 0, parameter[0].numel(), dtype=parameter.dtype)
    parameter.copy_(drawn.view(parameter.shape).mul_(2).sub_(1).mul_(bound))
