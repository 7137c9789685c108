"""The experiment transformer: the network behind Table 1 and its relatives, E of them as one."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma import random
from joma.common.checks import check_one_of, whole_number
from joma.errors import JomaError
from joma.models.layers import Embedding, LayerNorm, Linear

AttentionKind = Literal["softmax", "exp", "linear"]
NormPlacement = Literal["post", "pre", "none"]
Positions = Literal["none", "learned", "sinusoidal"]
ActivationName = Literal["relu", "gelu", "tanh", "quadratic", "linear"]
Readout = Literal["last", "all"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "quadratic": torch.square,
    "linear": lambda x: x,
}

Watch = Callable[[str, int, Tensor], None]
"""Function that the forward pass calls with "attention" or "hidden", the layer and the tensor."""


@dataclass(frozen=True)
class TransformerConfig:
    """What a network is made of; the defaults are those of Table 1.

    Attributes:
        vocabulary: Number of tokens, padding included.
        outputs: Number of classes, or of tokens.
        layers: Number of blocks of attention and MLP.
        width: Width of the residual stream.
        hidden: Number of nodes of each MLP.
        heads: Number of heads of each attention; they divide the width.
        attention: "softmax"; "exp" and "linear" are the unnormalised ones of the theory.
        norm: Layer norm after each residual sum ("post"), before each branch ("pre"), or none.
        positions: What is added to the embeddings.
        length: The longest sequence; needed for learned and sinusoidal positions.
        activation: Activation function of the MLP.
        causal: Whether a position attends only to itself and what is before it.
        projection: Whether a linear map follows the attention.
        readout: Whether the output is of the last position or of all.
    """

    vocabulary: int
    outputs: int
    layers: int = 3
    width: int = 1024
    hidden: int = 4096
    heads: int = 1
    attention: AttentionKind = "softmax"
    norm: NormPlacement = "post"
    positions: Positions = "none"
    length: int | None = None
    activation: ActivationName = "relu"
    causal: bool = True
    projection: bool = False
    readout: Readout = "last"

    def __post_init__(self) -> None:
        for name in ("vocabulary", "outputs", "layers", "width", "hidden", "heads"):
            whole_number(name, getattr(self, name), 1)
        for name in ("causal", "projection"):
            if not isinstance(getattr(self, name), bool):
                raise JomaError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.width % self.heads:
            raise JomaError(f"heads must divide the width {self.width}, got {self.heads}")
        for name, kinds in _CHOICES.items():
            check_one_of(name, getattr(self, name), get_args(kinds))
        if self.positions != "none" and (self.length is None or self.length < 1):
            raise JomaError(
                f"length must say the longest sequence when positions are {self.positions}, "
                f"got {self.length!r}"
            )
        if self.positions == "sinusoidal" and self.width % 2:
            raise JomaError(f"width must be even for sinusoidal positions, got {self.width}")


_CHOICES = {
    "attention": AttentionKind,
    "norm": NormPlacement,
    "positions": Positions,
    "activation": ActivationName,
    "readout": Readout,
}


class Transformer(nn.Module):
    """E transformers of one shape, each with its own parameters.

    Args:
        config: What each is made of.
        seeds: One for each member; decides its initial parameters.
        depths: How many of the layers each member has, if not all; the others are the identity
            for it and get no gradient.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Attributes:
        compute: Precision of activations and products, if not that of the parameters; the output
            layer keeps theirs.
    """

    has_LE111: Tensor
    sinusoids_TD: Tensor

    def __init__(
        self,
        config: TransformerConfig,
        seeds: Sequence[int] = (0,),
        *,
        depths: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        seeds_E = random.seed_tensor(seeds, device)
        _check_depths(depths, len(seeds), config.layers)
        self.config = config
        self.compute: torch.dtype | None = None
        self.seeds = tuple(int(seed) for seed in seeds)
        self.depths = None if depths is None else tuple(depths)
        members = len(self.seeds)
        with torch.device(device):
            self.embedding = Embedding(members, config.vocabulary, config.width)
            self.position = (
                Embedding(members, config.length or 1, config.width)
                if config.positions == "learned"
                else None
            )
            self.blocks = nn.ModuleList(
                TransformerBlock(config, members) for _ in range(config.layers)
            )
            self.final_norm = LayerNorm(members, config.width) if config.norm == "pre" else None
            self.output = Linear(members, config.width, config.outputs)
        # Made once: a captured step cannot copy from the host.
        has = torch.tensor(
            [[layer < depth for depth in depths or ()] for layer in range(config.layers)]
        )
        self.register_buffer("has_LE111", has[:, :, None, None, None].to(device), persistent=False)
        if config.positions == "sinusoidal":
            waves = sinusoids(config.length or 1, config.width).to(device)
            self.register_buffer("sinusoids_TD", waves, persistent=False)
        self.to(dtype)
        for name, module in self.named_modules():
            if isinstance(module, Linear | Embedding | LayerNorm):
                module.draw(name, seeds_E)

    def forward(
        self,
        tokens_EBT: Tensor,
        *,
        leading: int = 1,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return outputs, (E, B, outputs), or (E, B, T, outputs) where all positions are read out.

        Args:
            tokens_EBT: Tokens, shape (E, B, T).
            leading: How many equal tokens the first position stands for. It is exact for softmax
                attention without positions: equal leading tokens see only one another, so they
                are one token that counts as many.
            watch: Function that is called with the attention (E, B, heads, T, T) and the hidden
                activations (E, B, T, hidden) of every layer.
        """
        x = self._embedded(tokens_EBT, leading)
        x = x if self.compute is None else x.to(self.compute)
        seen = Seen(tokens_EBT.shape[-1], self.config.causal, leading, x)
        top = self.config.layers - 1
        last_alone = self.config.readout == "last" and watch is None and self.depths is None
        for layer, block in enumerate(self.blocks):
            # The other positions of the top layer are not needed unless they are watched.
            y = block(x, seen, last_alone and layer == top, watch and _for_layer(watch, layer))
            x = y if self.depths is None else torch.where(self.has_LE111[layer], y, x)
        return self._read_out(x)

    def products(self) -> list[str]:
        """Return the names of the parameters of the blocks that activations are multiplied with."""
        return [name for name, p in self.blocks.named_parameters("blocks") if p.ndim > 2]

    def settings(self) -> dict[str, Any]:
        """Return what the networks are made of."""
        depths = None if self.depths is None else list(self.depths)
        return {"depths": depths, **asdict(self.config)}

    def _read_out(self, x: Tensor) -> Tensor:
        if self.config.readout == "last":
            x = x[:, :, -1]
        x = x.to(self.output.weight.dtype)
        return self.output(x if self.final_norm is None else self.final_norm(x))

    def _check_leading(self, leading: int) -> None:
        if leading < 1:
            raise JomaError(f"leading must be at least 1, got {leading}")
        if leading > 1 and (self.config.attention != "softmax" or self.config.positions != "none"):
            raise JomaError(
                "leading must be 1 unless attention is softmax and there are no positions, "
                f"got {leading}"
            )

    def _embedded(self, tokens_EBT: Tensor, leading: int) -> Tensor:
        self._check_leading(leading)
        x = self.embedding(tokens_EBT)
        if self.config.positions == "none":
            return x
        length = tokens_EBT.shape[-1]
        if length > (self.config.length or 0):
            raise JomaError(
                f"tokens must have at most {self.config.length} positions, got {length}"
            )
        if self.position is not None:
            return x + self.position.weight[:, None, :length]
        return x + self.sinusoids_TD[:length]


class TransformerBlock(nn.Module):
    """Attention and MLP, each with a residual sum.

    Args:
        config: Configuration of the network.
        members: Number of networks, E.
    """

    def __init__(self, config: TransformerConfig, members: int) -> None:
        super().__init__()
        self.placement = config.norm
        self.attention = SelfAttention(config, members)
        self.mlp = MLP(config, members)
        if config.norm != "none":
            self.norm_attention = LayerNorm(members, config.width)
            self.norm_mlp = LayerNorm(members, config.width)

    def forward(self, x: Tensor, seen: "Seen", last: bool, watch: "_LayerWatch | None") -> Tensor:
        """Return (E, B, T, width), or (E, B, 1, width) if only the last position counts."""
        residual = x[:, :, -1:] if last else x
        if self.placement == "pre":
            x = residual + self.attention(self.norm_attention(x), seen, last, watch)
            return x + self.mlp(self.norm_mlp(x), watch)
        if self.placement == "post":
            x = self.norm_attention(residual + self.attention(x, seen, last, watch))
            return self.norm_mlp(x + self.mlp(x, watch))
        x = residual + self.attention(x, seen, last, watch)
        return x + self.mlp(x, watch)


class SelfAttention(nn.Module):
    """Scores q·k/√d, turned into weights by softmax, exp or nothing; queries see what is `seen`.

    Args:
        config: Configuration of the network.
        members: Number of networks, E.
    """

    def __init__(self, config: TransformerConfig, members: int) -> None:
        super().__init__()
        width = config.width
        self.kind: AttentionKind = config.attention
        self.heads = config.heads
        self.query = Linear(members, width, width, bias=False)
        self.key = Linear(members, width, width, bias=False)
        self.value = Linear(members, width, width, bias=False)
        self.projection = Linear(members, width, width) if config.projection else None

    def forward(self, x: Tensor, seen: "Seen", last: bool, watch: "_LayerWatch | None") -> Tensor:
        """Return (E, B, T, width), or (E, B, 1, width) for the last query."""
        q = self.query(x[:, :, -1:] if last else x)
        y = self.attend(q, self.key(x), self.value(x), seen, watch)
        return y if self.projection is None else self.projection(y)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, seen: "Seen", watch: "_LayerWatch | None" = None
    ) -> Tensor:
        """Return the values (E, B, T, width) averaged by the weights of the queries."""
        q, k, v = self._split(q), self._split(k), self._split(v)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = seen.weights(scores, self.kind)
        if watch is not None:
            watch("attention", weights)
        return (weights @ v).transpose(2, 3).flatten(-2)

    def _split(self, x: Tensor) -> Tensor:
        """Return (E, B, T, width) as (E, B, heads, T, width of a head)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(2, 3)


class MLP(nn.Module):
    """One hidden layer, whose nodes are what Table 1 correlates with the latents.

    Args:
        config: Configuration of the network.
        members: Number of networks, E.
    """

    def __init__(self, config: TransformerConfig, members: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.lower = Linear(members, config.width, config.hidden)
        self.upper = Linear(members, config.hidden, config.width)

    def forward(self, x: Tensor, watch: "_LayerWatch | None") -> Tensor:
        """Return the same shape as given, (E, ..., width)."""
        hidden = self.activation(self.lower(x))
        if watch is not None:
            watch("hidden", hidden)
        return self.upper(hidden)


_LayerWatch = Callable[[str, Tensor], None]


def _for_layer(watch: Watch, layer: int) -> _LayerWatch:
    return lambda name, tensor: watch(name, layer, tensor)


class Seen:
    """Which keys a query sees, and how often each counts; made once for all layers.

    Args:
        length: Number of positions, T.
        causal: Whether a position sees only itself and what is before it.
        leading: How many equal tokens the first position stands for.
        like: A tensor of the device and the type of the scores.
    """

    def __init__(self, length: int, causal: bool, leading: int, like: Tensor) -> None:
        self.length, self.causal, self.leading = length, causal, leading
        self._like = like.new_empty(0)

    def weights(self, scores: Tensor, kind: AttentionKind) -> Tensor:
        """Return attention weights of the last queries, of which `scores` may have fewer than T."""
        queries = scores.shape[-2]
        if kind == "softmax":
            return torch.softmax(scores + self._bias[-queries:], dim=-1)
        if kind == "exp":
            return scores.masked_fill(self._hidden[-queries:], -math.inf).exp()
        return scores.masked_fill(self._hidden[-queries:], 0)

    @functools.cached_property
    def _hidden(self) -> Tensor:
        allowed = torch.ones(self.length, self.length, dtype=torch.bool, device=self._like.device)
        return ~(allowed.tril() if self.causal else allowed)

    @functools.cached_property
    def _bias(self) -> Tensor:
        bias = self._like.new_zeros(self.length, self.length)
        bias[:, 0] = math.log(self.leading)
        return bias.masked_fill_(self._hidden, -math.inf)


def sinusoids(length: int, width: int) -> Tensor:
    """Return sine and cosine of the position at geometric wavelengths, interleaved."""
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


def _check_depths(depths: Sequence[int] | None, members: int, layers: int) -> None:
    if depths is None:
        return
    if len(depths) != members:
        raise JomaError(f"depths must name one for each of the {members} members, got {depths}")
    if not all(1 <= depth <= layers for depth in depths):
        raise JomaError(f"depths must lie between 1 and the {layers} layers, got {depths}")
