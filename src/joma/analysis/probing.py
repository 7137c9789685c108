"""A probe of one model: load it, cut the text into windows, measure."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from joma.common.progress import Progress, no_progress
from joma.errors import JomaError, printable
from joma.models import Found, find_stored_weights, find_weights
from joma.models.architectures import ROLES, Architecture, known_architecture
from joma.models.checksums import check_checksums
from joma.models.hub import folder_if_here
from joma.models.loading import load, outlined
from joma.models.weight_files import WeightFiles
from joma.probes.metrics import PROBED, checked
from joma.probes.session import (
    DEFAULT_METRICS,
    WEIGHT_METRICS,
    Measurement,
    measurable,
    probe,
    probe_weights,
    unmeasured,
)
from joma.probes.text import BEYOND, WINDOW, WINDOWS, text_windows
from joma.runs import Run

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MOST_LETTERS_PER_TOKEN = 64


@dataclass(frozen=True)
class Probing:
    """What is measured of a model, and how.

    Attributes:
        metrics: which, of `joma.probes.session.METRICS`; where None, those that fit.
        window: tokens read together; where None, 512, or what the model or the text has if less.
        windows: how many of them, at most.
        tokenizer: another than the model's, as `joma.models.loading.load` takes it.
        dtype: what the model computes in, one of `DTYPES`.
        low_memory: measure weights alone, one tensor at a time from their files.
        seed: decides samples.
        architecture: a map of where the weights are, for a model in which they are not found.
    """

    metrics: tuple[str, ...] | None = None
    window: int | None = None
    windows: int = WINDOWS
    tokenizer: str | None = None
    dtype: str = "float32"
    low_memory: bool = False
    seed: int = 0
    architecture: Architecture | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise JomaError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.metrics is not None:
            checked(self.metrics)
            needing = [metric for metric in self.metrics if metric not in WEIGHT_METRICS]
            if self.low_memory and needing:
                raise JomaError(
                    f"metrics must be among {', '.join(WEIGHT_METRICS)} where only weights are "
                    f"read (low memory), got {needing[0]!r}"
                )

    @cached_property
    def chosen(self) -> tuple[str, ...]:
        """The metrics that are measured."""
        if self.metrics is not None:
            return self.metrics
        if self.low_memory:
            return tuple(metric for metric in DEFAULT_METRICS if metric in WEIGHT_METRICS)
        return DEFAULT_METRICS

    @cached_property
    def reads_text(self) -> bool:
        """Whether a text is needed."""
        return any(metric not in WEIGHT_METRICS for metric in self.chosen)

    @cached_property
    def needs(self) -> set[str]:
        """What the metrics are measured of."""
        return {PROBED[metric].needs for metric in self.chosen}

    def beginning(self, text: str) -> str:
        """Return as much of a text as can be needed: it may be far longer."""
        return text[: _MOST_LETTERS_PER_TOKEN * ((self.window or WINDOW) * self.windows + BEYOND)]

    @property
    def config(self) -> dict[str, Any]:
        """What decides the numbers, as a run folder keeps it."""
        shown: dict[str, Any] = {"metrics": list(self.chosen), "seed": self.seed}
        if self.reads_text:
            shown |= {"window": self.window, "windows": self.windows, "dtype": self.dtype}
            shown |= {"tokenizer": self.tokenizer, "special_tokens": "around each window"}
        if self.architecture is not None:
            shown["map"] = asdict(self.architecture)
        return shown | ({"low_memory": True} if self.low_memory else {})


@dataclass(frozen=True, eq=False)
class Probed:
    """What was measured of one model.

    Attributes:
        measurements: the numbers.
        roles: what each weight that was probed is, by its module.
        shape: number and length of the windows that were read.
        note: what the reader should know of them.
        facts: the model, in short.
    """

    measurements: list[Measurement]
    roles: dict[str, str]
    shape: tuple[int, int] | None = None
    note: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def log(self, run: Run, step: int = 0) -> None:
        """Write the numbers to the metrics of a run, in place of those there."""
        run.metrics.rewind(-1)
        for one in self.measurements:
            labels = dict(vars(one))
            run.metrics.append(step, labels.pop("metric"), labels.pop("value"), **labels)
        run.metrics.flush()
        run.write_json("roles", self.roles)


def measure(
    source: str,
    text: str,
    probing: Probing,
    *,
    revision: str | None = None,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> Probed:
    """Load a model and measure it.

    Args:
        source: what `joma.models.loading.load` takes.
        text: what it is read on; may be empty where only weights are measured.
        probing: what is measured.
        revision: of a hub id.
        device: to compute on.
        progress: called with how far it is.
    """
    if probing.low_memory:
        return _measure_files(source, probing, revision, progress)
    progress("load the model", 0, 1)
    loaded = load(
        source,
        revision=revision,
        tokenizer=probing.tokenizer,
        device=device,
        dtype=DTYPES[probing.dtype],
    )
    shown, note = None, None
    if probing.reads_text:
        shown, note = text_windows(loaded, text, probing.window, probing.windows)
    parts, left_out = None, None
    if probing.needs != {"attention"}:
        parts = find_weights(loaded.model, architecture=probing.architecture)
        left_out = _left_out(parts, probing)
    how: dict[str, Any] = {"parts": parts, "seed": probing.seed, "progress": progress}
    if shown is None:
        found = probe_weights(loaded.model, metrics=probing.chosen, **how)
    else:
        found = probe(loaded.model, shown, metrics=probing.metrics, **how)
    known = probing.architecture or loaded.architecture
    config = getattr(loaded.model, "config", None)
    kind = getattr(config, "model_type", type(loaded.model).__name__)
    facts = {
        "architecture": str(kind) if known is None else known.name,
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "context": loaded.context,
    }
    if shown is not None:
        facts["special_tokens"] = loaded.special_tokens.describe() or "none"
    return Probed(
        found,
        {} if parts is None else {it.module: it.role for it in parts.weights},
        None if shown is None else (shown.shape[0], shown.shape[1]),
        " ".join(it for it in (note, left_out) if it) or None,
        facts,
    )


def check(
    source: str, text: str, probing: Probing, *, revision: str | None = None
) -> tuple[int, int] | None:
    """Raise what `measure` would raise of a folder's model, without measuring it.

    Only headers of weight files are read, and the model is built without numbers. Whether the
    files hold the model is for `joma.models.loading.check_source` to say.

    Args:
        source: as of `measure`.
        text: as of `measure`.
        probing: what is to be measured.
        revision: of a hub id.

    Returns:
        Number and length of the windows that would be read; None where none are, or where the
        source is no folder.
    """
    if probing.low_memory:
        if not Path(source).is_file() and folder_if_here(source, revision) is None:
            return None
        files = WeightFiles(source, revision=revision)
        parts = find_stored_weights(files, architecture=probing.architecture)
        measurable(probing.chosen, parts, files, asked_for=True)
        return None
    loaded = outlined(source, revision=revision, tokenizer=probing.tokenizer)
    if loaded is None:
        return None
    if probing.needs != {"attention"}:
        parts = find_weights(loaded.model, architecture=probing.architecture)
        asked_for = probing.metrics is not None
        measurable(probing.chosen, parts, loaded.model, asked_for=asked_for)
    if not probing.reads_text:
        return None
    shown, _ = text_windows(loaded, text, probing.window, probing.windows)
    return shown.shape[0], shown.shape[1]


def _left_out(parts: Found, probing: Probing) -> str | None:
    why = unmeasured(parts, probing.chosen)
    said = [f"Not measured: {metric} ({reason})." for metric, reason in why.items()]
    odd = {module: why for module, why in parts.missing.items() if module not in ROLES}
    if odd and "weights" in probing.needs:
        module, reason = next(iter(odd.items()))
        more = "" if len(odd) == 1 else f"; {len(odd) - 1} more weights are left out as well"
        said.append(f"Not measured: {module} ({reason}{more}).")
    return printable(" ".join(said)) or None


def _measure_files(
    source: str, probing: Probing, revision: str | None, progress: Progress
) -> Probed:
    files = WeightFiles(source, revision=revision)
    check_checksums(files.folder)
    parts = find_stored_weights(files, architecture=probing.architecture)
    how: dict[str, Any] = {"parts": parts, "seed": probing.seed, "progress": progress}
    found = probe_weights(files, metrics=probing.chosen, **how)
    config = files.config() or {}
    known = probing.architecture or known_architecture(config)
    name = config.get("model_type", "unknown") if known is None else known.name
    facts = {"architecture": name, "bytes": files.bytes}
    roles = {weight.module: weight.role for weight in parts.weights}
    return Probed(found, roles, note=_left_out(parts, probing), facts=facts)
