"""The transformer of Table 1: E networks of three layers or so as one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma import random
from joma.common.checks import check_at_least, whole_number
from joma.models.layers import Embedding, LayerNorm, Linear

Watch = Callable[[str, int, Tensor], None]
"""Function that the forward pass calls with "attention" or "hidden", the layer and the tensor."""


@dataclass(frozen=True)
class TransformerConfig:
    """What a network is made of; the defaults are those of Table 1.

    Attributes:
        vocabulary: Number of tokens, padding included.
        outputs: Number of classes.
        layers: Number of blocks of attention and MLP.
        width: Width of the residual stream.
        hidden: Number of nodes of each MLP.
    """

    vocabulary: int
    outputs: int
    layers: int = 3
    width: int = 1024
    hidden: int = 4096

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            whole_number(name, value, 1)


class Transformer(nn.Module):
    """E transformers of one shape, each with its own parameters.

    Causal softmax attention of one head without positions, a ReLU MLP, layer norm after each
    residual sum; the last position is classified.

    Args:
        config: What each is made of.
        seeds: One for each member; decides its initial parameters.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Attributes:
        compute: Precision of activations and products, if not that of the parameters; the output
            layer keeps theirs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        seeds: Sequence[int] = (0,),
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        seeds_E = random.seed_tensor(seeds, device)
        self.config = config
        self.compute: torch.dtype | None = None
        self.seeds = tuple(int(seed) for seed in seeds)
        members = len(self.seeds)
        with torch.device(device):
            self.embedding = Embedding(members, config.vocabulary, config.width)
            self.blocks = nn.ModuleList(
                TransformerBlock(config, members) for _ in range(config.layers)
            )
            self.output = Linear(members, config.width, config.outputs)
        self.to(dtype)
        for name, module in self.named_modules():
            if isinstance(module, Linear | Embedding | LayerNorm):
                module.draw(name, seeds_E)

    def forward(
        self, tokens_EBT: Tensor, *, leading: int = 1, watch: Watch | None = None
    ) -> Tensor:
        """Return the scores of the classes, (E, B, outputs).

        Args:
            tokens_EBT: Tokens, shape (E, B, T).
            leading: How many equal tokens the first position stands for. It is exact: equal leading
                tokens see only one another, so they are one token that counts as many.
            watch: Function that is called with the attention (E, B, 1, T, T) and the hidden
                activations (E, B, T, hidden) of every layer.
        """
        check_at_least(1, leading=leading)
        x = self.embedding(tokens_EBT)
        x = x if self.compute is None else x.to(self.compute)
        length, top = tokens_EBT.shape[-1], self.config.layers - 1
        later_TT = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        bias_TT = x.new_zeros(length, length)
        bias_TT[:, 0] = math.log(leading)
        bias_TT.masked_fill_(later_TT, -math.inf)
        for layer, block in enumerate(self.blocks):
            # The other positions of the top layer are not needed unless they are watched.
            x = block(x, bias_TT, layer, watch, last=watch is None and layer == top)
        return self.output(x[:, :, -1].to(self.output.weight.dtype))

    def products(self) -> list[str]:
        """Return the names of the parameters of the blocks that activations are multiplied with."""
        return [name for name, p in self.blocks.named_parameters("blocks") if p.ndim > 2]

    def settings(self) -> dict[str, Any]:
        """Return what the networks are made of."""
        return asdict(self.config)


class TransformerBlock(nn.Module):
    """Attention and MLP, with layer norm after each residual sum.

    Args:
        config: Configuration of the network.
        members: Number of networks, E.
    """

    def __init__(self, config: TransformerConfig, members: int) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.attention = nn.ModuleDict(
            {name: Linear(members, width, width, bias=False) for name in ("query", "key", "value")}
        )
        self.mlp = nn.ModuleDict(
            {"lower": Linear(members, width, hidden), "upper": Linear(members, hidden, width)}
        )
        self.norm_attention = LayerNorm(members, width)
        self.norm_mlp = LayerNorm(members, width)

    def forward(
        self, x: Tensor, bias_TT: Tensor, layer: int, watch: Watch | None, last: bool
    ) -> Tensor:
        """Return (E, B, T, width), or (E, B, 1, width) where only the last position counts."""
        residual = x[:, :, -1:] if last else x
        q = self.attention["query"](x[:, :, -1:] if last else x)
        k, v = self.attention["key"](x), self.attention["value"](x)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores + bias_TT[-q.shape[2] :], dim=-1)
        if watch is not None:
            watch("attention", layer, weights.unsqueeze(2))
        x = self.norm_attention(residual + weights @ v)
        hidden = functional.relu(self.mlp["lower"](x))
        if watch is not None:
            watch("hidden", layer, hidden)
        return self.norm_mlp(x + self.mlp["upper"](hidden))
