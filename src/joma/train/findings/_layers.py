"""Rules on layers that do not learn: frozen, forgotten, dead, tied, or of one direction.

Steps at which nothing moves (a learning rate of 0 while warming up) count for nothing.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from joma.train.findings._finding import Finding, found
from joma.train.findings._recorded import (
    LAST,
    CannotJudgeError,
    Recorded,
    RecordedSeries,
    Rule,
    check_enough,
    end_of,
    place_name,
    since,
    table_of,
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


def _block_of(module: str) -> str:
    """Return the path of a block: a module's path up to the first number in it."""
    match = _BLOCK.match(module)
    return match.group() if match else module


def _required(recorded: Recorded) -> dict[str, RecordedSeries]:
    """Return by module whether matrices require a gradient."""
    required = recorded.by_module["requires_grad"]
    if not required:
        raise CannotJudgeError("matrices in layers, of which none was found")
    return required


def _blocks(required: Mapping[str, RecordedSeries]) -> dict[str, list[RecordedSeries]]:
    """Return the matrices of each block by its path."""
    blocks: dict[str, list[RecordedSeries]] = defaultdict(list)
    for module, one in required.items():
        blocks[_block_of(module)].append(one)
    return blocks


def judge_frozen(recorded: Recorded) -> Iterator[Finding]:
    """Find layers no matrix of which requires a gradient, while another layer's do.

    A warning; a note where it is the first layers of the model or half of them, which is done on
    purpose.
    """
    blocks = _blocks(_required(recorded))
    trained = {block for block, ones in blocks.items() if any(one.values[-1] for one in ones)}
    stacks: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for block, ones in blocks.items():
        if trained and ones[0].layer is not None:
            stacks[block.rpartition(".")[0]].append((ones[0].layer, block))
    for stack in stacks.values():
        stack.sort()
        frozen = [(layer, block) for layer, block in stack if block not in trained]
        if len(frozen) == len(stack):
            continue  # a whole tower, as of a model that is only read
        on_purpose = frozen == stack[: len(frozen)] or 1 < len(frozen) >= len(stack) / 2
        severity = "note" if on_purpose else "warning"
        for layer, block in frozen:
            ones = blocks[block]
            evidence = {"matrices": float(len(ones))}
            yield found("frozen_layer", severity, int(ones[0].steps[-1]), evidence, block, layer)


def judge_not_optimized(recorded: Recorded) -> Iterator[Finding]:
    """Find matrices that have gradients and that no step moves, while others move.

    No step that was seen moved the matrix, and its norm has not changed. An optimizer that is known
    does not hold it.
    """
    required = _required(recorded)
    moves = {
        module: one
        for module, one in recorded.by_module["update_relative"].items()
        if module in required and required[module].values[-1]
    }
    if len(moves) < 2:
        raise CannotJudgeError("update_relative of at least two weights")
    steps, table = table_of(list(moves.values()))
    moving = (table > 0).mean(axis=0) >= 0.5  # of most weights: the learning rate is not 0
    if moving.sum() < MOVES:
        needs = f"{MOVES} steps whose moves were measured; there are {int(moving.sum())}"
        raise CannotJudgeError(needs)
    gradients, optimized, norms = (
        recorded.by_module[name] for name in ("gradient_norm", "optimized", "weight_norm")
    )
    still: dict[str, list[str]] = defaultdict(list)
    for module, moved in zip(moves, table[:, moving], strict=True):
        gradient, norm = gradients.get(module), norms.get(module)
        if norm is not None and np.ptp(norm.values) > 0:
            continue  # other steps than those that were seen move it
        if module in optimized and optimized[module].values[-1]:
            continue
        if not moved.any() and gradient is not None and gradient.values[-LAST:].any():
            still[_block_of(module)].append(module)
    for block, modules in still.items():
        layer = moves[modules[0]].layer
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
            layer,
            number=number,
            what=f"layer {layer} ({block})" if layer is not None else block,
            have=have,
            why=f"the optimizer does not hold {them}" if forgotten else f"no step moves {them}",
        )


def judge_dead_layers(recorded: Recorded) -> Iterator[Finding]:
    """Find layers that require gradients and never had one, or hardly any.

    That is, in the last 3 measurements less than 10⁻⁴ of the other layers' median.
    """
    required = _required(recorded)
    norms = recorded.by_module["gradient_norm"]
    check_enough(norms.values(), "gradients: call step() before zero_grad()")
    last = sorted({int(step) for one in norms.values() for step in one.steps})[-LAST:]
    blocks = _blocks(required)
    sizes: dict[str, list[float]] = {}
    for block, ones in blocks.items():
        learning = [one.module for one in ones if required[one.module].values[-1]]
        there = [norms[module] for module in learning if module in norms]
        if learning:
            sizes[block] = [_norm_at(there, step) for step in last]
    if len(sizes) < 2:
        raise CannotJudgeError("at least two layers that are trained")
    for block, size in sizes.items():
        others = np.nanmedian([other for key, other in sizes.items() if key != block], axis=0)
        share = np.array(size) / np.where(others > 0, others, np.nan)
        if (share < NO_GRADIENT).all():  # and not NaN: there was none at that step alone
            layer, evidence = blocks[block][0].layer, {"share": float(share.max())}
            what = f"Layer {layer} ({block})" if layer is not None else block
            shown = {"what": what, "measurements": LAST}
            yield found("dead_layer", "warning", last[0], evidence, block, layer, **shown)


def _norm_at(series: list[RecordedSeries], step: int) -> float:
    """Return the norm of several gradients together at a step, 0 where there are none.

    NaN where there is one at other steps alone, since it was not finite at this one, or the layer
    was left out of the step.
    """
    total = 0.0
    for one in series:
        at = int(np.searchsorted(one.steps, step))
        if at == len(one.steps) or one.steps[at] != step:
            return float("nan")
        total += float(one.values[at]) ** 2
    return total**0.5


def judge_tied(recorded: Recorded) -> Iterator[Finding]:
    """Find layers that share most of their matrices with an earlier layer of the list."""
    for one in recorded.by_name["tied_layer"]:
        evidence = {"same_as": float(one.values[-1])}
        yield found("tied_layer", "warning", int(one.steps[0]), evidence, one.module, one.layer)


def judge_dead_mlps(recorded: Recorded) -> Iterator[Finding]:
    """Find MLPs most of whose hidden nodes are near zero at every token, 3 measurements long."""
    series = recorded.by_name["mlp_dead"]
    for one in series:
        if len(one.values) < LAST or not (one.values[-LAST:] >= DEAD_NODES).all():
            continue
        step, dead = since(one.steps, one.values >= DEAD_NODES), float(one.values[-1])
        evidence = {"dead": dead, "first": float(one.values[0])}
        shown = {"place": place_name(one.layer, one.module), "percent": 100 * dead}
        yield found("dead_mlp", "warning", step, evidence, one.module, one.layer, **shown)


def judge_ranks(recorded: Recorded) -> Iterator[Finding]:
    """Find weights of one direction: a stable rank that ends below 1.5 and half of the others'.

    The others are the weights of the same role in other layers, their median. Ranks of queries
    times keys are measured and not judged: they end low in good trainings, too.
    """
    series = [one for one in recorded.by_name["stable_rank"] if "[query·key]" not in one.module]
    roles: dict[str, list[tuple[RecordedSeries, float]]] = defaultdict(list)
    for one in series:
        end = end_of(one.values)
        if one.layer is not None and end is not None:
            roles[_BLOCK.sub("", one.module)].append((one, end))
    for ones in roles.values():
        for index, (one, end) in enumerate(ones):
            first = float(one.values[0])
            others = [other for at, (_, other) in enumerate(ones) if at != index]
            usual = max(float(np.median(others or [first])), first)
            if 0 < end < ONE_DIRECTION and end < OF_OTHERS * usual:
                step = since(one.steps, one.values < ONE_DIRECTION)
                evidence = {"end": end, "usual": usual, "first": first}
                yield found("rank_collapse", "warning", step, evidence, one.module, one.layer)


RULES = (
    Rule(("frozen_layer",), judge_frozen),
    Rule(("not_optimized",), judge_not_optimized),
    Rule(("dead_layer",), judge_dead_layers),
    Rule(("tied_layer",), judge_tied),
    Rule(("dead_mlp",), judge_dead_mlps, "mlp_dead"),
    Rule(("rank_collapse",), judge_ranks, "stable_rank"),
)
