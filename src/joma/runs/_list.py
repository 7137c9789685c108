"""What runs a folder holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joma.errors import JomaError
from joma.runs._folder import CONFIG, OUTCOME_FILE, OWN_FOLDERS, is_run
from joma.runs._run import Run

_DEPTH = 3


@dataclass(frozen=True)
class RunSummary:
    """A run in one line.

    Attributes:
        path: the folder.
        name: what was run.
        date: when it began, UTC.
        tables: how many tables there are.
        figures: how many figure files there are.
        outcome: how it ended, as far as that was written.
    """

    path: Path
    name: str
    date: str
    tables: int
    figures: int
    outcome: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> "RunSummary":
        """The summary of a run."""
        try:
            outcome = run.read_json(OUTCOME_FILE.removesuffix(".json"))
        except ValueError:
            outcome = {}
        return cls(
            path=run.path,
            name=run.name,
            date=str(run.environment.get("date", "")),
            tables=len(run.tables),
            figures=len(run.figures),
            outcome=outcome if isinstance(outcome, dict) else {},
        )

    def as_json(self) -> dict[str, Any]:
        """The summary as the record that `joma runs list --json` prints."""
        return {
            "path": str(self.path),
            "name": self.name,
            "date": self.date,
            "tables": self.tables,
            "figures": self.figures,
            "outcome": self.outcome,
        }


def list_runs(root: Path | str) -> list[RunSummary]:
    """The runs in `root` and in the folders below it, oldest first; unreadable ones left out."""
    root = Path(root)
    if not root.is_dir():
        raise JomaError(f"root must be a folder, but {root} is none")
    summaries: list[RunSummary] = []
    for folder in _folders(root, _DEPTH):
        if is_run(folder) and (folder / CONFIG).is_file():
            try:
                summaries.append(RunSummary.of(Run.open(folder)))
            except (ValueError, KeyError, AttributeError):
                continue
    return sorted(summaries, key=lambda summary: (summary.date, summary.path))


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth == 0:
        return
    for child in sorted(folder.iterdir()):
        hidden = child.name.startswith(".") or child.name in OWN_FOLDERS
        if child.is_dir() and not hidden and not child.is_symlink():
            yield from _folders(child, depth - 1)
