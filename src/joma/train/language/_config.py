"""The configuration of a training: read from a preset or a file, each section checks itself."""

import copy
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from joma.common.checks import (
    check_known,
    check_number,
    check_one_of,
    check_text,
    check_truth,
    whole_number,
)
from joma.errors import JomaError
from joma.optim import registry
from joma.runs import Run, differing

ModelType = Literal["gpt_neox", "gpt2", "llama", "opt"]
AUTO = "auto"
"""The value of `training.compile` that leaves the choice to the device."""

Whole = Annotated[int, range(2**63)]
Count = Annotated[int, range(1, 2**63)]
Number = Annotated[float, math.inf]
Share = Annotated[float, math.nextafter(1, 2)]
"""Numbers from 0 on, below the limit that stands with the type."""


class _Section:
    """A section whose settings must be what their annotations say."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Section").lower()
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            _check_setting(f"{section}.{name}", getattr(self, name), hint)


def _check_setting(name: str, value: Any, hint: Any) -> None:
    """Raise JomaError unless a value is what an annotation says; others than these always are."""
    if NoneType in get_args(hint):
        if value is None:
            return
        hint = get_args(hint)[0]
    if hint is bool:
        check_truth(name, value)
    elif hint is str:
        check_text(name, value)
    elif get_origin(hint) is Literal:
        check_one_of(name, value, get_args(hint))
    elif get_origin(hint) is Annotated:
        kind, limit = get_args(hint)
        if kind is int:
            whole_number(name, value, limit.start, below=limit.stop)
        else:
            check_number(name, value, below=limit)
    elif hint == tuple[str, ...]:
        if not isinstance(value, tuple):
            raise JomaError(f"{name} must be a list of names, got {value!r}")
        for word in value:
            check_text(name, word)


@dataclass(frozen=True)
class ModelSection(_Section):
    """[model]: a causal language model with random weights.

    Args:
        type: Architecture, as transformers names it.
        settings: The other entries of the section, as the configuration of that type names them;
            the rest is as transformers has it. The vocabulary is the tokenizer's unless
            `vocab_size` is given.
    """

    type: ModelType
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataSection(_Section):
    """[data]: the text, and how much of it a step reads.

    Args:
        corpus: What `joma.data.corpora.corpus` takes: embedded, wikitext-2, a folder, …
        tokenizer: bytes, basic_english, bpe (trained on the corpus), or what
            `joma.models.load_tokenizer` takes.
        vocabulary: How many tokens a bpe has.
        window: Number of tokens in a sequence.
        batch: Number of sequences in a step, over all pieces and processes.
    """

    corpus: str = "embedded"
    tokenizer: str = "bytes"
    vocabulary: Annotated[int, range(257, 2**63)] | None = None
    window: Count = 128
    batch: Count = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tokenizer == "bpe") != (self.vocabulary is not None):
            raise JomaError(
                "data.vocabulary goes with the tokenizer bpe, which needs it, got "
                f"{self.vocabulary} with the tokenizer {self.tokenizer}"
            )


@dataclass(frozen=True)
class OptimizerSection(_Section):
    """[optimizer]: matrices decay, biases and the gains of norms do not.

    Args:
        name: One of torch's optimizers or of ours, as `joma.optim.registry` names them.
        learning_rate: The highest.
        betas: Decay of the moments; (0.9, 0.95) for adamw unless given.
        weight_decay: Weight decay of matrices; 0.1 for adamw unless given.
        clip: The largest norm of the whole gradient; 0 does not clip.
        warmup: Steps in which the learning rate rises from 0, linearly.
        schedule: What it does afterwards: constant, cosine or linear.
        final: The fraction of it that is left at the last step, where the schedule lets it fall.
        settings: The other entries of the section, as the signature of the optimizer names them.
    """

    name: str = "adamw"
    learning_rate: Number = 1e-3
    betas: tuple[float, float] | None = None
    weight_decay: Number | None = None
    clip: Number = 1.0
    warmup: Whole = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    final: Share = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "adamw":
            object.__setattr__(self, "betas", (0.9, 0.95) if self.betas is None else self.betas)
            decay = 0.1 if self.weight_decay is None else self.weight_decay
            object.__setattr__(self, "weight_decay", decay)
        own = [one.name for one in fields(self) if one.name != "settings"]
        known = [*own, *registry.defaults(self.name)]
        check_known(f"entry of [optimizer] for {self.name}", self.settings, known)
        registry.check_settings(self.name, self.given())
        super().__post_init__()
        if self.learning_rate == 0:
            raise JomaError("optimizer.learning_rate must be above 0, got 0")
        if self.betas is not None:
            if not isinstance(self.betas, tuple) or len(self.betas) != 2:
                raise JomaError(f"optimizer.betas must be two numbers below 1, got {self.betas!r}")
            for beta in self.betas:
                check_number("optimizer.betas", beta, below=1.0)

    def given(self) -> dict[str, Any]:
        """Return the settings that the optimizer is made with, besides the learning rate."""
        own = {"betas": self.betas, "weight_decay": self.weight_decay}
        return {name: one for name, one in own.items() if one is not None} | dict(self.settings)

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step `step`, from 0, of `steps`."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(steps - self.warmup, 1)
        left = {
            "constant": 1.0,
            "linear": 1 - (1 - self.final) * done,
            "cosine": self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2,
        }
        return self.learning_rate * left[self.schedule]


@dataclass(frozen=True)
class TrainingSection(_Section):
    """[training]: how many steps, and how they are computed.

    Args:
        steps: Number of updates.
        precision: float32, or bfloat16, which computes in it on a GPU and keeps weights, moments
            and gradients in float32.
        accumulate: Number of pieces a batch is cut into, to save memory; the step is the same.
        compile: Whether torch compiles the model and its loss: true, false, or auto, which compiles
            on one GPU and falls back where that fails.
        seed: Decides the first weights, the order of the data and what dropout drops.
        sharding: With several processes, fsdp2 spreads weights, gradients and moments over them;
            with none each has them all.
    """

    steps: Count = 1000
    precision: Literal["float32", "bfloat16"] = "float32"
    accumulate: Count = 1
    compile: bool | str = AUTO
    seed: Whole = 0
    sharding: Literal["none", "fsdp2"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.compile, bool) and self.compile != AUTO:
            raise JomaError(f"training.compile must be {AUTO}, true or false, got {self.compile!r}")


@dataclass(frozen=True)
class CheckpointsSection(_Section):
    """[checkpoints]: at which steps a model is exported, and how often to save a checkpoint.

    Args:
        schedule: "pythia" for 0, 1, 2, 4, …, 512, 1000, 2000, …; or a list of steps. The last
            step of the training is exported in any case.
        every: Instead of a schedule, 0 and each step that is a multiple.
        seconds: The most work, in seconds, that a kill may cost.
    """

    schedule: tuple[int, ...] | str | None = None
    every: Count | None = None
    seconds: Number = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule is not None and self.every is not None:
            raise JomaError(
                "checkpoints.schedule and checkpoints.every exclude each other, got "
                f"{self.schedule!r} and {self.every!r}"
            )
        if isinstance(self.schedule, tuple):
            for step in self.schedule:
                whole_number("checkpoints.schedule", step, 0)
        elif self.schedule not in (None, "pythia"):
            raise JomaError(
                f"checkpoints.schedule must be pythia or a list of steps, got {self.schedule!r}"
            )

    def steps(self, last: int) -> tuple[int, ...]:
        """Return the steps up to the last of a training at which the model is kept."""
        if self.every is not None:
            wanted: Iterable[int] = range(0, last, self.every)
        elif isinstance(self.schedule, tuple):
            wanted = self.schedule
        else:  # as in Pythia, whose own ends at 143000
            doubling = (2**k for k in range(10))
            wanted = (0, *doubling, *range(1000, last, 1000))
        return tuple(sorted({step for step in wanted if step < last} | {last}))


@dataclass(frozen=True)
class ValidationSection(_Section):
    """[validation]: the loss on text that is not trained on, without dropout.

    Args:
        every: Number of steps between two, besides the last step; 0 for never.
        windows: Number of windows, from the beginning of the validation text.
    """

    every: Whole = 100
    windows: Count = 64


@dataclass(frozen=True)
class MonitorSection(_Section):
    """[monitor]: what `joma.Monitor` measures.

    Args:
        off: Whether to train without a monitor.
        every: Number of steps between two measurements.
        metrics: Names of metrics; the monitor's own choice unless given.
        windows: Number of windows of the validation text that attention is measured on.
        budget: Share of the training's time that measurements may take before they come more
            rarely than asked for; 0 for no limit.
        theorem1: The layer whose Theorem-1 residual is measured.
        stop_on: Findings at which the training ends, as `joma.Monitor` names them.
    """

    off: bool = False
    every: Count = 100
    metrics: tuple[str, ...] | None = None
    windows: Count = 4
    budget: Share = 0.01
    theorem1: Whole | None = None
    stop_on: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Config:
    """A training of a language model; each section has its own class.

    Raises:
        JomaError: Settings do not go together.
    """

    model: ModelSection
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    checkpoints: CheckpointsSection = field(default_factory=CheckpointsSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    monitor: MonitorSection = field(default_factory=MonitorSection)

    def __post_init__(self) -> None:
        if self.data.batch % self.training.accumulate:
            raise JomaError(
                f"training.accumulate must divide data.batch, which is {self.data.batch}, got "
                f"{self.training.accumulate}"
            )
        if self.optimizer.warmup > self.training.steps:
            raise JomaError(
                f"optimizer.warmup must be at most training.steps, which is {self.training.steps}, "
                f"got {self.optimizer.warmup}"
            )

    @classmethod
    def of(cls, sections: Mapping[str, Any]) -> "Config":
        """Return the configuration of sections by their names, as a TOML file has them.

        Raises:
            JomaError: An entry is wrong; the message names it and says what would be right.
        """
        check_known("section", sections, [one.name for one in fields(cls)])
        for name, section in sections.items():
            if not isinstance(section, Mapping):
                raise JomaError(f"{name} must be a section, [{name}], got {section!r}")
        if "type" not in sections.get("model", {}):
            raise JomaError(f"[model] must have a type, one of {', '.join(get_args(ModelType))}")
        made: dict[str, Any] = {}
        for name, kind in _SECTIONS.items():
            given = {key: _tuples(value) for key, value in sections.get(name, {}).items()}
            known = {one.name for one in fields(kind)}
            if "settings" in known:
                others = [key for key in given if key not in known or key == "settings"]
                given["settings"] = {key: given.pop(key) for key in others}
            check_known(f"entry of [{name}]", given, [one.name for one in fields(kind)])
            made[name] = kind(**given)
        return cls(**made)

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return the sections by their names, all settings written out; what `of` takes."""
        sections = asdict(self)
        for section in sections.values():
            section |= section.pop("settings", {})
        return {
            name: {key: _lists(value) for key, value in section.items() if value is not None}
            for name, section in sections.items()
        }


_SECTIONS: dict[str, Any] = get_type_hints(Config)


def _lists(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_STEPS = "training.steps"
_CHECKPOINT_SECONDS = "checkpoints.seconds"
_COMPILE = "training.compile"
_ANY_TIME = (_CHECKPOINT_SECONDS, _COMPILE)


def changing(config: Config) -> tuple[str, ...]:
    """Return the settings that may be others than in the run that is resumed.

    How often checkpoints are saved changes no number. Whether the model is compiled changes how
    numbers are rounded, and what dropout draws. The number of steps may change if no step made so
    far would have been another with it.
    """
    constant = config.optimizer.schedule == "constant"
    return (*_ANY_TIME, _STEPS) if constant else _ANY_TIME


def check_length(config: Config, run: Run) -> None:
    """Raise JomaError if a run cannot have another length, where nothing but its length differs.

    Args:
        config: What is asked for.
        run: The run that is to be resumed.

    Raises:
        JomaError: Its learning rates follow from how many steps there are, or it has made more.
    """
    asked = {"name": run.name, **config.sections()}
    if differing(run.config, asked, changing=_ANY_TIME).keys() != {_STEPS}:
        return
    if _STEPS not in changing(config):
        raise JomaError(
            f"training.steps must stay {run.config['training']['steps']} with the schedule "
            f"{config.optimizer.schedule}, which takes the learning rate to its end in as many "
            f"steps, got {config.training.steps}; give that, or another folder: only with the "
            "schedule constant can a training be made longer or shorter"
        )
    check_made(config, max(run.checkpoints.steps, default=0))


def check_made(config: Config, made: int) -> None:
    """Raise JomaError for fewer steps than a run has made."""
    if config.training.steps < made:
        raise JomaError(
            f"training.steps must be at least {made}, which the run has made, got "
            f"{config.training.steps}"
        )


_FOLDER = Path(__file__).parent / "presets"

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    name: tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    for name in ("tiny", "small", "neox-wikitext2")
}
"""What `joma train NAME` trains: the sections of each configuration in `presets/`."""


def read_config(source: str | Path, changes: Iterable[str] = ()) -> Config:
    """Return the configuration of a preset or of a TOML file.

    Args:
        source: The name of a preset, or the path of a file.
        changes: "section.entry=value" each, with the value as TOML has it; a bare word is text.

    Raises:
        JomaError: There is none of that name, or it is wrong.
    """
    sections = copy.deepcopy(PRESETS[str(source)]) if source in PRESETS else _read(Path(source))
    for change in changes:
        _change(sections, change)
    return Config.of(sections)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise JomaError(
            f"there is no configuration {str(path)!r}: it must be a TOML file or one of "
            f"{', '.join(PRESETS)}"
        )
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JomaError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # of TOML, or of its encoding
        raise JomaError(f"{path} is not a TOML file: {error}") from error


def _change(sections: dict[str, Any], change: str) -> None:
    place, equals, value = change.partition("=")
    section, dot, entry = place.strip().partition(".")
    if not (equals and dot and section and entry):
        raise JomaError(
            f"a change must be section.entry=value, such as training.steps=100, got {change!r}"
        )
    there = sections.setdefault(section, {})
    if not isinstance(there, Mapping):
        raise JomaError(f"{section} must be a section, [{section}], got {there!r}")
    sections[section] = {**there, entry: _value(value.strip())}


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text
