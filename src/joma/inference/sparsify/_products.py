"""Products with some rows of a matrix, other rows for every token, that read no other row.

Indexing a matrix and multiplying afterwards would read and write the rows twice more than needed.
`embedding_bag` is a weighted sum of rows that copies none, and its gradient by the weights is the
product of every row with a vector: these two are all that a gathered MLP needs. On a GPU kernels do
the same, for torch has no such gradient in bfloat16 there. Shapes depend on shapes alone and no
number is brought to the host, so that a CUDA graph can capture both.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from joma.kernels.choice import has_kernels

_ROWS_AT_ONCE = 64
"""Rows that one worker adds up; a token's rows are dealt to several."""

_SUM = 0
"""The mode of `embedding_bag` that adds up."""

_COPIED = 1 << 26
"""Numbers of rows that are copied at a time, on GPUs that run no kernels."""


def largest(scores_TN: Tensor, keep: int) -> Tensor:
    """Return the numbers of the `keep` largest scores of every token, (T, k).

    On a CPU they are in rising order, so that rows are read in the order they lie in memory.
    """
    index_Tk = scores_TN.topk(keep, sorted=False).indices
    return index_Tk.sort(-1).values if index_Tk.device.type == "cpu" else index_Tk


def rows_times(rows_Nd: Tensor, tokens_Td: Tensor, index_Tk: Tensor) -> Tensor:
    """Return the product of each token with its rows, (T, k): out[t, j] = rows[index[t, j]] · x[t].

    Args:
        rows_Nd: The matrix, its rows contiguous.
        tokens_Td: The tokens.
        index_Tk: Numbers of the rows of every token, int64.
    """
    if _by_kernels(rows_Nd, tokens_Td):
        from joma.inference.sparsify import _rows_kernel  # Triton comes with CUDA builds alone

        return _rows_kernel.rows_times(rows_Nd, tokens_Td, index_Tk)
    if _copies(rows_Nd):
        return _token_by_token(
            lambda x_Td, own_Tkd: (own_Tkd @ x_Td.unsqueeze(2)).squeeze(2),
            *(tokens_Td, rows_Nd, index_Tk),
        )
    tokens, kept = index_Tk.shape
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        tokens_Td.contiguous(),
        rows_Nd,
        index_Tk.reshape(-1),
        torch.arange(tokens, device=index_Tk.device) * kept,
        torch.arange(tokens * kept, device=index_Tk.device) // kept,
        _SUM,
    ).view(tokens, kept)


def times_rows(weights_Tk: Tensor, rows_Nd: Tensor, index_Tk: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, (T, d): out[t] = Σⱼ w[t, j] rows[index[t, j]].

    Args:
        weights_Tk: The weights.
        rows_Nd: The matrix, its rows contiguous.
        index_Tk: Numbers of the rows of every token, int64.
    """
    if _by_kernels(rows_Nd, weights_Tk):
        from joma.inference.sparsify import _rows_kernel  # Triton comes with CUDA builds alone

        return _rows_kernel.times_rows(weights_Tk, rows_Nd, index_Tk)
    if _copies(rows_Nd):
        return _token_by_token(
            lambda w_Tk, own_Tkd: (w_Tk.unsqueeze(1) @ own_Tkd).squeeze(1),
            *(weights_Tk, rows_Nd, index_Tk),
        )
    tokens, kept = index_Tk.shape
    starts = torch.arange(0, kept, _ROWS_AT_ONCE, device=index_Tk.device)
    begins = torch.arange(tokens, device=index_Tk.device).unsqueeze(1) * kept + starts
    parts = functional.embedding_bag(
        index_Tk.reshape(-1),
        rows_Nd,
        begins.reshape(-1),
        per_sample_weights=weights_Tk.reshape(-1),
        mode="sum",
    )
    return parts.view(tokens, len(starts), -1).sum(1)


def _by_kernels(rows_Nd: Tensor, given: Tensor) -> bool:
    """Return whether kernels multiply these: on a GPU, with rows in order and no gradients."""
    if not rows_Nd.is_cuda or rows_Nd.dtype == torch.float64 or rows_Nd.stride(1) != 1:
        return False
    if torch.is_grad_enabled() and (rows_Nd.requires_grad or given.requires_grad):
        return False
    return has_kernels(rows_Nd.device)


def _copies(rows_Nd: Tensor) -> bool:
    """Return whether torch can only multiply copies of these rows."""
    return rows_Nd.is_cuda and rows_Nd.dtype == torch.bfloat16


def _token_by_token(
    multiply: Callable[[Tensor, Tensor], Tensor], given: Tensor, rows_Nd: Tensor, index_Tk: Tensor
) -> Tensor:
    """Return what is made of some tokens and copies of their rows, some tokens at a time."""
    together = max(1, _COPIED // max(1, index_Tk.shape[1] * rows_Nd.shape[1]))
    pieces = zip(given.split(together), index_Tk.split(together), strict=True)
    return torch.cat([multiply(some, rows_Nd[index]) for some, index in pieces])
