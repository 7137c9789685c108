"""List the runs in a folder."""

from collections.abc import Callable, Iterator
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
        path: The folder.
        name: What was run.
        date: When it began, UTC.
        tables: How many tables there are.
        figures: How many figure files there are.
        outcome: How it ended, as far as that was written.
    """

    path: Path
    name: str
    date: str
    tables: int
    figures: int
    outcome: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> "RunSummary":
        """Return the summary of a run."""
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
        """Return the record that `joma runs list --json` prints."""
        return {**vars(self), "path": str(self.path)}


def list_runs(
    root: Path | str, *, left_out: Callable[[Path, str], None] = lambda path, why: None
) -> list[RunSummary]:
    """Return the runs in `root` and in the folders below it, oldest first.

    Args:
        root: The folder to search, three folders deep.
        left_out: Called with each folder or run that cannot be read, and why.
    """
    root = Path(root)
    if not root.is_dir():
        raise JomaError(f"root must be a folder, but {root} is none")
    summaries: list[RunSummary] = []
    for folder in _folders(root, _DEPTH, left_out):
        try:
            if is_run(folder) and (folder / CONFIG).exists():
                summaries.append(RunSummary.of(Run.open(folder)))
        except OSError as error:
            left_out(folder, error.strerror or str(error))
        except JomaError as error:
            left_out(folder, str(error))
    return sorted(summaries, key=lambda summary: (summary.date, summary.path))


def _folders(folder: Path, depth: int, left_out: Callable[[Path, str], None]) -> Iterator[Path]:
    yield folder
    if depth == 0:
        return
    try:
        children = sorted(child for child in folder.iterdir() if _is_searched(child))
    except OSError as error:
        left_out(folder, error.strerror or str(error))
        return
    for child in children:
        yield from _folders(child, depth - 1, left_out)


def _is_searched(path: Path) -> bool:
    hidden = path.name.startswith(".") or path.name in OWN_FOLDERS
    return not hidden and path.is_dir() and not path.is_symlink()
