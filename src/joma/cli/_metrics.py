"""What a run measured step by step: in a few words, and against another run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.runs import Run, TableDifference

_KEYS = ("step", "name", "module", "layer", "head", "member")


def summary(run: "Run") -> dict[str, Any] | None:
    """How many numbers the metrics log holds, of what, of how many members, and up to where."""
    log = run.metrics.read()
    if not log["step"].size:
        return None
    return {
        "rows": int(log["step"].size),
        "names": sorted(set(log["name"])),
        "members": int(log["member"].max()) + 1,
        "last_step": int(log["step"].max()),
    }


def compare(one: "Run", two: "Run") -> "TableDifference | None":
    """How what two runs measured differs, by name; None if neither has a log.

    When it was measured does not count, nor in which order within a step.
    """
    import numpy as np

    from joma.runs import TableDifference

    first, second = (_in_order(run.metrics.read()) for run in (one, two))
    if not first["step"].size and not second["step"].size:
        return None
    if not all(np.array_equal(first[key], second[key]) for key in _KEYS):
        return TableDifference("metrics", False, {})
    largest: dict[str, float] = {}
    for name in dict.fromkeys(first["name"]):
        rows = first["name"] == name
        for column, label in (("value", name), ("bound", f"{name} bound")):
            largest[label] = _largest(first[column][rows], second[column][rows])
    return TableDifference("metrics", True, largest)


def _in_order(log: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    sortable = dict(log)
    for key in ("name", "module"):
        sortable[key] = np.unique(log[key].astype(str), return_inverse=True)[1]
    order = np.lexsort([sortable[key] for key in reversed(_KEYS)])
    return {key: column[order] for key, column in log.items()}


def _largest(one: Any, two: Any) -> float:
    import numpy as np

    same = (one == two) | (np.isnan(one) & np.isnan(two))  # equal infinities have no difference
    return float(np.max(np.abs(np.subtract(one, two, out=np.zeros_like(one), where=~same))))
