"""How far one layer is from Theorem 1 of JoMA, measured while a model runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from joma.common.float32 import float32_products
from joma.probes import AttentionCall
from joma.train.monitor._record import Row

KEYS = 128
"""Tokens of the first sequence on which Theorem 1 is measured."""
_STATE = tuple(f"theorem1.{name}" for name in ("first", "predicted", "own", "attention"))


class Theorem1:
    """How far a layer is from Theorem 1 for softmax attention, the joint dynamics of JoMA.

    The theorem says that logits grow with the MLP's weights: dz_l is proportional to
    d Σ_k v_lk² − b̄_l d Σ_k ‖v_k‖², where v_lk = w_k·u_l is how hidden node k, with weights w_k of
    the MLP's lower layer, reads token l, and b̄ the attention. On a real layer u_l is what enters
    the block at position l of the first sequence (128 tokens at most), z the scaled scores of
    a head's query with the keys it sees, b̄ its attention row, between two measurements the mean of
    both; positions that the same enters are copies of one token. What z should have grown by is
    added up from one to the next. Since the learning rates of the two sides are not known, the two
    growths since the first one are compared by their correlation over the keys, averaged over all
    query rows that see 8 keys or more and all heads; the residual is 1 − that mean: 0 where the law
    holds, 1 where the two have nothing to do with each other, 2 where they are opposite.

    The theorem is of gradient descent and one query; its value matrix is the identity, its
    embedding orthogonal, there is no norm between its attention and MLP, and what is learned goes
    through the MLP alone. A real layer breaks all of these, and the residual says how much that
    matters.

    Args:
        layer: The layer that is measured.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self._stream: Tensor | None = None
        self._seen: tuple[str, Tensor, Tensor, Tensor] | None = None
        self._first_HTS: Tensor | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        self._predicted_HTS: Tensor | None = None

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what was added up so far, by name."""
        if self._last is None or self._first_HTS is None or self._predicted_HTS is None:
            return
        tensors = (self._first_HTS, self._predicted_HTS, *self._last)
        yield from zip(_STATE, tensors, strict=True)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state` gave; what else is in it is left alone."""
        if all(name in state for name in _STATE):
            first, predicted, own, attention = (state[name].clone() for name in _STATE)
            self._first_HTS, self._predicted_HTS, self._last = first, predicted, (own, attention)

    @contextmanager
    def following(self, block: nn.Module) -> Iterator[None]:
        """Keep what enters the layer's block until the scores of its attention are seen."""
        self._seen = self._stream = None

        def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            stream = next(x for x in given if isinstance(x, Tensor) and x.is_floating_point())
            if self._seen is None and stream.ndim == 3 and not stream.is_nested:
                self._stream = stream

        handle = block.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            self._stream = None  # an activation of the model, large

    def see(self, call: AttentionCall) -> None:
        """Keep the scores of the first sequence."""
        stream = self._stream
        if self._seen is not None or stream is None:
            return
        if call.scores is not None:
            scores_HTS = call.scores[0].float()[:, :KEYS, :KEYS]
        else:
            query_HTD, key_HSD = (x[0].float()[:, :KEYS] for x in (call.query, call.key))
            key_HSD = key_HSD.repeat_interleave(len(query_HTD) // len(key_HSD), 0)
            scale = query_HTD.shape[-1] ** -0.5 if call.scale is None else call.scale
            with _in_float32(query_HTD.device):  # growth is a small difference
                scores_HTS = scale * query_HTD @ key_HSD.mT
        # (B, T, d), or (T, B, d) where sequences come second
        batch_first = stream.shape[:2] == (call.query.shape[0], call.query.shape[2])
        inputs_TD = (stream[0] if batch_first else stream[:, 0])[:KEYS].float()
        self._seen = call.module, scores_HTS, _seen_keys(call).expand_as(scores_HTS), inputs_TD

    def rows(self, lower_KD: Tensor) -> list[Row]:
        """Return the residual, from the second measurement on.

        Args:
            lower_KD: The lower MLP weight of the layer.
        """
        if self._seen is None:
            return []
        module, scores_HTS, seen_HTS, inputs_TD = self._seen
        with _in_float32(scores_HTS.device):
            own_S = (inputs_TD @ lower_KD.float().mT).square().sum(-1)
            attention_HTS = scores_HTS.masked_fill(~seen_HTS, -torch.inf).softmax(-1)
            before, self._last = self._last, (own_S, attention_HTS)
            first_HTS = self._first_HTS
            if before is None or first_HTS is None or first_HTS.shape != scores_HTS.shape:
                self._first_HTS, self._predicted_HTS = scores_HTS, torch.zeros_like(scores_HTS)
                return []
            assert self._predicted_HTS is not None, "begun with the first scores"
            mean_HTS = (before[1] + attention_HTS) / 2
            self._predicted_HTS += _predicted_growth(
                own_S - before[0], mean_HTS, seen_HTS, inputs_TD
            )
            value = _residual(scores_HTS - first_HTS, self._predicted_HTS, seen_HTS)
        return [] if value is None else [Row("theorem1_residual", value, module, self.layer)]


@contextmanager
def _in_float32(device: torch.device) -> Iterator[None]:
    """Compute products of float32 as they are, in a model that may run in autocast."""
    with torch.autocast(device.type, enabled=False), float32_products("ieee"):
        yield


def _seen_keys(call: AttentionCall) -> Tensor:
    """Return which keys the rows of the first sequence see, (H or 1, T, S), bool.

    Query t stands at place t + S − T among all S keys; a window reaches to both sides of it.
    """
    T, S = (min(x.shape[2], KEYS) for x in (call.query, call.key))
    offset = call.key.shape[2] - call.query.shape[2]
    seen = torch.ones(1, T, S, dtype=torch.bool, device=call.query.device)
    if call.causal:
        seen = seen.tril(offset)
    if call.window is not None:
        seen = seen.triu(offset + 1 - call.window).tril(offset + call.window - 1)
    if call.padding is not None:
        seen = seen & call.padding[0, :S]
    if call.scores is not None:
        seen = seen & (call.scores[0, :, :T, :S] > -5e3)  # as models hide keys
    if call.mask is not None:
        mask = call.mask[(None,) * (4 - call.mask.ndim)][0, :, :T, :S]
        seen = seen & (mask if mask.dtype == torch.bool else mask > -1e4)
    return seen


def _predicted_growth(
    grown_S: Tensor, attention_HTS: Tensor, seen_HTS: Tensor, inputs_SD: Tensor
) -> Tensor:
    """Return the growth of every query's scores with the keys it sees (Theorem 1), at factor 1.

    That is, dz of Eqn 17, not the growth of Eqn 18's right side, for which b̄ must not move at all:
    the larger Σ_k ‖v_k‖² is to begin with, the less that can be had.

    Args:
        grown_S: By how much Σ_k v_lk² of each key has grown.
        attention_HTS: Attention of the queries meanwhile, 0 on keys they do not see.
        seen_HTS: Which keys they see.
        inputs_SD: Tokens of the keys; b̄ is of all copies of a token, which count once.
    """
    _, number_S = inputs_SD.unique(dim=0, return_inverse=True)
    same_SS = (number_S.unsqueeze(-1) == number_S).to(attention_HTS.dtype)
    copies_HTS = (seen_HTS.to(same_SS.dtype) @ same_SS).clamp(min=1)
    total_HT1 = (grown_S * seen_HTS / copies_HTS).sum(-1, keepdim=True)
    return grown_S - total_HT1 * (attention_HTS @ same_SS)


def _residual(grown_HTS: Tensor, predicted_HTS: Tensor, seen_HTS: Tensor) -> float | None:
    """Return 1 − mean correlation over seen keys, of rows that see 8 or more; None if none grew."""
    count_HT1 = seen_HTS.sum(-1, keepdim=True)

    def centred(values: Tensor) -> Tensor:
        values = values.double().where(seen_HTS, 0)
        return (values - values.sum(-1, keepdim=True) / count_HT1).where(seen_HTS, 0)

    left, right = centred(grown_HTS), centred(predicted_HTS)
    sizes = torch.linalg.vector_norm(left, dim=-1) * torch.linalg.vector_norm(right, dim=-1)
    correlation_HT = (left * right).sum(-1) / sizes
    counted = (sizes > 0) & (count_HT1.squeeze(-1) >= 8)
    return 1 - float(correlation_HT[counted].mean()) if bool(counted.any()) else None
