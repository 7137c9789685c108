"""`joma runs show`: findings, curves, then settings and files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._render import printable
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Curve, RecordedFindings, Run, RunSummary

_MOST_LAYERS = 16
"""Layers that get a curve each; of more, as many evenly spaced ones."""
_STYLES = {"running": "cyan", "ended": "green", "died": "red", "diverged": "bold red"}
_STYLES |= {"damaged": "bold red", "stopped": "yellow"}
_STYLES |= {"critical": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True, kw_only=True)
class ShowRun(cmd.Command):
    """Show how a run ended, what was found in it, its curves, settings and files."""

    summary = "Show findings, curves and settings of a run."
    example = "runs show runs/fig4-20250101-120000"

    folder: Path = cmd.argument("RUN", "A run folder.")
    json: bool = cmd.json_flag()

    def run(self) -> None:
        """Print what is known of the run."""
        from joma.runs import Run, RunSummary, read_findings

        run = Run.open(self.folder)
        summary, found = RunSummary.of(run), read_findings(run)
        if summary.state == "damaged":
            raise JomaError(summary.reason)
        record = {
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
        if self.json:
            _render.as_json(record)
            return
        _put_head(run, summary)
        _put_findings(found)
        _put_curves(run)
        _put_caches(run)
        _put_settings(record)


def say_curves(lines: "Sequence[tuple[str, Curve]]") -> None:
    """Print curves under each other on one scale, each with its first and last value.

    Columns are stretches of steps of equal length, the same for all curves. A column is the mean of
    the values in it, × where none of them is finite, and the one before where there are none.

    Args:
        lines: What a curve is of, and the curve.
    """
    import numpy as np

    label_width = min(max(len(label) for label, _ in lines), 34)
    curves = [curve for _, curve in lines]
    first = min(int(curve.steps[0]) for curve in curves)
    steps = max(int(curve.steps[-1]) for curve in curves) - first + 1
    room = max(8, min(60, _render.console().width - label_width - 26))
    columns = max(1, min(room, steps, max(len(curve.steps) for curve in curves)))
    numbers = np.concatenate([curve.values for curve in curves])
    finite = numbers[np.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    blocks = "▁▂▃▄▅▆▇█×" if printable("▁") == "▁" else "_.-=+*#@x"
    for label, curve in lines:
        places = ((curve.steps - first) * columns) // steps
        drawn = " " * int(places[0])
        sign = blocks[-1]
        for place in range(int(places[0]), int(places[-1]) + 1):
            own = curve.values[places == place]
            if own.size:
                sign = _block(own[np.isfinite(own)], low, high, blocks)
            drawn += sign
        begin, end = (f"{value:.4g}" for value in (curve.values[0], curve.values[-1]))
        name = printable(label)[:label_width]
        _render.say(f"  {name:<{label_width}} {begin:>9} {drawn} {end}")


def _block(values: Any, low: float, high: float, blocks: str) -> str:
    if not values.size:
        return blocks[-1]
    # Halves: the difference of two large numbers of opposite sign may not be finite.
    reach = high / 2 - low / 2
    share = (float((values / 2).mean()) - low / 2) / reach if reach > 0 else 0.0
    return blocks[min(max(int(share * 8), 0), 7)]


def text_of(value: Any) -> str:
    """Return a setting as text: the items of a list with spaces between, a dash for None."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return printable("–") if value is None else str(value)


def styled(word: str) -> Any:
    """Return a state or a severity in its colour."""
    from rich.text import Text

    return Text(printable(word), style=_STYLES.get(word, ""))


def _put_head(run: "Run", summary: "RunSummary") -> None:
    from rich.text import Text

    _render.put(Text.assemble(printable(str(run.path)), ": ", styled(summary.state)))
    words = [str(run.config["model"])] if isinstance(run.config.get("model"), str) else []
    words.append(f"began {summary.date[:16].replace('T', ' ')} UTC")
    words.append(f"joma {summary.version}")
    if summary.last_step is not None:
        words.append(f"last step {summary.last_step:,}")
    if summary.last_loss is not None:
        words.append(f"last loss {summary.last_loss:.4g}")
    _render.say(", ".join(words))
    if summary.reason and summary.state != "diverged":  # whose reason is its first finding
        _render.say(summary.reason)
    _render.say("")


def _put_findings(found: "RecordedFindings") -> None:
    if not found.findings and not found.not_judged:
        return
    _render.say("Findings")
    if not found.findings:
        _render.say("  none by the rules that could be judged")
    following = [*(one["advice"] for one in found.findings[1:]), None]
    rows: list[tuple[Any, ...]] = []
    for one, next_advice in zip(found.findings, following, strict=True):
        sentence = str(one.get("sentence") or one.get("kind"))
        rows.append((styled(one["severity"] or "–"), f"step {one.get('step')}", sentence))
        if one["advice"] and one["advice"] != next_advice:  # once for those in a row
            rows.append(("", "", str(one["advice"])))
    if rows:
        from rich.padding import Padding

        table = _render.table(("", "", ""), rows, left=3)
        table.columns[1].no_wrap = True
        _render.put(Padding(table, (0, 0, 0, 2)))
    missing: dict[str, list[str]] = {}
    for one in found.not_judged:
        missing.setdefault(str(one.get("needs")), []).append(str(one.get("kind")))
    for needs, kinds in missing.items():
        _render.say(f"  not judged: {', '.join(kinds)}; needs {needs}")
    _render.say("")


def _put_curves(run: "Run") -> None:
    import numpy as np

    from joma.runs import curves_of, loss_curves

    log = run.metrics.read()
    losses: list[tuple[str, Curve]] = []
    for name in ("loss", "validation_loss"):
        words = name.replace("_", " ")
        curves = loss_curves(log, name)[:_MOST_LAYERS]
        losses += [(f"{words} {curve.label}".strip(), curve) for curve in curves]
    if losses:
        _render.say("Loss, with first and last value")
        say_curves(losses)
        _render.say("")
    entropies = curves_of(log, "attention_entropy")
    shown = min(len(entropies), _MOST_LAYERS)
    if shown:
        some = f", {shown} of {len(entropies)}" if shown < len(entropies) else ""
        _render.say(f"Attention entropy by layer{some}, with first and last value")
        places = np.linspace(0, len(entropies) - 1, shown).round().astype(int)
        say_curves([(f"layer {entropies[place].label}", entropies[place]) for place in places])
        _render.say("")


def _put_caches(run: "Run") -> None:
    from joma.report.cache_cost import read_costs

    if rows := read_costs(run):
        from joma.cli._generate import put_costs

        _render.say("What a smaller cache would cost")
        put_costs(rows)
        _render.say("")


def _put_settings(record: dict[str, Any]) -> None:
    rest = {key: record[key] for key in ("outcome", "config", "environment", "metrics")}
    if record["checkpoints"]:
        rest["checkpoints"] = {"at steps": record["checkpoints"]}
    rest |= {key: record[key] for key in ("tables", "figures", "missing")}
    rest["verified"] = "yes" if record["verified"] else "no, not all files have a checksum"
    _render.say("Settings and files")
    rows = _lines({key: value for key, value in rest.items() if value})
    _render.put(_render.table(("", ""), rows, left=2))


def _lines(record: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key, value in record.items():
        if isinstance(value, dict):
            lines += _lines(value, f"{prefix}{key} ")
        elif isinstance(value, list) and key == "figures":
            lines += [("figure", item) for item in value]
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for position, item in enumerate(value, 1):
                lines += _lines(item, f"{prefix}{key} {position} ")
        else:
            lines.append((f"{prefix}{key}", text_of(value)))
    return lines


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
