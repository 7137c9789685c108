"""The language model of Fig. 6 and 8 by kernels, with its loss and backward pass in one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from joma.kernels.choice import has_kernels
from joma.models.language import LanguageBlock, LanguageModel, bias_of
from joma.models.layers import LayerNorm, Linear
from joma.models.transformer import Watch

MAX_WIDTH = 256
"""Attention has a whole sequence in a GPU's shared memory: 64 KiB at this width."""

Fetch = Callable[[Tensor], Tensor]
"""Returns the embeddings of tokens (B, T) for all members: (E, B, T, width)."""


class FastLanguageModel(LanguageModel):
    """`LanguageModel` that computes with kernels on a GPU where it fits them."""

    def loss_and_backward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        step: Tensor | None,
        fetch: Fetch | None = None,
    ) -> Tensor:
        """Return the `losses`, (E,), and leave their gradients in the parameters.

        On a GPU in bfloat16 the logits become their own gradients in place, so that they are
        written once and read three times, and no others of their size are made.

        Args:
            tokens_BT: Words, (B, T).
            targets_BT: The word after each.
            weights_BT: How much each counts, together 1.
            step: Step of the training, as of `forward`.
            fetch: Function that returns the embeddings, in place of the table.
        """
        x = self._embedded(tokens_BT) if fetch is None else fetch(tokens_BT)
        fuses = self._fuses(x)
        x = self._states(x, step)
        if not fuses:
            losses_E = self._losses(x, targets_BT, weights_BT)
            losses_E.sum().backward()  # each member's gradient is that of its own loss
            return losses_E.detach()
        from joma.models.full_speed import _language_kernels as kernels

        weight, bias = self.output.weight, bias_of(self.output)
        with torch.no_grad():
            rows, width = x.shape[1] * x.shape[2], x.shape[3]
            # A column of ones next to the rest: its product with the gradient is that of the bias.
            widened = x.new_zeros(len(x), rows, width + 8)
            widened[..., :width] = x.flatten(1, 2)
            widened[..., width] = 1
            logits = torch.bmm(widened[..., :width], weight)
            losses_E = kernels.cross_entropy_(
                logits,
                bias,
                targets_BT.flatten(),
                weights_BT.flatten().float(),
                self.config.vocabulary,
            )
            gradient = torch.bmm(widened.mT, logits)
            weight.grad = gradient[:, :width]
            bias.grad = gradient[:, width : width + 1].to(bias.dtype)
            d_x = torch.bmm(logits, weight.mT).view_as(x)
        x.backward(d_x)
        return losses_E

    @torch.no_grad()
    def evaluate(
        self, tokens_BT: Tensor, targets_BT: Tensor, weights_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `losses` (E,) and entropies of attention in nats (layers, E), without dropout.

        On a GPU the logits are written once and read once, and attention is not written at all.

        Args:
            tokens_BT: Words, (B, T).
            targets_BT: The word after each.
            weights_BT: How much each word counts, and the row of attention at its position.
        """
        rows_LEBT: list[Tensor] = []

        def watch(name: str, layer: int, x: Tensor) -> None:
            if name == "attention":
                rows_LEBT.append(torch.special.entr(x.double()).sum(-1).mean(2))  # over heads

        x = self._embedded(tokens_BT)
        if self._fits(x):
            from joma.models.full_speed import _language_kernels as kernels

            x = self._fused_states(x, None, rows_LEBT).to(self.output.weight.dtype)
            losses_E = kernels.cross_entropies(
                self.output.product(x).flatten(1, 2),
                bias_of(self.output),
                targets_BT.flatten(),
                weights_BT.flatten().float(),
                self.config.vocabulary,
            )
        else:
            losses_E = self._losses(self._states(x, None, watch), targets_BT, weights_BT)
        weights = weights_BT.double()
        return losses_E, torch.stack([(rows * weights).sum((1, 2)) for rows in rows_LEBT])

    def _states(self, x: Tensor, step: int | Tensor | None, watch: Watch | None = None) -> Tensor:
        if self._fuses(x) and watch is None:
            return self._fused_states(x, step)
        return super()._states(x, step, watch)

    def _fuses(self, x: Tensor) -> bool:
        """Return whether the kernels do the work of training, given embeddings."""
        halves = self.compute, self.output.weight.dtype
        return self._fits(x) and halves == (torch.bfloat16, torch.bfloat16)

    def _fits(self, x: Tensor) -> bool:
        """Return whether the kernels are made for such a network, given embeddings."""
        config = self.config
        return (
            has_kernels(x.device)
            and self.output.weight.dtype.itemsize <= 4
            and config.heads == 1
            and config.width <= MAX_WIDTH
            and config.width % 8 == 0
            and config.hidden % 8 == 0
            and x.shape[2] <= 64
        )

    def _fused_states(
        self, x: Tensor, step: int | Tensor | None, entropies: list[Tensor] | None = None
    ) -> Tensor:
        """Return `_states` by the kernels; entropies, where asked for, are (E, B, T) each."""
        from joma.models.full_speed import _language_kernels as kernels
        from joma.models.full_speed._dropping_kernel import Drop

        share = 0.0 if step is None else self.config.dropout
        at = torch.as_tensor(0 if step is None else step, device=x.device)
        drop = Drop(self.seeds_E, at, share)
        waves_TD = self.sinusoids_TD[: x.shape[2]]
        kind = self.compute or self.output.weight.dtype
        x = kernels.placed(x, waves_TD, kind, drop, "embedding")
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, LanguageBlock)
            x = fused_block(block, x, drop, layer, entropies)
        return x


def fused_block(
    block: LanguageBlock, x: Tensor, drop: Any, layer: int, entropies: list[Tensor] | None
) -> Tensor:
    """Return what a block gives by the kernels, which add the biases; append entropies."""
    from joma.models.full_speed import _row_kernels as kernels
    from joma.models.full_speed._short_attention_kernel import attended, attended_measured

    def normed(linear: Linear, y: Tensor, x: Tensor, norm: LayerNorm, place: str) -> Tensor:
        settings = norm.weight, norm.bias, drop, f"{layer}.{place}"
        return kernels.sum_norm(linear.product(y), bias_of(linear), x, *settings)

    joined = block.queries_keys_values
    if entropies is None:
        y = attended(joined.product(x), bias_of(joined), drop, f"{layer}.attention")
    else:
        y, entropy_EBT = attended_measured(joined.product(x), bias_of(joined))
        entropies.append(entropy_EBT)
    x = normed(block.projection, y, x, block.norm_attention, "attended")
    y = kernels.relu(block.lower.product(x), bias_of(block.lower), drop, f"{layer}.hidden")
    return normed(block.upper, y, x, block.norm_mlp, "mlp")
