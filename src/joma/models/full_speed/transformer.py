"""The networks of Table 1 by kernels: fewer passes over activations between the products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from joma.models.language import bias_of
from joma.models.transformer import LayerWatch, Seen, Transformer, TransformerBlock

LONGEST = 64
"""So many positions fit a program of the attention kernel."""


class FastTransformer(Transformer):
    """`Transformer` that computes with kernels on a GPU in bfloat16 where they fit it.

    Attributes:
        uses_kernels: Whether it does; False to compare it with torch's operations.
    """

    uses_kernels = True

    def products(self) -> list[str]:
        """Return the names of the matrices of the blocks; the kernels keep biases in float32."""
        shapes = {name: p.shape for name, p in self.named_parameters()}
        return [name for name in super().products() if shapes[name][1] > 1]

    def _through(
        self,
        block: TransformerBlock,
        x: Tensor,
        seen: Seen,
        last: bool,
        watch: LayerWatch | None,
    ) -> Tensor:
        if watch is None and self._fits(x):
            return fused_block(block, x, seen, last)
        return super()._through(block, x, seen, last, watch)

    def _fits(self, x: Tensor) -> bool:
        """Return whether the kernels are made for such a network, given activations."""
        config = self.config
        kind = config.attention, config.norm, config.activation
        return (
            self.uses_kernels
            and x.is_cuda
            and self.compute == x.dtype == torch.bfloat16
            and kind == ("softmax", "post", "relu")
            and x.shape[2] <= LONGEST
        )


def fused_block(block: TransformerBlock, x: Tensor, seen: Seen, last: bool) -> Tensor:
    """Return what a post-norm block gives by the kernels, which add the biases.

    Args:
        block: Attention, MLP and their layer norms.
        x: Activations, (E, B, T, width).
        seen: Which keys a query sees.
        last: Whether only the last position counts.
    """
    from joma.models.full_speed import _row_kernels as kernels
    from joma.models.full_speed._dropping_kernel import Drop
    from joma.models.full_speed._wide_attention_kernel import attended

    drop = Drop.nothing(x)
    attention, mlp = block.attention, block.mlp
    residual = x[:, :, -1:] if last else x
    weights = [layer.weight for layer in (attention.query, attention.key, attention.value)]
    q: Tensor
    if last:
        q, (k, v) = attention.query.product(residual), _products(x, weights[1:])
    else:
        q, k, v = _products(x, weights)
    y = attended(q, k, v, heads=attention.heads, leading=seen.leading, causal=seen.causal)
    bias = None
    if attention.projection is not None:
        y, bias = attention.projection.product(y), bias_of(attention.projection)
    norm = block.norm_attention
    x = kernels.sum_norm(y, bias, residual, norm.weight, norm.bias, drop, "attended")
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
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, ...]:
        rows_ENI, *weights = ctx.saved_tensors
        first, *others = zip(gradients, weights, strict=True)
        d_rows = torch.bmm(first[0], first[1].mT)
        for gradient, weight in others:
            d_rows.baddbmm_(gradient, weight.mT)
        return d_rows, *(torch.bmm(rows_ENI.mT, gradient) for gradient in gradients)


def _products(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the product of x, (E, B, T, width), with each matrix."""
    found = _Products.apply(x.flatten(1, 2), *(weight.to(x.dtype) for weight in weights))
    return tuple(y.unflatten(1, x.shape[1:3]) for y in found)
