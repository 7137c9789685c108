"""Runs and their findings in words short enough for a line of a table."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from joma.cli import _show

if TYPE_CHECKING:
    from joma.runs import Curve, RunSummary

STATE_STYLES = {"running": "cyan", "ended": "green", "died": "red", "diverged": "bold red"}
STATE_STYLES |= {"damaged": "bold red", "stopped": "yellow", "unknown": ""}
_SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "note": "cyan"}


def state_cell(state: str) -> Any:
    """Return the state of a run in its colour."""
    from rich.text import Text

    return Text(state, style=STATE_STYLES.get(state, ""))


def severity_cell(severity: str | None) -> Any:
    """Return a severity in its colour, a dash where none was recorded."""
    from rich.text import Text

    return Text(severity or _show.printable("–"), style=_SEVERITY_STYLES.get(severity or "", ""))


def number(value: float | None) -> str:
    """Return a number with four digits, a dash for None."""
    return _show.printable("–") if value is None else f"{value:.4g}"


def what_was_found(summary: "RunSummary") -> str:
    """Return the worst finding of a run, how it compares, or why it is in its state."""
    if summary.state == "damaged":
        return summary.reason
    worst = summary.worst
    if worst is not None:
        where = "" if worst.get("layer") is None else f", layer {worst['layer']}"
        severity = f"{worst['severity']}: " if worst.get("severity") else ""
        kind = str(worst.get("kind", "finding")).replace("_", " ")
        return f"{severity}{kind}{where}, step {worst.get('step')}"
    outcome = summary.outcome
    if summary.state == "ended":
        words = [_verdict(outcome), str(outcome.get("finding") or "")]
        return ": ".join(word for word in words if word)
    return summary.reason


def _verdict(outcome: dict[str, Any]) -> str:
    if "verdict" in outcome:
        return str(outcome["verdict"])
    if "agrees" in outcome:  # of other commands, and of earlier versions
        return "agrees" if outcome["agrees"] else "differs"
    return ""


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters, cut between words."""
    return textwrap.shorten(text, most, placeholder=_show.printable("…")) if text else ""


def say_curves(lines: Sequence[tuple[str, "Curve"]]) -> None:
    """Print curves under each other on one scale, each with its first and last value.

    Args:
        lines: What a curve is of, and the curve.
    """
    from joma.cli._sparkline import sparklines

    labels = [_show.printable(label) for label, _ in lines]
    label_width = min(max(map(len, labels)), 34)
    room = max(8, min(60, _show.console().width - label_width - 26))
    curves = [curve for _, curve in lines]
    for label, curve, drawn in zip(labels, curves, sparklines(curves, room), strict=True):
        first, last = (f"{value:.4g}" for value in (curve.values[0], curve.values[-1]))
        _show.say(f"  {label[:label_width]:<{label_width}} {first:>9} {drawn} {last}")


def say_wrapped(text: str, indent: str = "") -> None:
    """Print a text in lines that fit the terminal.

    Args:
        text: The text.
        indent: What the first line begins with; further lines are indented by two more.
    """
    width = max(20, _show.console().width)
    lines = textwrap.wrap(
        _show.printable(text), width, initial_indent=indent, subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )  # fmt: skip
    _show.say("\n".join(lines))
