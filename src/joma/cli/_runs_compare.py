"""What `joma runs compare` prints: settings that differ, curves and end values."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from joma.cli import _show
from joma.cli._runs_show import text_of
from joma.cli._runs_words import number, say_curves, say_wrapped
from joma.common.json_files import plain

if TYPE_CHECKING:
    from joma.runs import Run, TableDifference

_PARTED = 0.02
"""Share by which two losses differ where curves are said to part."""
_LOWER_IS_BETTER = ("loss", "validation_loss")
_UNSHOWN = ("date", "command")
"""What of the environment always differs, and is in `--json` alone."""


def compare_runs(one: "Run", two: "Run") -> dict[str, Any]:
    """Return how two runs differ, as `--json` prints it."""
    from joma.runs import RunSummary, compare_metrics, compare_tables, differing

    summaries = [RunSummary.of(run) for run in (one, two)]
    metrics = compare_metrics(one, two)
    ends = _ends(one, two)
    return {
        "runs": [str(one.path), str(two.path)],
        "states": [summary.state for summary in summaries],
        "last_steps": [summary.last_step for summary in summaries],
        "config": differing(one.config, two.config),
        "environment": differing(one.environment, two.environment),
        "outcome": differing(summaries[0].outcome, summaries[1].outcome),
        "losses_part_at": _parting(one, two),
        "ends": plain(ends),
        "metrics": None if metrics is None else _as_json(metrics),
        "tables": {table.table: _as_json(table) for table in compare_tables(one, two)},
        "tables_in_one_only": sorted(set(one.tables) ^ set(two.tables)),
    }


def put_comparison(one: "Run", two: "Run", record: dict[str, Any]) -> None:
    """Print how two runs differ.

    Args:
        one: The first run.
        two: The second one.
        record: What `compare_runs` gave.
    """
    names = _names(one.path, two.path)
    rows = _show.table("", *names)
    if record["states"][0] != record["states"][1]:
        rows.add_row("state", *record["states"])
    for part in ("config", "environment", "outcome"):
        for key, (left, right) in record[part].items():
            if part != "environment" or key.partition(".")[0] not in _UNSHOWN:
                rows.add_row(f"{part} {key}", text_of(left), text_of(right))
    if rows.row_count:
        _show.put(rows)
    else:
        _show.say("Settings, environment and outcome are the same.")
    _put_losses(one, two, names, record)
    if record["metrics"] is not None and record["metrics"]["equal"]:
        _show.say("metrics: equal")
    elif record["metrics"] is not None and record["ends"]:
        if not record["metrics"]["largest"]:
            _show.say("The runs did not log the same steps, names or members.")
        if None not in (steps := record["last_steps"]) and steps[0] != steps[1]:
            _show.say(f"The runs end at different steps, {steps[0]:,} and {steps[1]:,}.")
        _put_ends(names, _ends(one, two))
    for name, table in record["tables"].items():
        _show.say(f"table {name}: {_in_words(table)}")
    for name in record["tables_in_one_only"]:
        _show.say(f"table {name}: in {names[0] if name in one.tables else names[1]} only")


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Return the shortest names that tell two folders apart."""
    return (first.name, second.name) if first.name != second.name else (str(first), str(second))


def _put_losses(one: "Run", two: "Run", names: Sequence[str], record: dict[str, Any]) -> None:
    from joma.runs import loss_curves

    shown = False
    for name in _LOWER_IS_BETTER:
        found = [loss_curves(run.metrics.read(name), name) for run in (one, two)]
        if all(found):
            shown = True
            _show.say(f"\n{_show.sentence(name.replace('_', ' '))}, with first and last value")
            say_curves([(name, own[0]) for name, own in zip(names, found, strict=True)])
    if shown and record["losses_part_at"] is not None:
        step = record["losses_part_at"]
        _show.say(f"Losses first differ by more than {_PARTED:.0%} at step {step:,}.")


def _put_ends(names: Sequence[str], ends: Mapping[str, Sequence[float | None]]) -> None:
    _show.say("\nEnd values, each the mean over layers")
    rows = _show.table("metric", *names, "difference", "better")
    for column in rows.columns[1:4]:
        column.justify = "right"
    equal = []
    for name, (left, right) in ends.items():
        gap = None
        if left is not None and right is not None:
            gap = right - left if math.isfinite(left) and math.isfinite(right) else math.nan
        if gap == 0:
            equal.append(name)
            continue
        signed = number(None) if gap is None or math.isnan(gap) else f"{gap:+.3g}"
        better = _better(names, left, right) if name in _LOWER_IS_BETTER else ""
        rows.add_row(name, number(left), number(right), signed, better)
    if rows.row_count:
        _show.put(rows)
    if equal:
        say_wrapped(f"Equal at the end: {', '.join(equal)}")


def _better(names: Sequence[str], left: float | None, right: float | None) -> str:
    """Return the name of the run with the lower loss; one that is not finite is never better."""
    if left is None or right is None:
        return ""
    finite = [math.isfinite(left), math.isfinite(right)]
    if not all(finite):
        return names[finite.index(True)] if any(finite) else ""
    return names[right < left]


def _ends(one: "Run", two: "Run") -> dict[str, tuple[float | None, float | None]]:
    """Return the last value of every metric in both runs, the mean over everything it is of."""
    found = [_last_values(run) for run in (one, two)]
    names = [*found[0], *(name for name in found[1] if name not in found[0])]
    first = [name for name in _LOWER_IS_BETTER if name in names]
    rest = sorted(name for name in names if name not in first)
    return {name: (found[0].get(name), found[1].get(name)) for name in (*first, *rest)}


def _last_values(run: "Run") -> dict[str, float]:
    log = run.metrics.read()
    values = {}
    for name in dict.fromkeys(log["name"].tolist()):
        own = (log["name"] == name) & (log["head"] < 0)
        own = own if own.any() else log["name"] == name
        last = log["step"][own] == log["step"][own].max()
        values[name] = float(np.mean(log["value"][own][last]))
    return values


def _parting(one: "Run", two: "Run") -> int | None:
    """Return the first common step at which losses differ by more than 2%, None if they do not."""
    from joma.runs import loss_curves

    found = [loss_curves(run.metrics.read("loss")) for run in (one, two)]
    if not all(found):
        return None
    first, second = (curves[0] for curves in found)
    steps, left, right = np.intersect1d(first.steps, second.steps, return_indices=True)
    # Python's floats: NumPy warns of the difference of infinities.
    pairs = zip(first.values[left].tolist(), second.values[right].tolist(), strict=True)
    for step, (a, b) in zip(steps.tolist(), pairs, strict=True):
        if math.isfinite(a) != math.isfinite(b) or abs(a - b) > _PARTED * max(abs(a), abs(b)):
            return step
    return None


def _in_words(table: dict[str, Any]) -> str:
    if table["equal"]:
        return "equal"
    if not table["largest"]:
        return "not of the same columns or rows"
    largest = ", ".join(
        f"{name} {'nan' if value is None else f'{value:.2e}'}"
        for name, value in table["largest"].items()
        if value != 0
    )
    return f"largest differences: {largest}"


def _as_json(table: "TableDifference") -> dict[str, Any]:
    return {"equal": table.equal, "largest": plain(table.largest)}
