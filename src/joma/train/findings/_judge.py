"""Every rule on the series of one training."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from joma.train.findings._finding import SEVERITIES, Finding, Judgement
from joma.train.findings._rules import (
    attention_bounce,
    attention_collapse,
    dead_layers,
    diverged_loss,
    end_of,
    learning_rate_too_high,
    low_rank_gradients,
    rank_collapse,
)
from joma.train.findings._series import Series


def judge(series: Iterable[Series]) -> Judgement:
    """Return what the recorded series of one training say, of layers and of the whole.

    Single heads are not judged: in good trainings, too, some rest on one token.
    """
    known: dict[str, list[Series]] = defaultdict(list)
    for one in series:
        if one.head is None:
            known[one.name].append(one)
    found = [diverged_loss(one.steps, one.values) for one in known["loss"]]
    even = {one.module: float(one.values[-1]) for one in known["attention_uniform"]}
    found += [
        _placed(attention_collapse(one.steps, one.values, even[one.module], layer=one.layer), one)
        for one in known["attention_entropy"]
        if even.get(one.module, 0) > 0
    ]
    found += [
        _placed(attention_bounce(one.steps, one.values, layer=one.layer), one)
        for one in known["attention_entropy"]
    ]
    found += [
        _placed(rank_collapse(one.steps, one.values, what=one.module, layer=one.layer), one)
        for one in known["stable_rank"]
        if one.layer is not None
    ]
    found += _of_gradients(known)
    found += _of_moves(known["update_relative"], known["learning_rate"])
    rest = sorted((one for one in found if one is not None), key=_order)
    return Judgement(tuple(rest))


def _order(finding: Finding) -> tuple[int, int]:
    return -SEVERITIES.index(finding.severity), finding.step


def _placed(finding: Finding | None, one: Series) -> Finding | None:
    """Return the finding with its module; where a layer has several attentions it names which."""
    if finding is None:
        return None
    which = one.kind if one.kind not in ("", "self") else ""
    if "#" in one.module:
        which = f"{which} pass {one.module.rpartition('#')[2]}".strip()
    sentence, layer = finding.sentence, f"layer {one.layer}"
    if which:
        sentence = sentence.replace(layer, f"{layer} ({which})", 1)
    return replace(finding, module=one.module, sentence=sentence)


def _of_gradients(known: Mapping[str, list[Series]]) -> list[Finding | None]:
    found: list[Finding | None] = []
    norms: dict[int, list[Series]] = defaultdict(list)
    for one in known["gradient_norm"]:
        if one.layer is not None:
            norms[one.layer].append(one)
    steps = _common([one.steps for ones in norms.values() for one in ones])
    if steps is not None:
        found += dead_layers(
            steps,
            {
                layer: np.sqrt(sum(_at(one, steps) ** 2 for one in ones))
                for layer, ones in norms.items()
            },
        )
    prefix = "gradient_energy_"
    ranks = sorted(int(name.removeprefix(prefix)) for name in known if name.startswith(prefix))
    for rank in ranks:
        ones = known[f"{prefix}{rank}"]
        steps = _common([one.steps for one in ones])
        if steps is None:
            continue
        smaller = len(known["gradient_stable_rank"]) - len(ones)
        shares = {one.module: _at(one, steps) for one in ones}
        one = low_rank_gradients(steps, shares, rank, left_out=max(smaller, 0))
        found.append(one)
        if one is not None:
            break  # what holds at this rank holds at every higher one
    return found


def _of_moves(moves: Sequence[Series], rates: Sequence[Series]) -> list[Finding | None]:
    most: dict[int, Series] = {}
    for one in moves:
        if one.layer is None:
            continue
        before = most.get(one.layer)
        end, other = end_of(one.values), None if before is None else end_of(before.values)
        if before is None or (end or 0) > (other or 0):
            most[one.layer] = one
    rate = float(rates[0].values[-1]) if rates else None
    return [
        _placed(learning_rate_too_high(one.steps, one.values, layer=layer, learning_rate=rate), one)
        for layer, one in sorted(most.items())
    ]


def _common(steps: Sequence[NDArray[np.int64]]) -> NDArray[np.int64] | None:
    """Steps that all have."""
    if not steps:
        return None
    common = steps[0]
    for other in steps[1:]:
        common = np.intersect1d(common, other)
    return common if len(common) else None


def _at(one: Series, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    return one.values[np.searchsorted(one.steps, steps)]
