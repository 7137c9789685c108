"""What a smaller cache would cost, as a page shows it."""

import math
from typing import Any

from joma.report.cache_cost import CAVEAT, read_costs, sentence
from joma.runs import Run


def cache_costs(run: Run) -> dict[str, Any] | None:
    """Return the rows of a run's table of caches with a sentence each; None where it has none."""
    rows = read_costs(run)
    if not rows:
        return None
    limited = [row for row in rows if row["policy"] != "full"]
    return {
        "rows": [{name: _finite(value) for name, value in row.items()} for row in rows],
        "sentences": [sentence(row) for row in limited],
        "caveat": CAVEAT,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
