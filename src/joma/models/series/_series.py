"""Series of checkpoints by their steps, and `verify`.

A series is a folder of checkpoint folders, a list of such folders, or the revisions of a model on
the Hugging Face hub. `verify` reads all of them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from joma.errors import JomaError
from joma.models._schedule import SCHEDULES
from joma.models.hub import WEIGHTS
from joma.models.series._fingerprint import (
    Fingerprint,
    fingerprint,
)
from joma.models.series._integrity import Integrity, judge

Progress = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is done, and how much there is."""

_NAMED = re.compile(r"(?:^|[^a-z])(?:global_?)?(?:step|checkpoint|ckpt|iter|iteration)s?[-_]?(\d+)")
_LAST = re.compile(r"(\d+)$")


@dataclass(frozen=True)
class SeriesCheckpoint:
    """The weights of one step.

    Attributes:
        step: The step of training, from 0.
        source: A folder or a hub id.
        revision: The revision of the hub id.
    """

    step: int
    source: str
    revision: str | None = None

    def __post_init__(self) -> None:
        if self.step < 0:
            raise JomaError(f"step must be a whole number from 0 on, got {self.step}")

    @property
    def missing(self) -> str | None:
        """Why it is not there, where that is known without a download."""
        if self.revision is not None or Path(self.source).is_dir():
            return None
        return f"there is no folder {self.source}"


@dataclass(frozen=True)
class Series:
    """Checkpoints of one training, by their steps.

    Attributes:
        name: Its name in reports.
        checkpoints: Its checkpoints in the order of their steps, each step once.
        schedule: The steps there should be, where that is known.
    """

    name: str
    checkpoints: tuple[SeriesCheckpoint, ...]
    schedule: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise JomaError(f"checkpoints must not be empty, but {self.name} has none")
        for one, two in pairwise(self.checkpoints):
            if one.step == two.step:
                raise JomaError(
                    f"checkpoints must be of different steps, but {_which(one)} and {_which(two)} "
                    f"are both of step {one.step}"
                )
            if one.step > two.step:
                raise JomaError(
                    f"checkpoints must be in the order of their steps, got {one.step} before "
                    f"{two.step}"
                )

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps there are."""
        return tuple(checkpoint.step for checkpoint in self.checkpoints)

    @classmethod
    def of(
        cls,
        source: str | Path | Sequence[str | Path],
        *,
        revisions: str | Iterable[str] | None = None,
        schedule: str | Iterable[int] | None = None,
    ) -> "Series":
        """Return the series that a person names.

        Args:
            source: a folder of checkpoint folders, such as step0, checkpoint-500, 000500; a list of
                such folders; or a hub id, with its revisions given or behind an @, as in
                EleutherAI/pythia-70m@pythia.
            revisions: of a hub id: "step0,step1000", a list of them, or "pythia" for all of
                Pythia's. Their numbers are the steps.
            schedule: the steps there should be, "pythia" for Pythia's; of a hub id's, those asked
                for; otherwise `verify` infers a regular one.
        """
        expected = _schedule(schedule)
        if not isinstance(source, str | Path):
            folders = [Path(folder) for folder in source]
            if len(folders) != 1:
                return _of_folders(folders, expected)
            source = folders[0]
        path = Path(source)
        if path.is_dir():
            if revisions is not None:
                raise JomaError(f"revisions go with a hub id, but were given for the folder {path}")
            return _of_folder(path, expected)
        name, at, behind = str(source).partition("@")
        if at and revisions is None:
            revisions = behind
        if revisions is None:
            raise JomaError(
                f"{source} is no folder; a series is a folder of checkpoint folders, several such "
                "folders, or a hub id with its revisions, as in EleutherAI/pythia-70m@pythia"
            )
        return _of_revisions(name, revisions, expected)


def verify(series: Series, *, progress: Progress | None = None) -> Integrity:
    """Find duplicates, gaps, checkpoints out of place and damaged files in a series.

    Every checkpoint is read once, one tensor at a time. Two are *duplicates* when their files have
    the same sha256, or their weights are equal in other files. A step is *missing* when the
    schedule has it (the one given, or a regular one inferred from the steps there are: constant
    spacing, doubling, or the second and then the first as in Pythia). A checkpoint is *misordered*
    when the way through all weights in the order of the steps becomes much shorter with it
    elsewhere; `joma.models.series.misplaced` says how much. It is *unlike* the others when names or
    shapes of its tensors are not theirs.

    Args:
        series: The series.
        progress: Called with how far it is.

    Raises:
        ValueError: not a single checkpoint can be read.
    """
    found: dict[int, Fingerprint] = {}
    absent: dict[int, str] = {}
    unreadable: dict[int, str] = {}
    count = len(series.checkpoints)
    for number, checkpoint in enumerate(series.checkpoints):
        if progress is not None:
            progress(f"read step {checkpoint.step}", number, count)
        if (why := checkpoint.missing) is not None:
            absent[checkpoint.step] = why
            continue
        try:
            found[checkpoint.step] = fingerprint(checkpoint.source, revision=checkpoint.revision)
        except (ValueError, OSError) as error:
            place = absent if not_there(error) else unreadable
            place[checkpoint.step] = reason(error)
    check_some(series, found, {**absent, **unreadable})
    return judge(series.name, found, absent=absent, unreadable=unreadable, schedule=series.schedule)


def check_some(series: Series, readable: Iterable[int], reasons: dict[int, str]) -> None:
    """Raise JomaError for a series of which nothing can be read."""
    if not any(True for _ in readable):
        first = min(reasons)
        raise JomaError(
            f"none of the {len(series.checkpoints)} checkpoints of {series.name} can be read; of "
            f"step {first}, {reasons[first]}"
        )


def not_there(error: BaseException) -> bool:
    """Return whether an error says that a hub id has no such revision."""
    return type(error.__cause__).__name__ == "RevisionNotFoundError"


def reason(error: Exception) -> str:
    """Return what an error says of a checkpoint, in one line."""
    if isinstance(error, OSError):
        return f"{error.filename or 'its files'}: {error.strerror or error}"
    return " ".join(str(error).split()).rstrip(".")


def step_of(name: str) -> int | None:
    """Return the step in the name of a folder or revision; None where it has none.

    "step1000", "checkpoint-500", "global_step500", "step1000-tokens4B" and "iter_0000500" say what
    their number is; otherwise it is the number at the end, as in "000500" or "model-500".

    >>> step_of("checkpoint-500"), step_of("000500"), step_of("final")
    (500, 500, None)
    """
    found = _NAMED.search(name.lower()) or _LAST.search(name)
    # More digits are no step, and Python reads no number of 4,300 digits.
    return None if found is None or len(found[1]) > 18 else int(found[1])


def _of_folder(folder: Path, schedule: tuple[int, ...] | None) -> Series:
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    inside = [path for path in inside if not path.name.startswith(".")]
    steps = [path for path in inside if step_of(path.name) is not None and _meant(path)]
    if not steps:
        if any((folder / name).exists() for name in WEIGHTS):
            raise JomaError(
                f"{folder} holds one checkpoint; a series is a folder of such folders, named by "
                "their steps"
            )
        names = ", ".join(path.name for path in inside[:5]) or "none"
        raise JomaError(
            f"{folder} must hold checkpoint folders named by their steps, such as step1000 or "
            f"checkpoint-500; its folders are {names}"
        )
    return Series(str(folder), _sorted(_at(path) for path in steps), schedule)


def _meant(path: Path) -> bool:
    """Return whether a folder with a number in its name is a checkpoint: logs-2024 is none."""
    named = path.name.isdecimal() or _NAMED.search(path.name.lower()) is not None
    return named or any((path / name).exists() for name in ("config.json", *WEIGHTS))


def _of_folders(folders: Sequence[Path], schedule: tuple[int, ...] | None) -> Series:
    if not folders:
        raise JomaError("a series must have checkpoints, got no folder")
    name = f"{folders[0]} … {folders[-1]}"
    return Series(name, _sorted(_at(path) for path in folders), schedule)


def _at(path: Path) -> SeriesCheckpoint:
    step = step_of(path.name)
    if step is None:
        raise JomaError(
            f"folder {path} must have its step in its name, such as step1000 or checkpoint-500"
        )
    return SeriesCheckpoint(step, str(path))


def _of_revisions(
    name: str, revisions: str | Iterable[str], schedule: tuple[int, ...] | None
) -> Series:
    if isinstance(revisions, str):
        known = SCHEDULES.get(revisions)
        revisions = revisions.split(",") if known is None else [f"step{step}" for step in known]
    checkpoints = []
    for revision in (word.strip() for word in revisions):
        step = step_of(revision)
        if step is None:
            raise JomaError(
                f"revisions must have their step in their names, as in step0,step1000, or be one "
                f"of {', '.join(SCHEDULES)}, got {revision!r}"
            )
        checkpoints.append(SeriesCheckpoint(step, name, revision))
    if len(checkpoints) == 0:
        raise JomaError(f"revisions of {name} must be named, got none")
    steps = tuple(sorted(checkpoint.step for checkpoint in checkpoints))
    return Series(name, _sorted(checkpoints), steps if schedule is None else schedule)


def _schedule(given: str | Iterable[int] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, str):
        if given in SCHEDULES:
            return SCHEDULES[given]
        try:
            given = [int(step) for step in given.split(",")]
        except ValueError:
            raise JomaError(
                f"schedule must be steps such as 0,500,1000 or one of {', '.join(SCHEDULES)}, got "
                f"{given!r}"
            ) from None
    steps = tuple(sorted(set(given)))
    if not steps or steps[0] < 0:
        raise JomaError(f"schedule must be steps from 0 on, got {list(steps)}")
    return steps


def _sorted(checkpoints: Iterable[SeriesCheckpoint]) -> tuple[SeriesCheckpoint, ...]:
    return tuple(sorted(checkpoints, key=lambda checkpoint: checkpoint.step))


def _which(checkpoint: SeriesCheckpoint) -> str:
    return checkpoint.source if checkpoint.revision is None else checkpoint.revision
