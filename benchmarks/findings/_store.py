"""Trained cases: the run folder of each case's monitor, and what is known of it in `case.json`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.findings._case import Case
from joma.runs import Run


@dataclass(frozen=True)
class Stored:
    """A case that was trained.

    Attributes:
        case: What was trained.
        facts: Final losses and the like; "error" or "skipped" where it was not trained.
        columns: The metrics log; empty where it was not trained.
    """

    case: Case
    facts: dict[str, Any]
    columns: dict[str, NDArray[np.generic]]


def store(run: Run, case: Case, facts: dict[str, Any]) -> None:
    """Write last what is known of a case, so that one that broke off is trained again."""
    run.write_json("case", {"case": asdict(case), "facts": facts})


def read_all(folder: Path, pattern: str = "*") -> Iterator[Stored]:
    """Yield the cases stored in a folder, by name."""
    for path in sorted(folder.glob(f"{pattern}/case.json")):
        run = Run.open(path.parent)
        known = run.read_json("case")
        trained = "validation_loss" in known["facts"]
        columns = run.metrics.read() if trained else {}
        yield Stored(Case(**known["case"]), known["facts"], columns)
