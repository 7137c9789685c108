"""Series of checkpoints of one training: where they are, and whether they can be believed.

A series is a folder of checkpoint folders, a list of such folders, or the revisions of a model on
the Hugging Face hub. Public series are known to hold repeated weights, so `verify` reads all
checkpoints before anything is read off their curves.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from joma.common.files import write_bytes
from joma.errors import JomaError
from joma.models.checksums import SUMS, check_checksums, sha256
from joma.models.hub import WEIGHTS, is_tokenizer_file, local_folder
from joma.models.weight_files import WeightFiles

PYTHIA = (0, *(2**k for k in range(10)), *range(1000, 143_001, 1000))
"""The steps at which Pythia's 154 checkpoints were kept."""

SCHEDULES = {"pythia": PYTHIA}
"""Schedules known by name."""

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
        ordered = tuple(sorted(self.checkpoints, key=lambda checkpoint: checkpoint.step))
        object.__setattr__(self, "checkpoints", ordered)
        for one, two in pairwise(ordered):
            if one.step == two.step:
                both = (it.source if it.revision is None else it.revision for it in (one, two))
                raise JomaError(
                    f"checkpoints must be of different steps, but {' and '.join(both)} are both of "
                    f"step {one.step}"
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
                for; otherwise `verify` infers constant spacing where the steps have it.
        """
        expected = _schedule(schedule)
        if not isinstance(source, str | Path):
            folders = [Path(folder) for folder in source]
            if len(folders) != 1:
                name = f"{folders[0]} … {folders[-1]}" if folders else "a series"
                return cls(name, tuple(_at(path) for path in folders), expected)
            source = folders[0]
        path = Path(source)
        if path.is_dir():
            if revisions is not None:
                raise JomaError(f"revisions go with a hub id, but were given for the folder {path}")
            return cls(str(path), tuple(_at(inside) for inside in _inside(path)), expected)
        name, at, behind = str(source).partition("@")
        if at and revisions is None:
            revisions = behind
        if revisions is None:
            raise JomaError(
                f"{source} is no folder; a series is a folder of checkpoint folders, several such "
                "folders, or a hub id with its revisions, as in EleutherAI/pythia-70m@pythia"
            )
        if isinstance(revisions, str):
            known = SCHEDULES.get(revisions)
            revisions = revisions.split(",") if known is None else [f"step{it}" for it in known]
        series = cls(name, tuple(_at(name, revision.strip()) for revision in revisions), expected)
        return series if expected is not None else cls(name, series.checkpoints, series.steps)


@dataclass(frozen=True)
class SeriesProblem:
    """One thing that is wrong with a series.

    Attributes:
        kind: "missing", a step the schedule has and the series has not; "unreadable", its files are
            cut short, damaged, refused or hold NaN; "unlike", it holds other tensors than the rest;
            "duplicate", its files are those of another step.
        steps: All the steps it is about.
        sentence: What a person should know.
    """

    kind: str
    steps: tuple[int, ...]
    sentence: str

    def as_json(self) -> dict[str, Any]:
        """Return the record that `joma series verify --json` prints."""
        return {**vars(self), "steps": list(self.steps)}


@dataclass(frozen=True)
class Integrity:
    """Whether a series can be believed.

    Attributes:
        series: Its name.
        findings: What is wrong, by the steps it is about; none in a sound series.
        hashes: sha256 of each readable checkpoint's weight files, by step and file name.
        verified: Steps whose files carry checksums and are as those have it. Of others, damage that
            leaves files readable is not noticed.
    """

    series: str
    findings: tuple[SeriesProblem, ...]
    hashes: Mapping[int, Mapping[str, str]]
    verified: tuple[int, ...] = ()

    @property
    def unverified(self) -> tuple[int, ...]:
        """The steps that could be read and carry no checksums."""
        return tuple(step for step in sorted(self.hashes) if step not in self.verified)

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def bad_steps(self) -> tuple[int, ...]:
        """Every step that should not be believed, or is not there."""
        return tuple(sorted({step for finding in self.findings for step in finding.steps}))

    def as_json(self) -> dict[str, Any]:
        """Return the record that `joma series verify --json` prints."""
        return {
            "series": self.series,
            "clean": self.clean,
            "bad_steps": list(self.bad_steps),
            "findings": [finding.as_json() for finding in self.findings],
            "verified": list(self.verified),
            "unverified": list(self.unverified),
            "sha256": {str(step): dict(files) for step, files in self.hashes.items()},
        }


@dataclass(frozen=True)
class Fingerprint:
    """One checkpoint's files and tensors, in short.

    Attributes:
        files: sha256 of each weight file, by its name.
        shapes: Names and shapes of all tensors.
        verified: Whether checksums written with the files have been compared with them.
    """

    files: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    verified: bool = False


def fingerprint(source: str | Path, *, revision: str | None = None) -> Fingerprint:
    """Return the fingerprint of a checkpoint, which is read tensor by tensor.

    Raises:
        ValueError: it cannot be read, holds numbers that are not finite, or is not as its checksums
            have it.
    """
    stored = WeightFiles(source, revision=revision)
    for name, tensor in stored.tensors.items():
        numbers = tensor.bytes and tensor.dtype.is_floating_point
        if numbers and not torch.isfinite(stored.read(name).float()).all():
            raise JomaError(f"{tensor.file} holds NaN or infinity in {name}")
    files = {str(path.relative_to(stored.folder)): sha256(path) for path in stored.files}
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
    return Fingerprint(files, shapes, check_checksums(stored.folder, files))


def kept_fingerprint(kept: Path, source: str | Path, revision: str | None = None) -> Fingerprint:
    """Return `fingerprint`, from the file `kept` if it is of these files; else write it there.

    Files are taken to be the same while their sizes and times of change are.
    """
    stored = WeightFiles(source, revision=revision)
    stamps = {
        str(path.relative_to(stored.folder)): [path.stat().st_size, path.stat().st_mtime_ns]
        for path in (*stored.files, stored.folder / SUMS)
        if path.exists()
    }
    try:
        before = json.loads(kept.read_bytes())
        if before["stamps"] == stamps:
            shapes = {name: tuple(shape) for name, shape in before["shapes"].items()}
            return Fingerprint(before["files"], shapes, bool(before["verified"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # there is none yet, or it is damaged
    made = fingerprint(source, revision=revision)
    write_bytes(kept, json.dumps({"stamps": stamps, **vars(made)}).encode())
    return made


def settings_hashes(
    source: str | Path, *, revision: str | None = None, tokenizer: str | Path | None = None
) -> dict[str, str]:
    """Return hashes of what else than its weights decides what a checkpoint computes.

    These are its config.json and the files of its tokenizer, or of the one given instead: as
    `joma.models.load_tokenizer` takes it. A file that is not there has no hash.
    """
    folder = local_folder(source, revision)
    if tokenizer is None:
        return _hashes(folder, tokenizer=True)
    found = _hashes(folder, tokenizer=False)
    path = Path(tokenizer)
    if path.is_file():
        return found | {"tokenizer": sha256(path)}
    if tokenizer == "bytes":
        return found
    # Its own config.json may say of what class a tokenizer is.
    other = _hashes(local_folder(tokenizer), tokenizer=True)
    return found | {f"tokenizer/{name}": digest for name, digest in other.items()}


def _hashes(folder: Path, *, tokenizer: bool) -> dict[str, str]:
    return {
        path.name: sha256(path)
        for path in sorted(folder.iterdir())
        if path.name == "config.json" or (tokenizer and is_tokenizer_file(path.name))
        if path.is_file()
    }


def verify(series: Series, *, progress: Progress | None = None) -> Integrity:
    """Find repeated, missing and damaged checkpoints in a series.

    Every checkpoint is read once, one tensor at a time. Two are *duplicates* when their files have
    the same sha256. A step is *missing* when the schedule has it: the one given, or constant
    spacing where most steps have it. A checkpoint is *unlike* the others when names or shapes of
    its tensors are not theirs.

    Args:
        series: The series.
        progress: Called with how far it is.

    Raises:
        ValueError: not a single checkpoint can be read.
    """
    found: dict[int, Fingerprint] = {}
    absent: dict[int, str] = {}
    unreadable: dict[int, str] = {}
    for number, checkpoint in enumerate(series.checkpoints):
        if progress is not None:
            progress(f"read step {checkpoint.step}", number, len(series.checkpoints))
        if (why := checkpoint.missing) is not None:
            absent[checkpoint.step] = why
            continue
        try:
            found[checkpoint.step] = fingerprint(checkpoint.source, revision=checkpoint.revision)
        except (ValueError, OSError) as error:
            place = absent if not_there(error) else unreadable
            place[checkpoint.step] = reason(error)
    return judge(series, found, absent=absent, unreadable=unreadable)


def judge(
    series: Series,
    fingerprints: Mapping[int, Fingerprint],
    *,
    absent: Mapping[int, str],
    unreadable: Mapping[int, str],
) -> Integrity:
    """Return what is wrong with a series, from the fingerprints of its checkpoints alone.

    Args:
        series: The series.
        fingerprints: The fingerprints by step.
        absent: Steps that were asked for and are not there, and why.
        unreadable: Steps that could not be read, and why.

    Raises:
        JomaError: Not a single checkpoint can be read.
    """
    if not fingerprints:
        reasons = {**absent, **unreadable}
        first = min(reasons)
        raise JomaError(
            f"none of the {len(series.checkpoints)} checkpoints of {series.name} can be read; of "
            f"step {first}, {reasons[first]}"
        )
    missing, known = dict(absent), {*fingerprints, *unreadable, *absent}
    expected, why = series.schedule, "the schedule given has it"
    if expected is None:
        expected, why = _even_steps(sorted(known))
    missing |= {step: why for step in expected if step not in known}
    findings = [
        *(SeriesProblem("missing", (s,), f"step {s} is missing: {missing[s]}.") for s in missing),
        *(
            SeriesProblem("unreadable", (step,), f"step {step} cannot be read: {why}.")
            for step, why in unreadable.items()
        ),
        *_unlike(fingerprints),
        *_duplicates(fingerprints),
    ]
    return Integrity(
        series.name,
        tuple(sorted(findings, key=lambda finding: (finding.steps, finding.kind))),
        {step: fingerprints[step].files for step in sorted(fingerprints)},
        tuple(step for step in sorted(fingerprints) if fingerprints[step].verified),
    )


def _unlike(fingerprints: Mapping[int, Fingerprint]) -> Iterable[SeriesProblem]:
    """Yield findings on checkpoints with other tensors than most."""
    every = [it.shapes for it in fingerprints.values()]
    usual = max(every, key=every.count)
    for step, it in sorted(fingerprints.items()):
        both = sorted({*usual, *it.shapes})
        if names := [name for name in both if usual.get(name) != it.shapes.get(name)]:
            has, should = (_shape(of.get(names[0])) for of in (it.shapes, usual))
            sentence = (
                f"step {step} is of another model: {len(names)} of its tensors differ from those "
                f"of the other steps, such as {names[0]}, which is {has} and should be {should}."
            )
            yield SeriesProblem("unlike", (step,), sentence)


def _duplicates(fingerprints: Mapping[int, Fingerprint]) -> Iterable[SeriesProblem]:
    by_contents: dict[tuple[str, ...], list[int]] = {}
    for step, it in sorted(fingerprints.items()):
        by_contents.setdefault(tuple(sorted(it.files.values())), []).append(step)
    for steps in by_contents.values():
        if len(steps) > 1:
            *first, last = map(str, steps)
            sentence = f"steps {', '.join(first)} and {last} are byte-identical"
            if steps[0] == min(fingerprints):
                sentence += "; a learning rate that begins at zero can do that at the first step"
            yield SeriesProblem("duplicate", tuple(steps), f"{sentence}.")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " × ".join(map(str, shape)) or "one number"


def _even_steps(steps: Sequence[int]) -> tuple[Sequence[int], str]:
    """Return the steps of constant spacing that these are of with a few missing, and the reason.

    The spacing is the most frequent difference, which at least two thirds have and of which the
    others are multiples. The last step may end the training early. No steps where there is none.
    """
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    if len(gaps) > 2 and gaps[-1] < min(gaps[:-1]):
        gaps.pop()
    if not gaps:
        return (), ""
    spacing, often = Counter(gaps).most_common(1)[0]
    if often < 2 or often < math.ceil(2 * len(gaps) / 3) or any(gap % spacing for gap in gaps):
        return (), ""
    return range(steps[0], steps[-1], spacing), f"steps are {spacing} apart"


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


def _inside(folder: Path) -> list[Path]:
    """Return the checkpoint folders in a folder; logs-2024 is none."""
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != "."]
    found = [
        path
        for path in inside
        if step_of(path.name) is not None
        if path.name.isdecimal()
        or _NAMED.search(path.name.lower())
        or any((path / name).exists() for name in ("config.json", *WEIGHTS))
    ]
    if found:
        return found
    if any((folder / name).exists() for name in WEIGHTS):
        raise JomaError(
            f"{folder} holds one checkpoint; a series is a folder of such folders, named by their "
            "steps"
        )
    names = ", ".join(path.name for path in inside[:5]) or "none"
    raise JomaError(
        f"{folder} must hold checkpoint folders named by their steps, such as step1000 or "
        f"checkpoint-500; its folders are {names}"
    )


def _at(source: str | Path, revision: str | None = None) -> SeriesCheckpoint:
    if revision is None:
        what, name = f"folder {source}", Path(source).name
    else:
        what, name = f"revision {revision!r} of {source}", revision
    step = step_of(name)
    if step is None:
        raise JomaError(
            f"{what} must have its step in its name, such as step1000 or checkpoint-500"
            + ("" if revision is None else f", or be one of {', '.join(SCHEDULES)}")
        )
    return SeriesCheckpoint(step, str(source), revision)


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
