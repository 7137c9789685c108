"""What a smaller cache of keys and values would cost: the table that `joma generate` writes.

A run folder keeps it as the table `cache_cost`, one row for each cache. Numbers are read here, and
every word about them follows from the number and its error.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from joma.errors import JomaError
from joma.runs import Run

TABLE = "cache_cost"
"""Name of the table in a run folder."""

COLUMNS: dict[str, type] = {
    "cache": str,
    "policy": str,
    "keys": float,
    "seen": int,
    "bytes": int,
    "share": float,
    "text_tokens": int,
    "text_nll": float,
    "text_cost": float,
    "text_error": float,
    "reply_tokens": int,
    "reply_nll": float,
    "reply_cost": float,
    "reply_error": float,
    "agreement": float,
    "agreement_error": float,
    "timed": int,
    "ms": float,
    "speed": float,
    "speed_low": float,
    "speed_high": float,
}
"""Columns of the table.

- `cache`, `policy`: the cache as --cache takes it, and the name of its policy; "full" for the model
  without a limit.
- `keys`: keys that a head holds between steps, averaged over layers; NaN without a limit.
- `seen`, `bytes`, `share`: tokens read, bytes held then, and these as a share of the full cache's.
- `text_…`: the prompt's own last tokens, read one by one: how many, their negative log likelihood
  in nats per token, how much more that is than with the full cache, and its standard error.
- `reply_…`: the same of the full cache's greedy continuation of the prompt.
- `agreement`: share of the continuation's tokens that are also the first choice with this cache.
- `timed`, `ms`, `speed`: tokens timed, their median time in milliseconds, and how many times faster
  than the full cache, with a 95% interval.

NaN stands for what was not measured.
"""

SURE = 2.0
"""A difference is stated as one from this many standard errors on."""

CAVEAT = (
    "Standard errors are over blocks of consecutive tokens of this one text, so they say nothing "
    "of other texts. Bytes are those held after the last token; while a prompt is read in one "
    "piece, all its keys are there. A speed counts as a difference only where its 95% interval "
    "leaves 1 out."
)


def read_costs(run: Run) -> list[dict[str, Any]]:
    """Return the rows of a run's table, the full cache first; none where it has no such table.

    Raises:
        JomaError: The table lacks a column.
    """
    if TABLE not in run.tables:
        return []
    columns = run.read_table(TABLE)
    if missing := [name for name in COLUMNS if name not in columns]:
        raise JomaError(f"table {TABLE} of {run.path} has no column {missing[0]!r}")
    count = len(columns["cache"])
    rows = [{name: kind(columns[name][k]) for name, kind in COLUMNS.items()} for k in range(count)]
    return sorted(rows, key=lambda row: row["policy"] != "full")


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as the columns of the table."""
    return {name: [row[name] for row in rows] for name in COLUMNS}


def quality(row: Mapping[str, Any], of: str = "text") -> str:
    """Return what a cache costs in nats per token, with its error, as a phrase.

    Args:
        row: A row of the table.
        of: "text" for the prompt's own tokens, "reply" for the full cache's continuation.
    """
    cost, error, tokens = row[f"{of}_cost"], row[f"{of}_error"], row[f"{of}_tokens"]
    if not tokens or not math.isfinite(cost):
        return "not measured"
    measured = f"{round(cost, 3) + 0.0:+.3f} ± {error:.3f} nats per token on {tokens} tokens"
    if not math.isfinite(error):
        return f"{cost:+.3f} nats per token on {tokens} tokens, too few for an error"
    if abs(cost) <= SURE * error or (cost == 0 and error == 0):
        return f"no difference measured ({measured})"
    return f"{measured}, {'worse' if cost > 0 else 'better'}"


def speed(row: Mapping[str, Any]) -> str:
    """Return how a cache's speed compares with the full one's, as a phrase."""
    low, high, value = row["speed_low"], row["speed_high"], row["speed"]
    if not row["timed"] or not math.isfinite(value):
        return "speed not measured"
    if not math.isfinite(low):
        return f"{value:.2f} times as fast in a single round, which has no error"
    interval = f"95% interval {low:.2f} to {high:.2f}, {row['timed']} tokens"
    if low > 1:
        return f"{value:.2f} times as fast ({interval})"
    if high < 1:
        return f"{1 / value:.2f} times the full cache's time ({interval})"
    return f"no difference in speed measured ({interval})"


def judged_text(row: Mapping[str, Any]) -> str:
    """Return on which tokens a cache is judged: "text", or "reply" where that says more.

    Where the cache had room for the whole prompt, the prompt's own text says nothing.
    """
    prompt = row["seen"] - row["reply_tokens"]
    return "reply" if not row["text_tokens"] or row["keys"] >= prompt else "text"


def sentence(row: Mapping[str, Any]) -> str:
    """Return what a cache costs and what it saves, in one sentence with the errors."""
    of = judged_text(row)
    what = "the prompt's own text" if of == "text" else "the full cache's continuation"
    return (
        f"{row['cache']} holds {row['share']:.1%} of the full cache's bytes after {row['seen']} "
        f"tokens; quality on {what}: {quality(row, of)}; {speed(row)}."
    )
