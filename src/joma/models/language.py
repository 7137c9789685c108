"""The language model of Fig. 6 and 8: a small post-norm transformer over words, E of them as one.

It is torch's `nn.TransformerEncoder` with a causal mask between an embedding and an output layer of
its own, as in many tutorials: embeddings times √width plus sinusoids, layer norm after each
residual sum, a ReLU MLP, dropout after the embeddings, on the attention weights, in the MLP and on
what either adds. All members read the same text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.errors import JomaError
from joma.models._language_parts import (
    Dropout,
    LanguageBlock,
    LanguageConfig,
    bias_of,
    draw_uniform,
    keep_all,
)
from joma.models.layers import Embedding, Linear
from joma.models.transformer import Watch, sinusoids

__all__ = ["FIRST_RANGE", "Dropout", "LanguageBlock", "LanguageConfig", "LanguageModel"]

Fetch = Callable[[Tensor], Tensor]
"""Gives the embeddings of tokens (B, T) for all members: (E, B, T, width)."""

FIRST_RANGE = 0.1
"""Embeddings and output weights begin uniform on ± this."""


class LanguageModel(nn.Module):
    """E language models of one shape, each with its own parameters.

    Initial values are those of `nn.TransformerEncoderLayer`, the same in every layer, and uniform
    on ±.1 for embeddings and output weights, whose biases are 0.

    Args:
        config: what each is made of.
        seeds: one for each member; decides its initial parameters and what it drops.
        device: where the parameters are.
        dtype: of the parameters.

    Attributes:
        compute: the precision that activations and products have, if not that of the parameters.
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
        if not seeds:
            raise JomaError("seeds must name at least one member, got none")
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
        waves = sinusoids(config.length, config.width).to(device)
        self.register_buffer("sinusoids_TD", waves, persistent=False)
        seeds_E = torch.tensor(self.seeds, dtype=torch.int64, device=device)
        self.register_buffer("seeds_E", seeds_E, persistent=False)
        self.to(dtype)
        self._draw()

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        step: int | Tensor | None = None,
        watch: Watch | None = None,
        fetch: Fetch | None = None,
    ) -> Tensor:
        """Logits of the next word at every position, (E, B, T, vocabulary).

        Args:
            tokens_BT: words, (B, T), the same for all members.
            step: of the training, which decides what is dropped; nothing is where None.
            watch: is told the attention (E, B, heads, T, T) and the hidden activations
                (E, B, T, hidden) of every layer.
            fetch: gives the embeddings of tokens, (E, B, T, width), in place of the table.
        """
        states = self.states(tokens_BT, step=step, watch=watch, fetch=fetch)
        states = states.to(self._output_type)
        return self.output(states)[..., : self.config.vocabulary]

    def states(
        self,
        tokens_BT: Tensor,
        *,
        step: int | Tensor | None = None,
        watch: Watch | None = None,
        fetch: Fetch | None = None,
    ) -> Tensor:
        """What the output layer reads, (E, B, T, width); arguments as of `forward`."""
        length = tokens_BT.shape[-1]
        x = self._embedded(tokens_BT, fetch)
        if self._fuses(tokens_BT) and watch is None:
            return self._fused_states(x, step)
        drop = keep_all if step is None else Dropout(self.seeds_E, step, self.config.dropout)
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
        """Cross-entropy of each member, mean over the words, (E,).

        Args:
            tokens_BT: words, (B, T).
            targets_BT: the word after each.
            weights_BT: how much each counts, together 1; all the same where None.
            step: as of `forward`.
            watch: as of `forward`.
        """
        return self._losses(self(tokens_BT, step=step, watch=watch), targets_BT, weights_BT)

    @torch.no_grad()
    def measured(
        self, tokens_BT: Tensor, targets_BT: Tensor, weights_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`losses` (E,) and the entropies of attention in nats (layers, E), with nothing dropped.

        On a GPU the logits are written once and read once, and attention is not written at all.

        Args:
            tokens_BT: words, (B, T).
            targets_BT: the word after each.
            weights_BT: how much each word counts, and the row of attention at its place.
        """
        rows_LEBT: list[Tensor] = []

        def watch(name: str, layer: int, x: Tensor) -> None:
            if name == "attention":
                rows_LEBT.append(torch.special.entr(x.double()).sum(-1).mean(2))  # over heads

        if self._fits(tokens_BT):
            from joma.models import _language_kernels as kernels

            x = self._fused_states(self._embedded(tokens_BT, None), None, rows_LEBT)
            x = x.to(self._output_type)
            losses_E = kernels.cross_entropies(
                self.output.product(x).flatten(1, 2),
                bias_of(self.output),
                targets_BT.flatten(),
                weights_BT.flatten().float(),
                self.config.vocabulary,
            )
        else:
            losses_E = self.losses(tokens_BT, targets_BT, weights_BT=weights_BT, watch=watch)
        weights = weights_BT.double()
        return losses_E, torch.stack([(rows * weights).sum((1, 2)) for rows in rows_LEBT])

    def _losses(self, logits: Tensor, targets_BT: Tensor, weights_BT: Tensor | None) -> Tensor:
        targets_EN = targets_BT.flatten().expand(len(self.seeds), -1)
        each_EN = functional.cross_entropy(
            logits.flatten(0, 2), targets_EN.flatten(), reduction="none"
        ).view_as(targets_EN)
        if weights_BT is None:
            return each_EN.mean(-1)
        return (each_EN * weights_BT.flatten().to(each_EN.dtype)).sum(-1)

    def descend(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        step: Tensor | None,
        fetch: Fetch | None = None,
    ) -> Tensor:
        """`losses`, (E,), whose gradients are left with the parameters.

        On a GPU in bfloat16 the logits become their own gradients in place, so that they are
        written once and read three times, and no others of their size are made.

        Args:
            tokens_BT: words, (B, T).
            targets_BT: the word after each.
            weights_BT: how much each counts, together 1.
            step: as of `forward`.
            fetch: gives the embeddings of tokens, (E, B, T, width), in place of the table.
        """
        if not self._fuses(tokens_BT):
            losses_E = self._losses(self(tokens_BT, step=step, fetch=fetch), targets_BT, weights_BT)
            losses_E.sum().backward()  # each member's gradient is that of its own loss
            return losses_E.detach()
        from joma.models import _language_kernels as kernels

        x = self.states(tokens_BT, step=step, fetch=fetch)
        weight, bias = self.output.weight, bias_of(self.output)
        with torch.no_grad():
            rows, width = x.shape[1] * x.shape[2], x.shape[3]
            # A column of ones beside the rest: its product with the gradient is that of the bias.
            beside = x.new_zeros(len(x), rows, width + 8)
            beside[..., :width] = x.flatten(1, 2)
            beside[..., width] = 1
            logits = torch.bmm(beside[..., :width], weight)
            losses_E = kernels.cross_entropy_(
                logits,
                bias,
                targets_BT.flatten(),
                weights_BT.flatten().float(),
                self.config.vocabulary,
            )
            gradient = torch.bmm(beside.mT, logits)
            weight.grad = gradient[:, :width]
            bias.grad = gradient[:, width : width + 1].to(bias.dtype)
            d_x = torch.bmm(logits, weight.mT).view_as(x)
        x.backward(d_x)
        return losses_E

    def _embedded(self, tokens_BT: Tensor, fetch: Fetch | None) -> Tensor:
        """Embeddings of tokens, (E, B, T, width); more tokens than there are places are refused."""
        length, most = tokens_BT.shape[-1], self.config.length
        if length > most:
            raise JomaError(f"tokens must have at most {most} positions, got {length}")
        if fetch is not None:
            return fetch(tokens_BT)
        return self.embedding(tokens_BT.expand(len(self.seeds), *tokens_BT.shape))

    def _fuses(self, tokens_BT: Tensor) -> bool:
        """Whether the kernels for a GPU do the work of training."""
        halves = self.compute, self.output.weight.dtype
        return self._fits(tokens_BT) and halves == (torch.bfloat16, torch.bfloat16)

    def _fits(self, tokens_BT: Tensor) -> bool:
        """Whether the kernels for a GPU are made for such a network."""
        config = self.config
        return (
            tokens_BT.is_cuda
            and self._output_type.itemsize <= 4
            and config.heads == 1
            and config.width % 8 == 0
            and config.hidden % 8 == 0
            and tokens_BT.shape[1] <= 64
        )

    def _fused_states(
        self, x: Tensor, step: int | Tensor | None, entropies: list[Tensor] | None = None
    ) -> Tensor:
        """`states` by the kernels, from embeddings; entropies, where asked for, (E, B, T) each."""
        from joma.models import _language_kernels as kernels
        from joma.models._dropping_kernel import Drop

        share = 0.0 if step is None else self.config.dropout
        at = torch.as_tensor(0 if step is None else step, device=x.device)
        drop = Drop(self.seeds_E, at, share)
        waves_TD = self.sinusoids_TD[: x.shape[2]]
        x = kernels.placed(x, waves_TD, self.compute or self._output_type, drop, "embedding")
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, LanguageBlock)
            x = block.fused(x, drop, layer, entropies)
        return x

    def products(self) -> list[str]:
        """Names of the parameters that activations are multiplied with."""
        blocks = [name for name, p in self.blocks.named_parameters("blocks") if p.shape[1] > 1]
        return [*(name for name in blocks if "norm" not in name), "output.weight"]

    def settings(self) -> dict[str, Any]:
        """What the networks are made of."""
        return asdict(self.config)

    @property
    def _output_type(self) -> torch.dtype:
        return self.output.weight.dtype

    @torch.no_grad()
    def _draw(self) -> None:
        draw_uniform(self.embedding.weight, "embedding.weight", self.seeds_E, FIRST_RANGE)
        self.output.weight.zero_()
        bias_of(self.output).zero_()
        words = self.output.weight[..., : self.config.vocabulary]
        draw_uniform(words, "output.weight", self.seeds_E, FIRST_RANGE)
        first = self.blocks[0]
        assert isinstance(first, LanguageBlock)
        first.draw(self.seeds_E)
        for block in self.blocks[1:]:
            block.load_state_dict(first.state_dict())
