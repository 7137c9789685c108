"""The table of `joma generate`, which `joma runs show` prints as well."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from joma.cli import _show

if TYPE_CHECKING:
    from rich.table import Table

_HEADINGS = (
    "cache",
    "keys",
    "cache bytes",
    "own text, nats",
    "reply, nats",
    "same choice",
    "ms/token",
    "speed (95%)",
)


def put_costs(rows: Sequence[dict[str, Any]], *, err: bool = False) -> None:
    """Print what each cache holds and costs, and what can be said of it.

    Args:
        rows: Rows of the table `cache_cost`.
        err: Whether it goes to standard error.
    """
    from joma.report.cache_cost import CAVEAT, sentence

    if not rows:
        return
    window = _show.console(err=err)
    table = _table(rows, broken=False)
    anywhere = window.options.update(width=1000)
    if window.measure(table, options=anywhere).maximum > window.width:
        table = _table(rows, broken=True)
    _show.put("", table, "", err=err)
    full = rows[0]
    for row in rows[1:] if len(rows) <= 4 else ():
        _show.say(sentence(row), err=err)
    parts = [
        f"{full[f'{of}_tokens']} tokens of {what}"
        for of, what in (("text", "the prompt's own end"), ("reply", "the full cache's reply"))
        if full[f"{of}_tokens"]
    ]
    _show.say(
        f"Nats per token, on {' and '.join(parts) or 'no tokens'}: more than the full cache's, ± "
        f"one standard error; the full cache's row has its own. {CAVEAT}",
        err=err,
    )


def as_records(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows as JSON has them: null for what was not measured."""
    return [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def _table(rows: Sequence[dict[str, Any]], *, broken: bool) -> "Table":
    """Return the table; `broken` names are in several lines, between their arguments."""
    table = _show.table(*_HEADINGS, justify="right")
    table.columns[0].justify = "left"
    table.columns[0].no_wrap = True
    for row in rows:
        name = row["cache"]
        table.add_row(
            name.replace(":", ":\n").replace(",", ",\n") if broken else name, *_cells(row)
        )
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    full = row["policy"] == "full"
    return [
        _show.printable("–") if math.isnan(row["keys"]) else f"{row['keys']:g}",
        size_text(row["bytes"]) if full else f"{size_text(row['bytes'])} {row['share']:6.1%}",
        _nats(row, "text"),
        _nats(row, "reply"),
        _measured(row["agreement"], row["agreement_error"], 100, "{:.0f}", "%") if not full else "",
        _show.cell(None) if math.isnan(row["ms"]) else f"{row['ms']:.1f}",
        "" if full else _speed(row),
    ]


def _nats(row: dict[str, Any], of: str) -> str:
    if not row[f"{of}_tokens"]:
        return _show.printable("–")
    if row["policy"] == "full":
        return f"{row[f'{of}_nll']:.3f}"
    return _measured(row[f"{of}_cost"], row[f"{of}_error"], 1, "{:+.3f}")


def _measured(value: float, error: float, factor: float, form: str, unit: str = "") -> str:
    if math.isnan(value):
        return _show.printable("–")
    shown = f"{form.format(round(factor * value, 3) + 0.0)}{unit}"  # no minus sign before zero
    if math.isnan(error):
        return shown
    return _show.printable(f"{shown} ± {form.replace('+', '').format(factor * error)}{unit}")


def _speed(row: dict[str, Any]) -> str:
    if math.isnan(row["speed"]):
        return _show.printable("–")
    if math.isnan(row["speed_low"]):
        return f"{row['speed']:.2f}"
    return f"{row['speed']:.2f} ({row['speed_low']:.2f} to {row['speed_high']:.2f})"


def size_text(size: int) -> str:
    """Return a number of bytes with its unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"
