"""Fig. 7 of JoMA for any series of checkpoints: attention entropy and stable rank over training.

The paper shows OPT and Pythia: the stable rank of the MLPs' lower layers drops and bounces back in
top layers and falls in bottom ones. Here a series is first checked (`joma.models.series`), then
what is measured of each checkpoint is kept in a file of its own, `steps/step-N.json`, so that work
that is finished stays finished; steps that should not be believed are marked and left out of what
is said.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.analysis.probing import Probing, measure
from joma.common.files import remove_temporaries, write_bytes
from joma.common.progress import Progress
from joma.errors import JomaError
from joma.models.series import (
    Fingerprint,
    Integrity,
    Series,
    SeriesCheckpoint,
    judge,
    kept_fingerprint,
    not_there,
    reason,
    settings_hashes,
)
from joma.report import figures
from joma.report.series import Panel, draw_series
from joma.runs import Run

NAME = "probe-series"
PUBLISHED = (
    "entropy and stable rank of public checkpoints (Fig. 7): the stable rank of the MLP's lower "
    "layer drops and bounces back in top layers and falls in bottom ones."
)
BOUNCE = {"attention_entropy": 0.2, "stable_rank": 0.1}
"""How far a curve must fall and rise to have bounced back: in nats; as a share of where it was."""

_TITLES = {
    "attention_entropy": ("Attention entropy", "nats, mean over queries and heads"),
    "stable_rank": ("Stable rank, MLP lower layer", "‖W‖² / σ₁²"),
}
_IN_A_WORD = {  # of a step that is several, the last
    "missing": "missing",
    "unreadable": "unreadable",
    "unlike": "another model",
    "duplicate": "repeated",
}

_LISTED = 6
"""Findings that are written under the figure; of more, their number."""

_Place = tuple[str, str, int | None, int | None]
"""Metric, module, layer and head."""

Submit = Callable[..., Any]
"""Takes a function and its arguments; what it gives has the function's `result()`."""


@dataclass(frozen=True, eq=False)
class SeriesOutcome:
    """How a series was measured.

    Attributes:
        integrity: whether the series can be believed.
        done: the steps that are measured.
        failed: those that could not be, and why.
        notes: what else the reader should know.
        table: for each layer, where its curves begin, are lowest, and end.
        sentences: what the curves show.
    """

    integrity: Integrity
    done: tuple[int, ...]
    failed: Mapping[int, str]
    notes: tuple[str, ...]
    table: Sequence[Mapping[str, Any]]
    sentences: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing was found and everything was measured."""
        return self.integrity.clean and not self.failed


def config_of(series: Series, text: str, probing: Probing) -> dict[str, Any]:
    """Return what decides the numbers of a series, as its run folder keeps it.

    The steps are not part of it: a training that continues adds checkpoints to the same run.
    """
    config: dict[str, Any] = {"series": series.name, **probing.config}
    if probing.reads_text:
        config["text"] = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return config


def probe_series(
    run: Run,
    series: Series,
    text: str,
    probing: Probing,
    *,
    device: str,
    submit: Submit,
    progress: Progress,
) -> SeriesOutcome:
    """Check a series, measure the checkpoints that are not done, and draw them all.

    Args:
        run: where everything goes.
        series: the checkpoints.
        text: what they are read on.
        probing: what is measured.
        device: to compute on.
        submit: runs the work on one checkpoint, perhaps in another process.
        progress: called with how far it is.

    Raises:
        ValueError: not one checkpoint could be measured.
    """
    integrity = _checked(run, series, submit, progress)
    run.write_json("integrity", integrity.as_json())
    failed = {
        step: finding.sentence
        for finding in integrity.findings
        if finding.kind in ("missing", "unreadable")
        for step in finding.steps
        if step in series.steps
    }
    notes: list[str] = []
    readable = [it for it in series.checkpoints if it.step not in failed]
    work = {
        it.step: submit(
            _measured,
            it,
            _file(run.path, it.step),
            dict(integrity.hashes[it.step]),
            text,
            probing,
            device,
        )
        for it in readable
    }
    for number, (step, future) in enumerate(work.items()):
        progress(f"measure step {step}", number, len(work))
        said = future.result()
        if said.get("error"):
            failed[step] = f"step {step} could not be measured: {said['error']}."
        elif said.get("note") and said["note"] not in notes:
            notes.append(said["note"])
    done = tuple(step for step in series.steps if step not in failed)
    if not done:
        raise JomaError(f"nothing of {series.name} could be measured; {failed[min(failed)]}")
    progress("draw", len(work), len(work))
    curves = _collect(run, done)
    bad: dict[int, str] = {}
    for kind, words in _IN_A_WORD.items():
        for finding in integrity.findings:
            if finding.kind == kind:
                bad |= dict.fromkeys(finding.steps, words)
    bad |= {step: "not measured" for step in failed if step not in bad}
    table, sentences = _described(done, curves, bad)
    if curves:
        _draw(run, series, done, curves, bad, integrity, sentences)
    return SeriesOutcome(integrity, done, failed, tuple(notes), table, sentences)


def is_done(folder: Path, step: int) -> bool:
    """Return whether a step is measured in the run folder of a series."""
    return _finished(_file(folder, step)) is not None


def _file(folder: Path, step: int) -> Path:
    """Return the file of a step's measurements; its fingerprint is in a file next to it."""
    return folder / "steps" / f"step-{step}.json"


# The check


def _checked(run: Run, series: Series, submit: Submit, progress: Progress) -> Integrity:
    remove_temporaries(_file(run.path, 0).parent)
    work = {
        it.step: submit(_fingerprint, it, _file(run.path, it.step).with_suffix(".files.json"))
        for it in series.checkpoints
        if it.missing is None
    }
    absent = {it.step: it.missing for it in series.checkpoints if it.missing is not None}
    found: dict[int, Fingerprint] = {}
    unreadable: dict[int, str] = {}
    for number, (step, future) in enumerate(work.items()):
        progress(f"check step {step}", number, len(work))
        fingerprint, why, gone = future.result()
        if fingerprint is not None:
            found[step] = fingerprint
        else:
            (absent if gone else unreadable)[step] = why
    return judge(series, found, absent=absent, unreadable=unreadable)


def _fingerprint(checkpoint: SeriesCheckpoint, kept: Path) -> tuple[Fingerprint | None, str, bool]:
    """Return a checkpoint's fingerprint, or why there is none and whether the files are missing.

    It is cached in a file, since it reads every byte of the checkpoint; the file is used as long as
    the checkpoint's files have the same sizes and times of change.
    """
    try:
        return kept_fingerprint(kept, checkpoint.source, checkpoint.revision), "", False
    except (ValueError, OSError) as error:
        return None, reason(error), not_there(error)


# One checkpoint


def _measured(
    checkpoint: SeriesCheckpoint,
    kept: Path,
    hashes: dict[str, str],
    text: str,
    probing: Probing,
    device: str,
) -> dict[str, Any]:
    """Measure a checkpoint and keep the result in a file, unless the file has it already."""
    before = _finished(kept)
    start = time.perf_counter()
    try:
        # Without a text no tokenizer decides a number.
        settings = settings_hashes(
            checkpoint.source,
            revision=checkpoint.revision,
            tokenizer=probing.tokenizer if probing.reads_text else "bytes",
        )
        if before is not None and (before["sha256"], before["settings"]) == (hashes, settings):
            return {"note": before["note"]}
        probed = measure(
            checkpoint.source, text, probing, revision=checkpoint.revision, device=device
        )
    except (ValueError, OSError, ArithmeticError, RuntimeError) as error:
        return {"error": reason(error)}  # one checkpoint's weights do not end the series
    ended = {
        "sha256": hashes,
        "settings": settings,
        "note": probed.note,
        "roles": probed.roles,
        "seconds": round(time.perf_counter() - start, 2),
        "measurements": [one.as_json() for one in probed.measurements],
    }
    ended["checksum"] = _checksum(ended)
    write_bytes(kept, json.dumps(ended, allow_nan=False).encode())
    return {"note": probed.note}


def _finished(kept: Path) -> dict[str, Any] | None:
    """Return what was measured of a checkpoint, None if it is not done or its file is damaged."""
    try:
        found = json.loads(kept.read_bytes())
        checksum = found.pop("checksum")
    except (OSError, ValueError, AttributeError, KeyError):
        return None
    return found if checksum == _checksum(found) else None


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


# All of them


_Curves = Mapping[str, NDArray[np.float64]]
"""What is drawn: by metric, a number for each step and layer, NaN where there is none."""


def _collect(run: Run, steps: tuple[int, ...]) -> _Curves:
    """Write the numbers of all steps to the metrics of the run, and return those that are drawn."""
    run.metrics.rewind(-1)
    rows: dict[_Place, list[tuple[int, float, float | None]]] = {}
    drawn: dict[str, dict[str, tuple[int, dict[int, float]]]] = {name: {} for name in _TITLES}
    kinds: dict[str, str] = {}
    for place, step in enumerate(steps):
        found = _finished(_file(run.path, step))
        assert found is not None, "it was measured a moment ago"
        for one in found["measurements"]:
            key = (one["metric"], one["module"], one["layer"], one["head"])
            rows.setdefault(key, []).append((step, one["value"], one["bound"]))
            kinds[one["module"]] = one.get("kind", "")
            lower = found["roles"].get(one["module"]) == "mlp_lower"
            is_drawn = one["metric"] == "attention_entropy" or (
                one["metric"] == "stable_rank" and lower
            )
            if is_drawn and one["layer"] is not None and one["head"] is None:
                # Experts of one layer are drawn as one line.
                line = one["module"] if one["metric"] == "attention_entropy" else str(one["layer"])
                lines = drawn[one["metric"]]
                lines.setdefault(line, (one["layer"], {}))[1][place] = one["value"]
    for (name, module, layer, head), values in rows.items():
        at, value, bound = zip(*values, strict=True)
        run.metrics.append_many(
            at,
            name,
            np.array(value)[:, None],
            module=module,
            kind=kinds[module] if name.startswith("attention") else "",
            layer=layer,
            head=head,
            bound=None if None in bound else np.array(bound)[:, None],
        )
    run.metrics.compact()
    curves = {name: _by_layer(lines, len(steps)) for name, lines in drawn.items() if lines}
    layers = max((values.shape[1] for values in curves.values()), default=0)
    for name, values in curves.items():
        rest = ((0, 0), (0, layers - values.shape[1]))
        curves[name] = np.pad(values, rest, constant_values=np.nan)
    return curves


def _by_layer(
    lines: Mapping[str, tuple[int, Mapping[int, float]]], steps: int
) -> NDArray[np.float64]:
    """Return values by step and layer; by order where attentions share a layer, to keep all.

    Args:
        lines: By module, its layer and its values by the number of the step.
        steps: How many steps there are.
    """
    layers = [layer for layer, _ in lines.values()]
    if len(set(layers)) < len(layers):
        layers = list(range(len(layers)))
    values_SL = np.full((steps, 1 + max(layers)), np.nan)
    for layer, (_, points) in zip(layers, lines.values(), strict=True):
        for place, value in points.items():
            values_SL[place, layer] = value
    return values_SL


def _described(
    all_steps: tuple[int, ...], curves: _Curves, bad: Mapping[int, str]
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return where the curves of each layer begin, are lowest and end, and sentences about them."""
    good = [place for place, step in enumerate(all_steps) if step not in bad]
    steps = [all_steps[place] for place in good]
    if not good:
        return [], ("No step of the series is to be believed.",)
    layers = max((values.shape[1] for values in curves.values()), default=0)
    table: list[dict[str, Any]] = [{"layer": layer} for layer in range(layers)]
    sentences = []
    for metric, values_SL in curves.items():
        word = {"attention_entropy": "entropy", "stable_rank": "stable rank"}[metric]
        for row, values in zip(table, values_SL[good].T, strict=True):
            known = not np.isnan(values).all()
            at = int(np.nanargmin(values)) if known else 0
            row[f"{word} at step {steps[0]}"] = float(values[0]) if known else None
            row[f"{word} lowest"] = f"{values[at]:.4g} (step {steps[at]})" if known else None
            row[f"{word} at {steps[-1]}"] = float(values[-1]) if known else None
        if len(good) > 2:
            sentences.append(_in_words(metric, values_SL[good]))
    return table, tuple(sentences)


def _in_words(metric: str, values_SL: NDArray[np.float64]) -> str:
    first, lowest, last = values_SL[0], np.nanmin(values_SL, axis=0), values_SL[-1]
    ratio = metric == "stable_rank"
    fell = first - lowest >= BOUNCE[metric] * (first if ratio else 1)
    rose = last - lowest >= BOUNCE[metric] * (lowest if ratio else 1)
    what, much = {
        "attention_entropy": ("Attention entropy", f"{BOUNCE[metric]:g} nats"),
        "stable_rank": ("The stable rank", f"{BOUNCE[metric]:.0%}"),
    }[metric]
    return (
        f"{what} drops and bounces back, by at least {much} each way, in {_layers(fell & rose)}; "
        f"it falls and stays low in {_layers(fell & ~rose)}."
    )


def _layers(chosen: NDArray[np.bool_]) -> str:
    layers = [str(layer) for layer in np.flatnonzero(chosen)]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}" if layers else "no layer"


def _draw(
    run: Run,
    series: Series,
    steps: tuple[int, ...],
    curves: _Curves,
    bad: Mapping[int, str],
    integrity: Integrity,
    sentences: Sequence[str],
) -> None:
    panels = [
        Panel(*_TITLES[metric], values, ratios=metric == "stable_rank")
        for metric, values in curves.items()
    ]
    findings = [f"{it.sentence[:1].upper()}{it.sentence[1:]}" for it in integrity.findings]
    if len(findings) > _LISTED:
        findings[_LISTED:] = [f"And {len(findings) - _LISTED} more, in integrity.json."]
    lines = (f"Published: {PUBLISHED}", *sentences, " ".join(findings))
    figures.save(
        run,
        "series",
        draw_series(steps, panels, bad),
        title=f"{_called(series.name)}: attention and stable rank over training",
        caption="\n".join(filter(None, lines)),
    )


def _called(name: str) -> str:
    """Return the name of a series: that of the run where it is the `series/` of a run folder."""
    path = Path(name)
    whole = path.absolute().resolve() if path.name == "series" else path
    return whole.parent.name if whole.name == "series" and whole.parent.name else path.name
