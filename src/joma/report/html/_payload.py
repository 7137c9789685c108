"""Everything a page shows of one run, ready for JSON."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from joma.common.checks import check_at_least
from joma.errors import JomaError
from joma.report.cache_cost import CAVEAT, read_costs, sentence
from joma.report.html._charts import (
    Log,
    charts,
    gradient_ranks,
    listed_values,
    logged_series,
    rounded,
)
from joma.report.html._page import not_finite_word, run_titles
from joma.runs import Run, condition_of

_CHARTS = {
    "attention_bounce": ("attention_entropy",),
    "attention_collapse": ("attention_entropy",),
    "rank_collapse": ("stable_rank",),
    "dead_mlp": ("mlp_dead",),
    "dead_layer": ("gradient_norm",),
    "frozen_layer": ("update_relative", "gradient_norm"),
    "not_optimized": ("weight_norm", "update_relative"),
    "bad_initialisation": ("attention_entropy",),
    "learning_rate_too_high": ("update_relative",),
    "learning_rate_too_low": ("update_relative",),
}
"""The charts on which a finding of a kind shows, the best first; the loss for all others."""
FORMAT = 1
"""Changes when a page of this version could not show a payload of another."""
MOST_POINTS = 2000
BUDGET = 60_000
"""About the most points of a run in one page; a megabyte holds twice as many."""
_MOST_ROWS = 200
_MOST_COLUMNS = 24
_LONGEST = 2000


def payload(
    run: Run,
    *,
    most_points: int = MOST_POINTS,
    budget: int | None = None,
) -> dict[str, Any]:
    """Return everything a page shows of a run, ready for JSON.

    Args:
        run: The run.
        most_points: The most points of a series; longer ones are thinned by minimum and maximum,
            and say so.
        budget: About the most points of all series together, otherwise 60,000, or `most_points`
            if that is more.

    Raises:
        JomaError: The run is damaged.
    """
    check_at_least(8, most_points=most_points)
    condition = condition_of(run)
    if condition.state == "damaged":
        raise JomaError(condition.reason)
    log = run.metrics.read()
    logged = list(logged_series(log))
    within = max(BUDGET, most_points) if budget is None else budget
    drawn = charts(logged, most_points, within)
    keys = [chart["key"] for chart in drawn]
    return {
        **_empty(run.path),
        "name": run.name,
        "state": condition.state,
        "reason": condition.reason or None,
        "summary": _summary(log, run),
        "findings": [_finding(it, keys) for it in condition.findings.findings],
        "not_judged": [_texts(it) for it in condition.findings.not_judged],
        "judged": (run.path / "findings.json").is_file(),
        "config": flat(run.config),
        "environment": flat(run.environment),
        "charts": drawn,
        "facts": listed_values(logged),
        "galore": gradient_ranks(logged),
        "cache": _cache(run),
        "tables": [_table(run, name) for name in run.tables],
    }


def damaged_payload(path: Path, reason: str) -> dict[str, Any]:
    """Return what a page shows of a run that cannot be read.

    Args:
        path: The folder.
        reason: Why it cannot, in one sentence.
    """
    return {**_empty(path), "state": "damaged", "reason": reason}


def _empty(path: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"name": "", "summary": {}, "judged": False, "galore": None}
    empty |= {key: {} for key in ("config", "environment")}
    empty |= {key: [] for key in ("findings", "not_judged", "charts", "facts", "tables")}
    about = {"format": FORMAT, "id": path.name, "path": str(path)}
    return {**about, "title": run_titles([path])[0], "cache": None, **empty}


def _cache(run: Run) -> dict[str, Any] | None:
    """Return the rows of a run's table of caches with a sentence each; None where it has none."""
    rows = read_costs(run)
    finite = [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        for row in rows
    ]
    sentences = [sentence(row) for row in rows if row["policy"] != "full"]
    return {"rows": finite, "sentences": sentences, "caveat": CAVEAT} if rows else None


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as text by "outer.inner"."""
    entries: dict[str, str] = {}
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            entries.update(flat(value, f"{name}."))
        elif isinstance(value, list) and any(isinstance(it, Mapping) for it in value):
            for number, item in enumerate(value, 1):
                entries.update(flat({str(number): item}, f"{name}."))
        elif isinstance(value, list):
            entries[name] = _text(", ".join(map(_word, value)) or "none")
        else:
            entries[name] = _text(_word(value))
    return entries


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _text(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _summary(log: Log, run: Run) -> dict[str, Any]:
    """Return the numbers of the strip at the top of a page."""
    about = {it: str(run.environment.get(it, "")) for it in ("date", "device")}
    about["version"] = str(run.environment.get("joma", ""))
    summary: dict[str, Any] = {"rows": int(log["step"].size), **about, "verified": run.verified}
    if not log["step"].size:
        return summary
    summary["last_step"] = int(log["step"].max())
    summary["members"] = int(log["member"].max()) + 1
    times = log["time"][np.isfinite(log["time"])]
    if times.size:
        summary["seconds"] = round(float(times.max() - times.min()), 1)
        summary["last_time"] = round(float(times.max()), 1)
    rates = log["value"][(log["name"] == "learning_rate") & (log["member"] == 0)]
    if rates.size:
        summary["learning_rate"] = rounded(rates[-1:])[0]
    for name in ("loss", "validation_loss"):
        chosen = (log["name"] == name) & (log["member"] == 0)
        if not chosen.any():
            continue
        steps, values = log["step"][chosen], log["value"][chosen]
        found: dict[str, Any] = {"last_step": int(steps[-1]), "last": rounded(values[-1:])[0]}
        found["last_text"] = None if found["last"] is not None else not_finite_word(values[-1])
        finite = np.flatnonzero(np.isfinite(values))
        if finite.size:
            lowest = finite[np.argmin(values[finite])]
            found["lowest"] = rounded(values[[lowest]])[0]
            found["lowest_step"] = int(steps[lowest])
        summary[name] = found
    return summary


def _finding(found: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    """Return a finding with the chart on which it shows; the file may hold anything."""
    record = _texts({k: v for k, v in found.items() if k not in ("evidence", "step", "layer")})
    for name in ("step", "layer", "head"):
        value = found.get(name)
        record[name] = value if isinstance(value, int) else None
    if record.get("severity") not in ("note", "warning", "critical"):
        record["severity"] = "note"
    evidence = found.get("evidence")
    record["evidence"] = {
        str(name): value
        for name, value in (evidence.items() if isinstance(evidence, Mapping) else ())
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    }
    wanted = (*_CHARTS.get(str(found.get("kind")), ()), "loss")
    record["chart"] = next((key for key in wanted if key in keys), None)
    return record


def _texts(record: Mapping[str, Any]) -> dict[str, Any]:
    return {str(k): None if v is None else _text(str(v)) for k, v in record.items()}


def _table(run: Run, name: str) -> dict[str, Any]:
    """Return the first rows of a table of a run."""
    columns = run.read_table(name)
    shown = list(columns)[:_MOST_COLUMNS]
    count = len(next(iter(columns.values()), ()))
    rows = [[_cell(columns[it][row]) for it in shown] for row in range(min(count, _MOST_ROWS))]
    in_all = {"columns_in_all": len(columns), "rows_in_all": count}
    return {"name": name, "columns": shown, "rows": rows, **in_all}


def _cell(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return rounded(np.array([value]))[0] if math.isfinite(value) else not_finite_word(value)
    return value if value is None or isinstance(value, int) else _text(str(value))
