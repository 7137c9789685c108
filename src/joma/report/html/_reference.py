"""Recorded curves from a CSV file, to be drawn next to those of a run."""

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joma.common.files import read_file
from joma.common.text import first_line
from joma.errors import JomaError

LARGEST = 1 << 26
"""Most bytes of a reference file."""
MOST_CURVES = 40
"""Most curves of one metric; more cannot be told apart."""

_ALIASES = {"val_loss": "validation_loss", "valid_loss": "validation_loss", "train_loss": "loss"}
_FORM = 'columns "step", and either "metric" and "value" or one column named after each metric'


def read_reference(
    path: Path, metrics: set[str], where: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the curves in a CSV file, JSON-ready.

    The file has a column "step" and either the columns "metric" and "value" or a column for each
    metric, such as "attention_entropy" or "loss". A column "layer" says which layer a row is of.
    Every other column is a label: rows that differ in one, such as "seed", are other curves.

    Args:
        path: The file.
        metrics: Names of the metrics that the runs have; others are left out.
        where: Only rows with these values in these columns, compared as numbers where they are.

    Raises:
        JomaError: The file cannot be read, has another form, or too many curves.
    """
    rows, names = _rows(path)
    long = "metric" in names and "value" in names
    known = {name: _ALIASES.get(name, name) for name in names}
    measured = ["value"] if long else [name for name in names if known[name] in metrics]
    if "step" not in names or not measured:
        raise JomaError(
            f"{path} must have the {_FORM}; it has {', '.join(names)}, and the runs have "
            f"{', '.join(sorted(metrics)[:8])}"
        )
    for name in where or {}:
        if name not in names:
            raise JomaError(f"{path} has no column {name!r}; it has {', '.join(names)}")
    labels = [name for name in names if name not in ("step", "layer", "metric", *measured)]
    curves: dict[tuple[str, ...], dict[str, Any]] = {}
    for number, row in enumerate(rows, 2):
        if not all(_same(row[name], value) for name, value in (where or {}).items()):
            continue
        for column in measured:
            metric = _ALIASES.get(row["metric"], row["metric"]) if long else known[column]
            if metric not in metrics or not row[column].strip():
                continue
            line = f"line {number} of {path}"
            layer = _whole(line, "layer", row["layer"]) if row.get("layer", "").strip() else None
            about = {name: row[name] for name in labels}
            key = (metric, str(layer), *about.values())
            empty = {"metric": metric, "layer": layer, "labels": about, "steps": [], "values": []}
            curve = curves.setdefault(key, empty)
            value = _decimal(line, column, row[column])
            curve["steps"].append(_whole(line, "step", row["step"]))
            curve["values"].append(float(f"{value:.6g}") if math.isfinite(value) else None)
    if not curves:
        raise JomaError(f"{path} has no rows of what the runs measure, where that is chosen")
    _check_count(path, list(curves.values()), labels)
    for curve in curves.values():
        order = sorted(range(len(curve["steps"])), key=curve["steps"].__getitem__)
        for name in ("steps", "values"):
            curve[name] = [curve[name][place] for place in order]
    return {"name": path.name, "curves": list(curves.values())}


def _rows(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    try:
        text = read_file(path, largest=LARGEST).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = list(reader)
    except FileNotFoundError:
        raise JomaError(f"reference {path} does not exist") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise JomaError(f"reference {path} cannot be read: {first_line(error)}") from error
    names = [name for name in reader.fieldnames or [] if name]
    for number, row in enumerate(rows, 2):
        if None in row or any(value is None for value in row.values()):
            raise JomaError(f"line {number} of {path} must have {len(names)} entries")
    return rows, names


def _check_count(path: Path, curves: list[dict[str, Any]], labels: list[str]) -> None:
    most = max(Counter((it["metric"], it["layer"]) for it in curves).values())
    if most > MOST_CURVES:
        choices = "; ".join(
            f"{name}: {', '.join(sorted({it['labels'][name] for it in curves})[:6])}"
            for name in labels
        )
        raise JomaError(
            f"{path} has {most} curves of one metric, and at most {MOST_CURVES} can be drawn; "
            f"choose some with --where COLUMN=VALUE ({choices})"
        )


def _same(entry: str, value: str) -> bool:
    try:
        return float(entry) == float(value)
    except ValueError:
        return entry.strip() == value.strip()


def _decimal(line: str, name: str, entry: str) -> float:
    try:
        return float(entry)
    except ValueError:
        raise JomaError(f"{line} must have a number as {name}, got {entry!r}") from None


def _whole(line: str, name: str, entry: str) -> int:
    value = _decimal(line, name, entry)
    if not value.is_integer() or not 0 <= value < 2**53:
        raise JomaError(f"{line} must have a whole number from 0 on as {name}, got {entry!r}")
    return int(value)
