"""The networks of the papers' experiments, E of them side by side as one module.

Every parameter has the member axis E first. Member e of a stack computes what the same network
alone would: nothing is summed or normalised over the member axis. A layer computes in the precision
of what it is given. Initial values are drawn by `joma.random` from the member's seed and the
parameter's name, so that they do not depend on the neighbours.

`Transformer` is the network of Table 1. `LanguageModel` is that of Fig. 6 and 8: torch's
`nn.TransformerEncoder` with a causal mask between an embedding and an output layer of its own, as
in many tutorials: embeddings times √width plus sinusoids, layer norm after each residual sum, a
ReLU MLP, dropout after the embeddings, on the attention weights, in the MLP and on what either
adds. All members read the same text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma import random
from joma.common.checks import check_at_least, whole_number
from joma.errors import JomaError
from joma.kernels.language import Dropout, cross_entropies, norm_of_sum

FIRST_RANGE = 0.1
"""Embeddings and output weights of language models begin uniform on ± this."""

Watch = Callable[[str, int, Tensor], None]
"""Function that the forward pass calls with "attention" or "hidden", the layer and the tensor."""


class Linear(nn.Module):
    """E linear maps: y = x·weight + bias.

    Args:
        members: Number of networks, E.
        inputs: Width of x.
        outputs: Width of y.
        bias: Whether there is one.
    """

    def __init__(self, members: int, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        # (in, out), not torch's (out, in): the gradient xᵀ·dy is then made in the parameter's own
        # layout, and is not copied.
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs)) if bias else None

    def forward(self, x_ENI: Tensor) -> Tensor:
        """Return (E, ..., out) for (E, ..., in)."""
        rows, kind = x_ENI.flatten(1, -2), x_ENI.dtype
        if self.bias is None:
            y = torch.bmm(rows, self.weight.to(kind))
        else:
            y = torch.baddbmm(self.bias.to(kind), rows, self.weight.to(kind))
        return y.unflatten(1, x_ENI.shape[1:-1])

    @torch.no_grad()
    def draw(self, name: str, seeds: Tensor) -> None:
        """Draw torch's default for linear maps: uniform on ±1/√in."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        for kind, parameter in self.named_parameters():
            _draw_uniform(parameter, f"{name}.{kind}", seeds, bound)


class Embedding(nn.Module):
    """E tables of token vectors, N(0, 1) at the start.

    Args:
        members: Number of networks, E.
        tokens: Number of tokens.
        width: Width of a vector.
    """

    def __init__(self, members: int, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, tokens, width))

    def forward(self, tokens_EN: Tensor) -> Tensor:
        """Return the vectors of (E, ...) tokens: (E, ..., width)."""
        members, tokens, width = self.weight.shape
        # On a GPU reading the values would wait for it, and could not be captured.
        if (
            not tokens_EN.is_cuda
            and tokens_EN.numel()
            and not 0 <= tokens_EN.min() <= tokens_EN.max() < tokens
        ):
            raise JomaError(
                f"tokens must lie from 0 to {tokens - 1}, got some from {int(tokens_EN.min())} to "
                f"{int(tokens_EN.max())}"
            )
        first = torch.arange(members, device=tokens_EN.device) * tokens
        places = tokens_EN + first.view(-1, *[1] * (tokens_EN.ndim - 1))
        return functional.embedding(places, self.weight.view(members * tokens, width))

    @torch.no_grad()
    def draw(self, name: str, seeds: Tensor) -> None:
        """Draw torch's default for embeddings: N(0, 1)."""
        each, kind = self.weight[0].numel(), self.weight.dtype
        drawn = random.normal(seeds, f"{name}.weight", 0, each, dtype=kind)
        self.weight.copy_(drawn.view_as(self.weight))


class LayerNorm(nn.Module):
    """E layer norms, each with its own scale and shift.

    Args:
        members: Number of networks, E.
        width: Width of what is normalised.
    """

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, width))
        self.bias = nn.Parameter(torch.empty(members, width))

    def forward(self, x_END: Tensor) -> Tensor:
        """Normalise the last axis of (E, ..., width)."""
        members, width = self.weight.shape
        each = (members, *[1] * (x_END.ndim - 2), width)
        normal = functional.layer_norm(x_END, (width,))
        weight, bias = (p.to(x_END.dtype).view(each) for p in (self.weight, self.bias))
        return torch.addcmul(bias, normal, weight)

    @torch.no_grad()
    def draw(self, name: str, seeds: Tensor) -> None:
        """Set torch's default for layer norms: scale 1, shift 0."""
        del name, seeds
        self.weight.fill_(1)
        self.bias.fill_(0)


def _draw_uniform(parameter: Tensor, stream: str, seeds_E: Tensor, bound: float) -> None:
    """Fill a parameter (E, ...) uniformly on ± bound; seeds and the stream's name decide."""
    drawn = random.uniform(seeds_E, stream, 0, parameter[0].numel(), dtype=parameter.dtype)
    parameter.copy_(drawn.view(parameter.shape).mul_(2).sub_(1).mul_(bound))


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


@dataclass(frozen=True)
class LanguageConfig:
    """What a language model is made of; the defaults are those of Fig. 6.

    Attributes:
        vocabulary: Number of words.
        layers: Number of blocks of attention and MLP.
        width: Width of the residual stream.
        hidden: Number of nodes of each MLP.
        heads: Number of heads of each attention; they divide the width.
        length: The longest sequence.
        dropout: Share of the numbers that are set to 0 in training.
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
        """Return the columns of the output layer: the words, and some that stay 0 for alignment."""
        return self.vocabulary if self.vocabulary < 1024 else -(-self.vocabulary // 128) * 128

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "width", "hidden", "heads", "length"):
            whole_number(name, getattr(self, name), 1)
        if self.width % 2 or self.width % self.heads:
            raise JomaError(
                f"width must be even and a multiple of the {self.heads} heads, got {self.width}"
            )
        if not 0 <= self.dropout < 1:
            raise JomaError(f"dropout must lie in [0, 1), got {self.dropout!r}")


class LanguageBlock(nn.Module):
    """Attention and MLP, each with dropout, a residual sum and layer norm after it.

    Args:
        config: Configuration of the network.
        members: Number of networks, E.
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

    def forward(self, x: Tensor, drop: Dropout, layer: int, watch: Watch | None) -> Tensor:
        """Return the same shape as given, (E, B, T, width)."""
        y = self._attended(x, drop, layer, watch)
        x = _normed(self.projection, y, x, self.norm_attention, drop, f"{layer}.attended")
        hidden = functional.relu(self.lower(x))
        if watch is not None:
            watch("hidden", layer, hidden)
        y = drop(hidden, f"{layer}.hidden")
        return _normed(self.upper, y, x, self.norm_mlp, drop, f"{layer}.mlp")

    def _attended(self, x: Tensor, drop: Dropout, layer: int, watch: Watch | None) -> Tensor:
        joined = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(2, 3) for part in joined.unbind(3))  # (E, B, heads, T, D)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        length = x.shape[2]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(-1)
        if watch is not None:
            watch("attention", layer, weights)
        return (drop(weights, f"{layer}.attention") @ v).transpose(2, 3).flatten(-2)


class LanguageModel(nn.Module):
    """E language models of one shape, each with its own parameters.

    Linear maps begin as torch's, embeddings and output weights uniform on ±0.1.

    Args:
        config: What each is made of.
        seeds: One for each member; decides its initial parameters and what it drops.
        device: Device of the parameters.
        dtype: Type of the parameters.

    Attributes:
        compute: Precision of activations and products, if not that of the parameters.
    """

    sinusoids_TD: Tensor
    seeds_E: Tensor

    def __init__(
        self,
        config: LanguageConfig,
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
                LanguageBlock(config, members) for _ in range(config.layers)
            )
            self.output = Linear(members, config.width, config.columns)
        waves = _sinusoids(config.length, config.width).to(device)
        self.register_buffer("sinusoids_TD", waves, persistent=False)
        self.register_buffer("seeds_E", seeds_E, persistent=False)
        self.to(dtype)
        for name, module in self.named_modules():
            if isinstance(module, Linear | LayerNorm):
                module.draw(name, seeds_E)
        for name in ("embedding.weight", "output.weight"):
            _draw_uniform(self.get_parameter(name).data, name, seeds_E, FIRST_RANGE)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        step: int | Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return the logits of the next word at every position, (E, B, T, vocabulary).

        Args:
            tokens_BT: Words, (B, T), the same for all members.
            step: Step of the training, which decides what is dropped; nothing is where None.
            watch: Function that is called with the attention (E, B, heads, T, T) and the hidden
                activations (E, B, T, hidden) of every layer.
        """
        states = self.states(tokens_BT, step=step, watch=watch)
        return self.output(states.to(self.output.weight.dtype))[..., : self.config.vocabulary]

    def states(
        self,
        tokens_BT: Tensor,
        *,
        step: int | Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return what the output layer reads, (E, B, T, width); arguments as of `forward`."""
        length, most = tokens_BT.shape[-1], self.config.length
        if length > most:
            raise JomaError(f"tokens must have at most {most} positions, got {length}")
        share = 0.0 if step is None else self.config.dropout
        drop = Dropout(self.seeds_E, 0 if step is None else step, share)
        x = self.embedding(tokens_BT.expand(len(self.seeds), *tokens_BT.shape))
        x = x * math.sqrt(self.config.width) + self.sinusoids_TD[:length]
        x = drop(x if self.compute is None else x.to(self.compute), "embedding")
        for layer, block in enumerate(self.blocks):
            x = block(x, drop, layer, watch)
        return x

    def losses(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        *,
        weights_BT: Tensor | None = None,
        step: int | Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return the cross-entropy of each member, mean over the words, (E,).

        Args:
            tokens_BT: Words, (B, T).
            targets_BT: The word after each.
            weights_BT: How much each counts, together 1; all the same where None.
            step: As of `forward`.
            watch: As of `forward`.
        """
        states = self.states(tokens_BT, step=step, watch=watch).to(self.output.weight.dtype)
        if weights_BT is None:
            weights_BT = torch.full_like(targets_BT, 1 / targets_BT.numel(), dtype=torch.float64)
        output = self.output.weight, _bias_of(self.output)
        targets_N, weights_N = targets_BT.flatten(), weights_BT.flatten()
        return cross_entropies(
            states.flatten(1, 2), output, targets_N, weights_N, self.config.vocabulary
        )

    @torch.no_grad()
    def evaluate(
        self, tokens_BT: Tensor, targets_BT: Tensor, weights_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `losses` (E,) and entropies of attention in nats (layers, E), without dropout.

        Args:
            tokens_BT: Words, (B, T).
            targets_BT: The word after each.
            weights_BT: How much each word counts, and the row of attention at its position.
        """
        entropies_LE: list[Tensor] = []

        def watch(name: str, layer: int, x: Tensor) -> None:
            if name == "attention":
                rows_EBT = torch.special.entr(x.double()).sum(-1).mean(2)  # over heads
                entropies_LE.append((rows_EBT * weights_BT.double()).sum((1, 2)))

        losses_E = self.losses(tokens_BT, targets_BT, weights_BT=weights_BT, watch=watch)
        return losses_E, torch.stack(entropies_LE)

    def products(self) -> list[str]:
        """Return the names of the parameters that activations are multiplied with."""
        blocks = [name for name, p in self.blocks.named_parameters("blocks") if p.shape[1] > 1]
        return [*(name for name in blocks if "norm" not in name), "output.weight"]

    def settings(self) -> dict[str, Any]:
        """Return what the networks are made of."""
        return asdict(self.config)


def _bias_of(linear: Linear) -> Tensor:
    """Return the bias of a layer that has one."""
    assert linear.bias is not None
    return linear.bias


def _normed(
    linear: Linear, y: Tensor, x: Tensor, norm: LayerNorm, drop: Dropout, place: str
) -> Tensor:
    """Return the layer norm of x and what a linear map of y adds to it."""
    parameters = linear.weight, _bias_of(linear)
    return norm_of_sum(y, parameters, x, (norm.weight, norm.bias), drop, place)


def _sinusoids(length: int, width: int) -> Tensor:
    """Return sine and cosine of the position at geometric wavelengths, interleaved."""
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10_000.0) / width))
    angle = torch.arange(length, dtype=torch.float64)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)
