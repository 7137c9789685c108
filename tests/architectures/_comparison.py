"""What joma measures of a model, in the form of the reference, and how far the two are apart."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from joma.probes import AttentionCall, watch_attention
from tests.architectures import _layouts, _reference


class Entropies:
    """Collects mean entropies of real queries by key; to be given to `watch_attention`."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self._rows: dict[str, list[Tensor]] = {}

    def __call__(self, call: AttentionCall) -> None:
        statistics = call.statistics()
        seen_BT = ~statistics.logsumexp.isneginf().all(1)  # a row that sees no key is in no mean
        rows = statistics.entropy.transpose(1, 2)[seen_BT]
        if call.rows is not None:
            assert not (seen_BT & ~call.rows).any()
        assert call.name == call.module + (f"#{call.pass_index}" if call.pass_index else "")
        assert self.kinds.setdefault(call.name, call.kind) == call.kind
        self._rows.setdefault(call.name, []).append(rows.double())

    def means(self) -> dict[str, Tensor]:
        """Mean over rows for each head, (H,), by key."""
        return {key: torch.cat(parts).mean(0) for key, parts in self._rows.items()}


def watched(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Entropies, list[Tensor]]:
    """Entropies while the model runs watched, and all it returns."""
    found = Entropies()
    with torch.no_grad(), watch_attention(model, found):
        outputs = model(**inputs)
    return found, tensors(outputs)


def tensors(outputs: Any) -> list[Tensor]:
    """All tensors of what a model returns, however nested."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping):
        outputs = outputs.values()
    elif not isinstance(outputs, tuple | list):
        return []  # a cache
    return [tensor for part in outputs for tensor in tensors(part)]


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Between means by key; infinite where a key or a head is in one of the two alone."""
    if found.keys() != expected.keys():
        return float("inf")
    pairs = [(found[key].double(), expected[key].double()) for key in expected]
    if any(one.shape != other.shape for one, other in pairs):
        return float("inf")
    return max(float((one - other).abs().max()) for one, other in pairs)


def rank_errors(
    rows: Iterable[tuple[str, float, float | None]],
    model: nn.Module,
    *,
    without: Collection[str] = (),
) -> dict[str, float]:
    """By how much each stable rank lies outside of its bound around numpy's, by weight.

    Args:
        rows: key of the weight, value and bound.
        model: whose weights were measured.
        without: roles that need not have rows.

    Raises:
        AssertionError: a matrix of attention or of an MLP has no row, or several.
    """
    found: dict[tuple[str, int | None], list[tuple[str | None, float, float | None]]] = {}
    for key, value, bound in rows:
        path, expert, role = parsed(key)
        found.setdefault((path, expert), []).append((role, value, bound))
    errors = {}
    for name, role, expert, matrix in _layouts.matrices(model):
        if role in without:
            continue
        path = name.removesuffix(".weight")
        own = [row for row in found.get((path, expert), []) if row[0] in (None, role)]
        assert len(own) == 1, f"{path} has {len(own)} rows as {role} of expert {expert}, not 1"
        _, value, bound = own[0]
        assert bound is not None
        errors[f"{path} {role} {expert}"] = abs(value - _reference.stable_rank(matrix)) - bound
    return errors


def product_errors(
    rows: Iterable[tuple[str, int, float]], model: nn.Module
) -> dict[tuple[str, int], float]:
    """Relative errors of stable ranks of Wqᵀ·Wk, by module and head.

    Args:
        rows: key of the attention, number of the head (−1 for their mean) and value.
        model: whose weights were measured.

    Raises:
        AssertionError: an attention whose queries and keys are read from the same has no rows.
    """
    found: dict[str, dict[int, float]] = {}
    for key, head, value in rows:
        found.setdefault(key, {})[head] = value
    made: dict[str, dict[str, Tensor]] = {}
    for name, role, _, matrix in _layouts.matrices(model):
        if role in ("query", "key"):
            made.setdefault(name.removesuffix(".weight").rpartition(".")[0], {})[role] = matrix
    errors = {}
    for path, parts in made.items():
        if parts.keys() != {"query", "key"} or parts["query"].shape[1] != parts["key"].shape[1]:
            continue  # keys of another layer, or latent attention
        own = found.get(f"{path}[query·key]", {})
        heads = max(own, default=-1) + 1
        assert own.keys() == {-1, *range(heads)}, f"{path} has rows for heads {sorted(own)}"
        queries = parts["query"].unflatten(0, (heads, -1))
        keys = parts["key"].unflatten(0, (-1, queries.shape[1]))
        keys = keys.repeat_interleave(heads // len(keys), 0)
        ranks = [
            _reference.stable_rank(query.double().T @ key.double())
            for query, key in zip(queries, keys, strict=True)
        ]
        ranks.append(sum(ranks) / len(ranks))
        for head, rank in zip([*range(heads), -1], ranks, strict=True):
            errors[path, head] = abs(own[head] - rank) / rank
    return errors


def parsed(key: str) -> tuple[str, int | None, str | None]:
    """Path, expert and role of a weight's key: "mlp.experts[3].gate_up_proj[mlp_up]"."""
    marks = re.findall(r"\[(.*?)\]", key)
    expert = next((int(mark) for mark in marks if mark.isdigit()), None)
    role = next((mark for mark in marks if not mark.isdigit()), None)
    return re.sub(r"\[.*?\]", "", key), expert, role
