"""What `joma sparsify fit` says of predictors: tables, and a finding computed from the numbers."""

import math
import statistics
from typing import Any

from joma.cli import _show


def finding(record: dict[str, Any]) -> str:
    """Return in one sentence what the predictors cost, and whether they beat a fixed set."""
    costs = {one["selection"]: one for one in record["perplexity"]}
    dense, own = costs["dense"], costs["predicted"]
    left = f"{record['mlp_sparsity']:.0%} of the neurons"
    if record["heads_sparsity"] is not None:
        left += f" and {record['heads_sparsity']:.0%} of the heads"
    cost, error = own["cost"], own["standard_error"]
    change = "raises" if cost > 2 * error else "lowers" if cost < -2 * error else None
    measured = (
        f"({_nats(cost)} ± {error:.3f} nats a token, standard error over {len(own['losses'])} "
        f"windows; the oracle's choice costs {_nats(costs['oracle']['cost'])})"
    )
    said = f"leaving out {left}, predicted a layer ahead, "
    if change is None:
        said += f"changes the loss on held-out text by less than two standard errors {measured}"
    else:
        said += (
            f"{change} perplexity on held-out text from {dense['perplexity']:.4g} to "
            f"{own['perplexity']:.4g} {measured}"
        )
    if "static" not in costs:
        return f"{said}."
    static = costs["static"]
    apart = [a - b for a, b in zip(static["losses"], own["losses"], strict=True)]
    better, error = statistics.fmean(apart), statistics.stdev(apart) / math.sqrt(len(apart))
    if better > 2 * error:
        return f"{said}. A fixed set of neurons costs more, {_nats(static['cost'])}."
    verdict = "more than" if better < -2 * error else "as much, within two standard errors, as"
    return f"{said}. That is {verdict} a fixed set of neurons costs, {_nats(static['cost'])}."


def _nats(cost: float) -> str:
    return f"{round(cost, 3) + 0.0:.3f}"  # no minus sign before zero


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns; a column that holds several numbers becomes several."""
    from joma.inference.sparsify import TOP

    found: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            if name == "top_energy":
                for top, part in zip(TOP, value, strict=True):
                    found.setdefault(f"top_{top:.0%}_energy".replace("%", ""), []).append(part)
            elif name != "losses":
                found.setdefault(name, []).append(value)
    return {name: values for name, values in found.items() if None not in values}


def print_record(record: dict[str, Any]) -> None:
    """Print the layers, the perplexities and the finding."""
    _print_layers(record)
    table = _show.table(
        "neurons", "kept", "perplexity", "loss", "cost in nats", "± s.e.", justify="right"
    )
    for one in record["perplexity"]:
        dense = one["selection"] == "dense"
        table.add_row(
            one["selection"],
            f"{one['kept']:.1%}",
            f"{one['perplexity']:#.4g}",
            f"{one['loss']:.4f}",
            *(
                ("", "")
                if dense
                else (f"{round(one['cost'], 4) + 0.0:.4f}", f"{one['standard_error']:.4f}")
            ),
        )
    _show.put(table, "")
    _show.say(f"{_show.sentence(record['finding'])} {record['seconds']:.0f} s.")
    _show.say(f"  {record['file']}")


def _print_layers(record: dict[str, Any]) -> None:
    """Print what the predictors find, and how sparse the layers are in truth."""
    chosen = {
        "recall": "recall",
        "recall, fixed set": "static_recall",
        "energy kept": "energy",
        "by the oracle": "oracle_energy",
        "by the fixed set": "static_energy",
    }
    if record["heads_sparsity"] is not None:
        chosen["heads' recall"] = "heads_recall"
    _print_shares(record["layers"], chosen)
    there = [
        {**one, **dict(zip(("10", "25", "50"), one["top_energy"], strict=True))}
        for one in record["layers"]
    ]
    heading = {f"energy in top {share}%": share for share in ("10", "25", "50")}
    _print_shares(there, {**heading, "neurons for 99%": "for_99", "exactly zero": "zero"})


def _print_shares(rows: list[dict[str, Any]], columns: dict[str, str]) -> None:
    table = _show.table("layer", *columns, justify="right")
    for row in rows:
        shares = (_show.cell(row[name], ".1%") for name in columns.values())
        table.add_row(str(row["layer"]), *shares)
    _show.put(table, "")
