"""What `joma runs show` prints: findings, curves, then settings and files."""

from typing import TYPE_CHECKING, Any

import numpy as np

from joma.cli import _show
from joma.cli._runs_words import number, say_curves, say_wrapped, severity_cell, state_cell

if TYPE_CHECKING:
    from joma.runs import Curve, RecordedFindings, Run, RunSummary

_MOST_LAYERS = 16
"""Layers that get a curve each; of more, as many evenly spaced ones."""


def record_of(run: "Run", summary: "RunSummary") -> dict[str, Any]:
    """Return everything that is known of a run, as `--json` prints it."""
    from joma.runs import read_findings

    found = read_findings(run)
    return {
        "path": str(run.path),
        "state": summary.state,
        "reason": summary.reason,
        "last_step": summary.last_step,
        "last_loss": summary.as_json()["last_loss"],
        "outcome": summary.outcome,
        "verified": run.verified,
        "missing": run.missing,
        "config": run.config,
        "environment": run.environment,
        "findings": vars(found) if found.findings or found.not_judged else None,
        "metrics": _logged(run),
        "checkpoints": run.checkpoints.steps[::-1],
        "tables": {name: _shape(run.read_table(name)) for name in run.tables},
        "figures": [str(path) for path in run.figures],
    }


def put_run(run: "Run", summary: "RunSummary", record: dict[str, Any]) -> None:
    """Print a run: how it ended, findings, curves, then settings, environment and files.

    Args:
        run: The run.
        summary: Its summary.
        record: What `record_of` gave.
    """
    from joma.runs import read_findings

    _put_head(run, summary)
    _put_findings(read_findings(run))
    _put_curves(run)
    _put_caches(run)
    rest = {key: record[key] for key in ("outcome", "config", "environment", "metrics")}
    if record["checkpoints"]:
        rest["checkpoints"] = {"at steps": record["checkpoints"]}
    rest |= {"tables": record["tables"], "figures": record["figures"]}
    rest["missing"] = record["missing"]
    rest["verified"] = "yes" if record["verified"] else "no, not all files have a checksum"
    rows = _show.table("", "")
    rows.show_header = False
    for key, value in _lines({key: value for key, value in rest.items() if value}):
        rows.add_row(key, _show.printable(value))
    _show.say("Settings and files")
    _show.put(rows)


def _put_head(run: "Run", summary: "RunSummary") -> None:
    from rich.text import Text

    first = Text.assemble(_show.printable(str(run.path)), ": ", state_cell(summary.state))
    _show.put(first)
    words = [str(run.config["model"])] if isinstance(run.config.get("model"), str) else []
    words.append(f"began {summary.date[:16].replace('T', ' ')} UTC")
    words.append(f"joma {summary.version}")
    if summary.last_step is not None:
        words.append(f"last step {summary.last_step:,}")
    if summary.last_loss is not None:
        words.append(f"last loss {number(summary.last_loss)}")
    say_wrapped(", ".join(words))
    if summary.reason and summary.state != "diverged":  # whose reason is its first finding
        say_wrapped(summary.reason)
    _show.say("")


def _put_findings(found: "RecordedFindings") -> None:
    if not found.findings and not found.not_judged:
        return
    _show.say("Findings")
    if not found.findings:
        _show.say("  none by the rules that could be judged")
    else:
        from rich.padding import Padding

        rows = _show.table("", "step", "")
        rows.show_header = False
        rows.columns[1].justify = "right"
        rows.columns[1].no_wrap = True
        rows.columns[2].overflow = "fold"
        following = [*(one["advice"] for one in found.findings[1:]), None]
        for one, next_advice in zip(found.findings, following, strict=True):
            text = str(one.get("sentence") or one.get("kind"))
            rows.add_row(severity_cell(one["severity"]), f"step {one.get('step')}", text)
            if one["advice"] and one["advice"] != next_advice:  # once for those in a row
                rows.add_row("", "", str(one["advice"]), style="dim")
        _show.put(Padding(rows, (0, 0, 0, 2)))
    missing: dict[str, list[str]] = {}
    for one in found.not_judged:
        missing.setdefault(str(one.get("needs")), []).append(str(one.get("kind")))
    for needs, kinds in missing.items():
        say_wrapped(f"not judged: {', '.join(kinds)}; needs {needs}", "  ")
    _show.say("")


def _put_curves(run: "Run") -> None:
    from joma.runs import curves_of, loss_curves

    log = run.metrics.read()
    losses: list[tuple[str, Curve]] = []
    for name in ("loss", "validation_loss"):
        words = name.replace("_", " ")
        curves = loss_curves(log, name)[:_MOST_LAYERS]
        losses += [(f"{words} {curve.label}".strip(), curve) for curve in curves]
    entropies = curves_of(log, "attention_entropy")
    chosen = entropies
    if len(entropies) > _MOST_LAYERS:
        places = np.linspace(0, len(entropies) - 1, _MOST_LAYERS).round().astype(int)
        chosen = [entropies[place] for place in places]
    if losses:
        _show.say("Loss, with first and last value")
        say_curves(losses)
        _show.say("")
    if chosen:
        some = f", {len(chosen)} of {len(entropies)}" if len(chosen) < len(entropies) else ""
        _show.say(f"Attention entropy by layer{some}, with first and last value")
        say_curves([(f"layer {curve.label}", curve) for curve in chosen])
        _show.say("")


def _put_caches(run: "Run") -> None:
    from joma.cli._generate_show import put_costs
    from joma.report.cache_cost import read_costs

    rows = read_costs(run)
    if rows:
        _show.say("What a smaller cache would cost")
        put_costs(rows)
        _show.say("")


def _lines(record: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key, value in record.items():
        if isinstance(value, dict):
            lines += _lines(value, f"{prefix}{key} ")
        elif isinstance(value, list) and key == "figures":
            lines += [(key.removesuffix("s"), item) for item in value]
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for position, item in enumerate(value, 1):
                lines += _lines(item, f"{prefix}{key} {position} ")
        else:
            lines.append((f"{prefix}{key}", text_of(value)))
    return lines


def text_of(value: Any) -> str:
    """Return a setting as text: the items of a list with spaces between, a dash for None."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return _show.printable("–") if value is None else str(value)


def _shape(columns: dict[str, Any]) -> str:
    rows = len(next(iter(columns.values())))
    return f"{rows} rows: {', '.join(columns)}"


def _logged(run: "Run") -> dict[str, Any] | None:
    """Return what the metrics log holds: rows, names, members, and the last step."""
    log = run.metrics.read()
    if not log["step"].size:
        return None
    return {
        "rows": int(log["step"].size),
        "names": sorted(set(log["name"])),
        "members": int(log["member"].max()) + 1,
        "last_step": int(log["step"].max()),
    }
