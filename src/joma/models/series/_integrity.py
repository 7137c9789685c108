"""The judgement on a series of checkpoints: what is repeated, missing, out of place, unreadable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from joma.models._schedule import Schedule, inferred
from joma.models.series._fingerprint import Fingerprint
from joma.models.series._ordering import Misplaced, misplaced

Kind = Literal["missing", "unreadable", "unlike", "duplicate", "misordered"]


@dataclass(frozen=True)
class SeriesProblem:
    """One thing that is wrong with a series.

    Attributes:
        kind: "missing", a step the schedule has and the series has not; "unreadable", its files are
            cut short, damaged, refused or hold NaN; "unlike", it holds other tensors than the rest;
            "duplicate", its weights are those of another step; "misordered", its weights belong to
            another place of the series.
        steps: all the steps it is about.
        bad: Those of them whose weights are not their own, as far as that is known.
        sentence: what a person should know.
        evidence: the numbers behind it.
    """

    kind: Kind
    steps: tuple[int, ...]
    bad: tuple[int, ...]
    sentence: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the record that `joma series verify --json` prints."""
        lists = {"steps": list(self.steps), "bad": list(self.bad)}
        return {**vars(self), **lists, "evidence": dict(self.evidence)}


@dataclass(frozen=True)
class Neighbours:
    """How far training moved between two checkpoints that follow each other.

    Attributes:
        earlier: step of the first.
        later: step of the second.
        distance: ‖w − w'‖ / ‖w'‖ over all weights, w' the later; to about 1%.
    """

    earlier: int
    later: int
    distance: float


@dataclass(frozen=True)
class Integrity:
    """Whether a series can be believed.

    Attributes:
        series: its name.
        steps: those whose weights could be read and compared.
        findings: what is wrong, by the steps it is about; none in a sound series.
        neighbours: the distances between those that follow each other.
        hashes: sha256 of each checkpoint's weight files, by step and file name.
        verified: Steps whose files carry checksums and are as those have it. Of others, damage that
            leaves files readable is not noticed.
    """

    series: str
    steps: tuple[int, ...]
    findings: tuple[SeriesProblem, ...]
    neighbours: tuple[Neighbours, ...]
    hashes: Mapping[int, Mapping[str, str]]
    verified: tuple[int, ...] = ()

    @property
    def unverified(self) -> tuple[int, ...]:
        """The steps that could be read and carry no checksums."""
        return tuple(step for step in sorted(self.hashes) if step not in set(self.verified))

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def bad_steps(self) -> tuple[int, ...]:
        """Every step that should not be believed, or is not there."""
        return tuple(sorted({step for finding in self.findings for step in finding.bad}))

    def as_json(self) -> dict[str, Any]:
        """Return the record that `joma series verify --json` prints."""
        return {
            "series": self.series,
            "clean": self.clean,
            "steps": list(self.steps),
            "bad_steps": list(self.bad_steps),
            "findings": [finding.as_json() for finding in self.findings],
            "neighbours": [
                {"from": pair.earlier, "to": pair.later, "distance": pair.distance}
                for pair in self.neighbours
            ],
            "verified": list(self.verified),
            "unverified": list(self.unverified),
            "sha256": {str(step): dict(files) for step, files in self.hashes.items()},
        }


def judge(
    series: str,
    fingerprints: Mapping[int, Fingerprint],
    *,
    absent: Mapping[int, str] | None = None,
    unreadable: Mapping[int, str] | None = None,
    schedule: Sequence[int] | None = None,
) -> Integrity:
    """Return what is wrong with a series, from the fingerprints of its checkpoints alone.

    Args:
        series: Its name.
        fingerprints: The fingerprints by step.
        absent: Steps that were asked for and are not there, and why.
        unreadable: Steps that could not be read, and why.
        schedule: The steps there should be; if None, a regular one is inferred from those there.
    """
    absent, unreadable = absent or {}, unreadable or {}
    unlike, alike = _unlike(fingerprints)
    steps = tuple(sorted(alike))
    distances_NN = _distances([alike[step] for step in steps])
    out_of_place = [
        _misordered(found, steps, distances_NN, [alike[step].norm for step in steps])
        for found in misplaced(distances_NN)
    ]
    duplicates = _duplicates(steps, alike, distances_NN)
    findings = [
        *_missing({*fingerprints, *unreadable}, absent, schedule),
        *(
            SeriesProblem("unreadable", (step,), (step,), f"step {step} cannot be read: {why}.")
            for step, why in unreadable.items()
        ),
        *unlike,
        *_blamed(duplicates, out_of_place),
    ]
    return Integrity(
        series,
        steps,
        tuple(sorted(findings, key=lambda finding: (finding.steps, finding.kind))),
        tuple(
            Neighbours(a, b, _relative(alike[a].distance(alike[b]), alike[b].norm))
            for a, b in pairwise(steps)
        ),
        {step: fingerprints[step].files for step in sorted(fingerprints)},
        tuple(step for step in sorted(fingerprints) if fingerprints[step].verified),
    )


def _missing(
    there: set[int], absent: Mapping[int, str], schedule: Sequence[int] | None
) -> list[SeriesProblem]:
    reasons, known = dict(absent), there | set(absent)
    expected = inferred(sorted(known)) if schedule is None else Schedule(tuple(schedule), "")
    for step in expected.steps if expected is not None else ():
        if step not in known:
            reasons[step] = (expected and expected.reason) or "the schedule given has it"
    return [
        SeriesProblem("missing", (step,), (step,), f"step {step} is missing: {why}.")
        for step, why in reasons.items()
    ]


def _unlike(
    fingerprints: Mapping[int, Fingerprint],
) -> tuple[list[SeriesProblem], dict[int, Fingerprint]]:
    """Return findings on checkpoints with other tensors than most, and the fingerprints of most."""
    kinds: list[tuple[Mapping[str, tuple[int, ...]], list[int]]] = []
    for step, it in sorted(fingerprints.items()):
        like = next((steps for shapes, steps in kinds if shapes == it.shapes), None)
        if like is None:
            kinds.append((it.shapes, [step]))
        else:
            like.append(step)
    if not kinds:
        return [], {}
    usual, most = max(kinds, key=lambda kind: len(kind[1]))
    found = []
    for shapes, steps in kinds:
        names = sorted(name for name in {*usual, *shapes} if usual.get(name) != shapes.get(name))
        for step in steps if steps is not most else ():
            first = names[0]
            has, should = (_shape(of.get(first)) for of in (shapes, usual))
            found.append(
                SeriesProblem(
                    "unlike",
                    (step,),
                    (step,),
                    f"step {step} is of another model: {len(names)} of its tensors differ from "
                    f"those of the other steps, such as {first}, which is {has} and should be "
                    f"{should}.",
                    {"tensors": names[:10]},
                )
            )
    return found, {step: fingerprints[step] for step in most}


def _duplicates(
    steps: tuple[int, ...], alike: Mapping[int, Fingerprint], distances_NN: NDArray[np.float64]
) -> list[SeriesProblem]:
    found, taken = [], set()
    for i, step in enumerate(steps):
        same = [steps[j] for j in range(i, len(steps)) if distances_NN[i, j] == 0]
        same = [other for other in same if alike[other].norm == alike[step].norm]
        if len(same) < 2 or step in taken:
            continue
        taken.update(same)
        identical = all(alike[other].contents == alike[step].contents for other in same)
        how = "are byte-identical" if identical else "hold equal weights in different files"
        sentence = f"steps {_listed(same)} {how}"
        if i == 0 and list(steps[: len(same)]) == same:
            sentence += "; a learning rate that begins at zero can do that at the first step"
        hashes = {str(other): list(alike[other].contents) for other in same}
        found.append(
            SeriesProblem("duplicate", tuple(same), tuple(same), f"{sentence}.", {"sha256": hashes})
        )
    return found


def _misordered(
    found: Misplaced,
    steps: tuple[int, ...],
    distances_NN: NDArray[np.float64],
    norms: Sequence[float],
) -> SeriesProblem:
    moved = tuple(steps[i] for i in found.moved)
    here = {i: [j for j in (i - 1, i + 1) if 0 <= j < len(steps)] for i in found.moved}
    distances = {
        str(steps[i]): {
            str(steps[j]): _relative(float(distances_NN[i, j]), norms[i])
            for j in sorted({*here[i], *_targets(found), int(_nearest(distances_NN, i))} - {i})
        }
        for i in found.moved
    }
    if found.exchanged:
        sentence = f"steps {_listed(moved)} stand in each other's place"
    else:
        one = len(moved) == 1
        sentence = (
            f"{'step' if one else 'steps'} {_listed(moved)} {'is' if one else 'are'} out of place: "
            f"{'its' if one else 'their'} weights belong {_place(found, steps)}"
        )
    first = found.moved[0]
    far = {j: distances_NN[first, j] for j in {_nearest(distances_NN, first), *here[first]}}
    lies = [
        f"{_relative(float(far[j]), norms[first]):.2g} from step {steps[j]}"
        for j in sorted(far, key=lambda j: (far[j], j))
    ]
    sentence += (
        f"; step {steps[first]} lies {_listed(lies)}, in parts of the length of its weights."
    )
    return SeriesProblem(
        "misordered",
        moved,
        moved,
        sentence,
        {"excess_left": found.share, "distances": distances},
    )


def _blamed(
    duplicates: Sequence[SeriesProblem], out_of_place: Sequence[SeriesProblem]
) -> list[SeriesProblem]:
    """Return the findings with fewer bad steps: those out of place, those repeated."""
    repeated = {step for finding in duplicates for step in finding.steps}
    findings = []
    for finding in out_of_place:
        bad = tuple(step for step in finding.bad if step in repeated)
        alone = 0 < len(bad) < len(finding.bad)
        findings.append(replace(finding, bad=bad) if alone else finding)
    strays = {step for finding in findings for step in finding.bad}
    for finding in duplicates:
        bad = tuple(step for step in finding.steps if step in strays)
        whole = not bad or len(bad) == len(finding.steps)
        findings.append(finding if whole else replace(finding, bad=bad))
    return findings


def _distances(fingerprints: Sequence[Fingerprint]) -> NDArray[np.float64]:
    count = len(fingerprints)
    distances_NN = np.zeros((count, count))
    for i, one in enumerate(fingerprints):
        for j in range(i):
            distances_NN[i, j] = distances_NN[j, i] = one.distance(fingerprints[j])
    return distances_NN


def _nearest(distances_NN: NDArray[np.float64], i: int) -> int:
    others = distances_NN[i].copy()
    others[i] = np.inf
    return int(np.argmin(others))


def _targets(found: Misplaced) -> list[int]:
    return [place for place in (found.after, found.before) if place is not None]


def _place(found: Misplaced, steps: tuple[int, ...]) -> str:
    if found.after is None or found.before is None:
        end, other = ("beginning", found.before) if found.after is None else ("end", found.after)
        assert other is not None
        return f"at the {end}, {'before' if end == 'beginning' else 'after'} step {steps[other]}"
    return f"between steps {steps[found.after]} and {steps[found.before]}"


def _relative(distance: float, norm: float) -> float:
    return distance / norm if norm > 0 else float(distance > 0)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " × ".join(map(str, shape)) or "one number"


def _listed(steps: Sequence[object]) -> str:
    *first, last = map(str, steps)
    return f"{', '.join(first)} and {last}" if first else last
