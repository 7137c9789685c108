"""Rules on layers that do not learn: frozen, forgotten, dead, tied, or of one direction."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from joma.train.findings.finding import NotJudged, Severity, found
from joma.train.findings.recorded import (
    LAST,
    Recorded,
    RecordedSeries,
    Verdict,
    at_steps,
    common_steps,
    end_of,
    not_enough,
    place_name,
    since,
)

ONE_DIRECTION = 1.5
"""Stable rank below which one direction holds two thirds of ‖W‖_F²."""
OF_OTHERS = 0.5
"""Share of the other layers' stable rank below which a weight stands out."""
NO_GRADIENT = 1e-4
"""Share of the other layers' gradient below which a layer does not learn."""
DEAD_NODES = 0.9
"""Share of an MLP's hidden nodes that are near zero at every token."""
MOVES = 2
"""Steps whose moves must have been seen before it is said that a weight does not move."""

_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")


def block_of(module: str) -> str:
    """Return the path of a block: a module's path up to the first number in it."""
    found = _BLOCK.match(module)
    return found.group() if found else module


def judge_untrained(recorded: Recorded) -> Verdict:
    """Layers that are not trained, and why: frozen, not in the optimizer, or without gradients.

    - `frozen_layer`: no matrix of the layer requires a gradient, while another layer's do. A
      warning; a note where it is the first layers of the model or half of them, which is done on
      purpose.
    - `not_optimized`: a matrix requires a gradient and has one, and yet no step that was seen moved
      it, and its norm has not changed, while others moved. An optimizer that is known does not hold
      it.
    - `dead_layer`: matrices of the layer require gradients and never had one, or in the last 3
      measurements less than 10⁻⁴ of the other layers' median.

    Steps at which nothing moves (a learning rate of 0 while warming up) count for nothing.
    """
    required = recorded.by_module("requires_grad")
    if not required:
        needs = "matrices in layers, of which none was found"
        kinds = ("frozen_layer", "not_optimized", "dead_layer")
        yield from (NotJudged(kind, needs) for kind in kinds)
        return
    blocks: dict[str, list[RecordedSeries]] = defaultdict(list)
    for module, one in required.items():
        blocks[block_of(module)].append(one)
    trained = {block for block, ones in blocks.items() if any(one.values[-1] for one in ones)}
    yield from _frozen(blocks, trained)
    yield from _not_moved(recorded, required)
    yield from _without_gradient(recorded, required, blocks)


def _frozen(blocks: Mapping[str, Sequence[RecordedSeries]], trained: set[str]) -> Verdict:
    if not trained:
        return
    stacks: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for block, ones in blocks.items():
        if ones[0].layer is not None:
            stacks[block.rpartition(".")[0]].append((ones[0].layer, block))
    for stack in stacks.values():
        stack.sort()
        frozen = [block for _, block in stack if block not in trained]
        first_ones = [block for _, block in stack[: len(frozen)]]
        if len(frozen) == len(stack):
            continue  # a whole tower, as of a model that is only read
        on_purpose = frozen == first_ones or 1 < len(frozen) >= len(stack) / 2
        severity: Severity = "note" if on_purpose else "warning"
        for layer, block in stack:
            if block in frozen:
                step, evidence = (
                    int(blocks[block][0].steps[-1]),
                    {"matrices": float(len(blocks[block]))},
                )
                yield found("frozen_layer", severity, step, evidence, block, layer)


def _not_moved(recorded: Recorded, required: Mapping[str, RecordedSeries]) -> Verdict:
    moves = {
        module: one
        for module, one in recorded.by_module("update_relative").items()
        if module in required and required[module].values[-1]
    }
    if len(moves) < 2:
        yield NotJudged("not_optimized", "update_relative of at least two weights")
        return
    steps = common_steps(list(moves.values()))
    table = np.array([at_steps(one, steps) for one in moves.values()])
    moving = (table > 0).mean(axis=0) >= 0.5  # of most weights: the learning rate is not 0
    if moving.sum() < MOVES:
        needs = f"{MOVES} steps whose moves were measured; there are {int(moving.sum())}"
        yield NotJudged("not_optimized", needs)
        return
    gradients, optimized = recorded.by_module("gradient_norm"), recorded.by_module("optimized")
    norms = recorded.by_module("weight_norm")
    still: dict[str, list[str]] = defaultdict(list)
    for (module, _), moved in zip(moves.items(), table[:, moving], strict=True):
        gradient, norm = gradients.get(module), norms.get(module)
        if norm is not None and np.ptp(norm.values) > 0:
            continue  # other steps than those that were seen move it
        if module in optimized and optimized[module].values[-1]:
            continue
        if not moved.any() and gradient is not None and gradient.values[-LAST:].any():
            still[block_of(module)].append(module)
    for block, modules in still.items():
        one = moves[modules[0]]
        known = [optimized[module].values[-1] for module in modules if module in optimized]
        number, have, them = f"{len(modules)} matrices", "have gradients but are", "them"
        if len(modules) == 1:
            number, have, them = "1 matrix", "has gradients but is", "it"
        forgotten = known and not any(known)
        yield found(
            "not_optimized",
            "warning",
            int(steps[moving][0]),
            {"matrices": float(len(modules)), "steps": float(moving.sum())},
            block if len(modules) > 1 else modules[0],
            one.layer,
            number=number,
            what=f"layer {one.layer} ({block})" if one.layer is not None else block,
            have=have,
            why=f"the optimizer does not hold {them}" if forgotten else f"no step moves {them}",
        )


def _without_gradient(
    recorded: Recorded,
    required: Mapping[str, RecordedSeries],
    blocks: Mapping[str, Sequence[RecordedSeries]],
) -> Verdict:
    norms = recorded.by_module("gradient_norm")
    needs = "gradients: call step() before zero_grad()"
    if missing := not_enough(["dead_layer"], list(norms.values()), needs):
        yield from missing
        return
    last = sorted({int(step) for one in norms.values() for step in one.steps})[-LAST:]
    sizes: dict[str, list[float]] = {}
    for block, ones in blocks.items():
        learning = [one.module for one in ones if required[one.module].values[-1]]
        if learning:
            sizes[block] = [_norm_at([norms.get(it) for it in learning], step) for step in last]
    if len(sizes) < 2:
        yield NotJudged("dead_layer", "at least two layers that are trained")
        return
    for block, size in sizes.items():
        others = np.nanmedian([other for key, other in sizes.items() if key != block], axis=0)
        share = np.array(size) / np.where(others > 0, others, np.nan)
        if (share < NO_GRADIENT).all():  # and not NaN: there was none at that step alone
            layer, evidence = blocks[block][0].layer, {"share": float(share.max())}
            what = f"Layer {layer} ({block})" if layer is not None else block
            shown = {"what": what, "measurements": LAST}
            yield found("dead_layer", "warning", last[0], evidence, block, layer, **shown)


def _norm_at(series: Sequence[RecordedSeries | None], step: int) -> float:
    """Return the norm of several gradients together at a step.

    What never has one counts as 0. NaN where there is one at other steps alone, since it was not
    finite at this one, or the layer was left out of the step.
    """
    total = 0.0
    for one in series:
        if one is not None:
            at = int(np.searchsorted(one.steps, step))
            if at == len(one.steps) or one.steps[at] != step:
                return float("nan")
            total += float(one.values[at]) ** 2
    return total**0.5


def judge_tied(recorded: Recorded) -> Verdict:
    """Layers that share most of their matrices with an earlier layer of the list."""
    for one in recorded.all("tied_layer"):
        evidence = {"same_as": float(one.values[-1])}
        yield found("tied_layer", "warning", int(one.steps[0]), evidence, one.module, one.layer)


def judge_dead_mlps(recorded: Recorded) -> Verdict:
    """MLPs most of whose hidden nodes are near zero at every token, in the last 3 measurements."""
    series = recorded.all("mlp_dead")
    yield from not_enough(["dead_mlp"], series, "mlp_dead, which was not measured")
    for one in series:
        if len(one.values) < LAST or not (one.values[-LAST:] >= DEAD_NODES).all():
            continue
        step, dead = since(one.steps, one.values >= DEAD_NODES), float(one.values[-1])
        evidence = {"dead": dead, "first": float(one.values[0])}
        shown = {"place": place_name(one.layer, one.module), "percent": 100 * dead}
        yield found("dead_mlp", "warning", step, evidence, one.module, one.layer, **shown)


def judge_ranks(recorded: Recorded) -> Verdict:
    """Weights of one direction: a stable rank that ends below 1.5 and below half of the others'.

    The others are the weights of the same role in other layers, their median. Ranks of queries
    times keys are measured and not judged: they end low in good trainings, too.
    """
    series = [one for one in recorded.all("stable_rank") if "[query·key]" not in one.module]
    yield from not_enough(["rank_collapse"], series, "stable_rank, which was not measured")
    roles: dict[str, list[RecordedSeries]] = defaultdict(list)
    for one in series:
        if one.layer is not None and len(one.steps) >= LAST:
            roles[_BLOCK.sub("", one.module)].append(one)
    for ones in roles.values():
        ends = [float(end_of(one.values) or 0.0) for one in ones]
        for index, (one, end) in enumerate(zip(ones, ends, strict=True)):
            first = float(one.values[0])
            usual = max(float(np.median(ends[:index] + ends[index + 1 :] or [first])), first)
            if 0 < end < ONE_DIRECTION and end < OF_OTHERS * usual:
                step = since(one.steps, one.values < ONE_DIRECTION)
                evidence = {"end": end, "usual": usual, "first": first}
                yield found("rank_collapse", "warning", step, evidence, one.module, one.layer)
