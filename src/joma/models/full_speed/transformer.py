"""The networks of Table 1 by kernels: fewer passes over activations between the products."""

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from joma.common.text import first_line
from joma.kernels.choice import has_kernels
from joma.models.language import bias_of
from joma.models.transformer import Seen, SelfAttention, Transformer, TransformerBlock, Watch

MAX_POSITIONS = 64
"""With more positions attention is computed by torch's operations."""

MAX_TABLE = 512
"""With more tokens than this, the first layer is computed at each place of the sequences."""

MAX_WIDTH, MAX_HIDDEN = 8192, 16384
"""A row of more numbers does not fit the registers of a program."""

MAX_OUTPUT_ERROR, MAX_GRADIENT_ERROR = 0.025, 0.1
"""Distances of results by kernels from torch's, both in bfloat16, that are taken for rounding.

Over three times the largest of 24 networks in Triton's interpreter, 0.0074 and 0.026; 24 others had
at most 0.0076 and 0.032 (`tests/models/interpreted_check.py`). Of three layers, kernels without
biases, mask, leading tokens, or gradients of values or residuals exceed one of them. Of one layer,
missing gradients of residuals do not (0.045 to 0.07).
"""

_logger = logging.getLogger(__name__)


class FastTransformer(Transformer):
    """`Transformer` that computes with kernels on a GPU in bfloat16 where they fit it.

    Without positions the first layer's queries, keys and values depend on the token alone, so they
    are computed for each token of a small vocabulary, not for each place of the sequences.

    Attributes:
        uses_kernels: Whether it does; False to compare it with torch's operations.
    """

    uses_kernels = True

    def forward(
        self, tokens_EBT: Tensor, *, leading: int = 1, watch: Watch | None = None
    ) -> Tensor:
        """Return outputs; arguments and result as of `Transformer`."""
        if watch is not None or not self._fits(tokens_EBT):
            return super().forward(tokens_EBT, leading=leading, watch=watch)
        projected = None
        if self._has_small_table(tokens_EBT):
            self._check_leading(leading)
            x, projected = self._from_table(tokens_EBT)
        else:
            x = self._embedded(tokens_EBT, leading).to(torch.bfloat16)
        seen = Seen(tokens_EBT.shape[2], self.config.causal, leading, x)
        top = self.config.layers - 1
        last_alone = self.config.readout == "last" and self.depths is None
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, TransformerBlock)
            last = last_alone and layer == top  # as in `Transformer.forward`
            if layer > 0 or projected is None:
                projected = _projected(block.attention, x, last)
            elif last:
                projected = projected._replace(query=projected.query[:, :, -1:])
            y = fused_block(block, x[:, :, -1:] if last else x, projected, seen)
            x = y if self.depths is None else torch.where(self.has_LE111[layer], y, x)
        return self._read_out(x)

    def check_kernels(self, tokens_EBT: Tensor, *, leading: int = 1) -> None:
        """Compare the kernels with torch's operations on a batch; where they differ use the latter.

        Gradients are dropped. What a compiler or a GPU does wrong would not be seen in a training:
        it would learn something else.

        Args:
            tokens_EBT: Tokens, shape (E, B, T).
            leading: How many equal tokens the first position stands for.
        """
        if not self._fits(tokens_EBT):
            return
        try:
            found = self._measured(tokens_EBT, leading)
            self.uses_kernels = False
            expected = self._measured(tokens_EBT, leading)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, or of what it needs
            self.uses_kernels = False
            why = f"{type(error).__name__}: {first_line(error)}"
            _logger.warning(f"kernels cannot be used ({why}); torch's operations are slower")
            return
        outputs, gradients = (
            distance(ours, theirs) for ours, theirs in zip(found, expected, strict=True)
        )
        self.uses_kernels = outputs <= MAX_OUTPUT_ERROR and gradients <= MAX_GRADIENT_ERROR
        if not self.uses_kernels:
            _logger.warning(
                f"kernels give other outputs ({outputs:.2g} of their size) or gradients "
                f"({gradients:.2g}) than torch's operations, which are used and are slower"
            )

    def _measured(self, tokens_EBT: Tensor, leading: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs, and gradients of all parameters, which then have none."""
        outputs = self(tokens_EBT, leading=leading)
        outputs.float().square().sum().backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters()]
        self.zero_grad()
        return [outputs.detach()], gradients

    def _fits(self, tokens_EBT: Tensor) -> bool:
        """Return whether the kernels are made for such a network, and compute where tokens are."""
        config = self.config
        kind = config.attention, config.norm, config.activation
        return (
            self.uses_kernels
            and has_kernels(tokens_EBT.device)
            and self.compute == torch.bfloat16
            and kind == ("softmax", "post", "relu")
            and config.width <= MAX_WIDTH
            and config.hidden <= MAX_HIDDEN
        )

    def _has_small_table(self, tokens_EBT: Tensor) -> bool:
        """Return whether to compute the first layer for each token is less work."""
        config = self.config
        # Sums over the places of a token are products with a matrix of zeros and ones, whose
        # other side is the vocabulary where it is the width in the products that are saved.
        most = min(MAX_TABLE, config.width // 2, tokens_EBT[0].numel())
        return config.positions == "none" and config.vocabulary <= most

    def _from_table(self, tokens_EBT: Tensor) -> tuple[Tensor, "Projected"]:
        """Return embeddings, and what the first layer's attention reads."""
        block = self.blocks[0]
        assert isinstance(block, TransformerBlock)
        rows = TokenRows(tokens_EBT, self.config.vocabulary, torch.bfloat16)
        table_EVD = self.embedding.weight.to(torch.bfloat16)
        parts = _products(table_EVD, _matrices(block.attention))
        return rows.of(table_EVD), Projected(*map(rows.of, parts))


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return how far tensors are from others together, as a share of their norm."""
    pairs = list(zip(found, expected, strict=True))
    apart = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    size = sum(float(other.double().square().sum()) for _, other in pairs)
    return math.sqrt(apart / size) if size else math.inf


class Projected(NamedTuple):
    """What attention reads, each (E, B, positions, width).

    Attributes:
        query: Queries of all positions, or of the last alone.
        key: Keys of all positions.
        value: Values of all positions.
    """

    query: Tensor
    key: Tensor
    value: Tensor


class TokenRows:
    """Which row of a table each place of the sequences has.

    Args:
        tokens_EBT: Tokens, (E, B, T).
        vocabulary: Number of tokens, V.
        kind: Type of the tables.
    """

    def __init__(self, tokens_EBT: Tensor, vocabulary: int, kind: torch.dtype) -> None:
        members = len(tokens_EBT)
        tokens_E1N = tokens_EBT.reshape(members, 1, -1)
        self.shape = tokens_EBT.shape
        self.is_token_EVN = torch.zeros(
            members, vocabulary, tokens_E1N.shape[2], dtype=kind, device=tokens_EBT.device
        ).scatter_(1, tokens_E1N, 1)
        first_E1 = torch.arange(members, device=tokens_EBT.device).unsqueeze(1) * vocabulary
        self.places_EN = tokens_E1N.squeeze(1) + first_E1

    def of(self, table_EVD: Tensor) -> Tensor:
        """Return the rows of a table, (E, B, T, D)."""
        rows: Tensor = _Rows.apply(table_EVD, self.places_EN, self.is_token_EVN)
        return rows.unflatten(1, self.shape[1:])


class _Rows(torch.autograd.Function):
    """Rows of a table, whose gradients are added up by a product, always in the same order.

    A gradient that is not finite therefore spoils all rows of its member, and of no other.
    """

    @staticmethod
    def forward(ctx: Any, table_EVD: Tensor, places_EN: Tensor, is_token_EVN: Tensor) -> Tensor:
        ctx.save_for_backward(is_token_EVN)
        return functional.embedding(places_EN, table_EVD.flatten(0, 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (is_token_EVN,) = ctx.saved_tensors
        return torch.bmm(is_token_EVN, gradients[0]), None, None


def _matrices(attention: SelfAttention) -> list[Tensor]:
    return [layer.weight for layer in (attention.query, attention.key, attention.value)]


def _projected(attention: SelfAttention, x: Tensor, last: bool) -> Projected:
    """Return what attention reads of activations; queries of the last position alone if `last`."""
    weights = _matrices(attention)
    if not last:
        return Projected(*_products_of_places(x, weights))
    return Projected(attention.query.product(x[:, :, -1:]), *_products_of_places(x, weights[1:]))


def fused_block(block: TransformerBlock, x: Tensor, projected: Projected, seen: Seen) -> Tensor:
    """Return what a post-norm block gives by the kernels, which add the biases.

    Args:
        block: Attention, MLP and their layer norms.
        x: Activations of the positions that have queries, (E, B, positions, width).
        projected: Queries, keys and values.
        seen: Which keys a query sees.
    """
    from joma.models.full_speed import _row_kernels as kernels
    from joma.models.full_speed._dropping_kernel import Drop
    from joma.models.full_speed._wide_attention_kernel import attended

    drop = Drop.nothing(x)
    attention, mlp = block.attention, block.mlp
    if seen.length <= MAX_POSITIONS:
        kind = {"heads": attention.heads, "leading": seen.leading, "causal": seen.causal}
        y = attended(*projected, **kind)
    else:
        y = attention.attend(*projected, seen)
    bias = None
    if attention.projection is not None:
        y, bias = attention.projection.product(y), bias_of(attention.projection)
    norm = block.norm_attention
    x = kernels.sum_norm(y, bias, x, norm.weight, norm.bias, drop, "attended")
    hidden = kernels.relu(mlp.lower.product(x), bias_of(mlp.lower), drop, "hidden")
    norm, y = block.norm_mlp, mlp.upper.product(hidden)
    return kernels.sum_norm(y, bias_of(mlp.upper), x, norm.weight, norm.bias, drop, "mlp")


class _Products(torch.autograd.Function):
    """Products of the same rows with several matrices, whose gradients are added up in one place.

    Added by autograd, each but the first would be written once and read twice more.
    """

    @staticmethod
    def forward(ctx: Any, rows_ENI: Tensor, *weights_EIO: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows_ENI, *weights_EIO)
        return tuple(torch.bmm(rows_ENI, weight) for weight in weights_EIO)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        rows_ENI, *weights = ctx.saved_tensors
        first, *others = zip(gradients, weights, strict=True)
        d_rows = torch.bmm(first[0], first[1].mT)
        for gradient, weight in others:
            d_rows.baddbmm_(gradient, weight.mT)
        return d_rows, *(torch.bmm(rows_ENI.mT, gradient) for gradient in gradients)


def _products(rows_ENI: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the product of rows with each matrix."""
    return _Products.apply(rows_ENI, *(weight.to(rows_ENI.dtype) for weight in weights))


def _products_of_places(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the product of x, (E, B, T, width), with each matrix."""
    return [y.unflatten(1, x.shape[1:3]) for y in _products(x.flatten(1, 2), weights)]
