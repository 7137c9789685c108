"""`joma train`."""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _show
from joma.cli._errors import EXIT_BAD_INPUT, command_line, reason
from joma.cli._folders import check_folder, closing, interruptible, writing_to
from joma.cli._options import Device, Json, Out, chosen_device, option
from joma.cli._progress import reports
from joma.common.json_files import plain
from joma.common.signals import exit_code
from joma.common.text import duration
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Run
    from joma.train.language import Config, Trained

NAME = "train"
PRESETS = ("tiny", "small", "neox-wikitext2")
"""A copy of their names, since the help must not import what trains them."""


def _presets(incomplete: str) -> list[str]:
    return [name for name in PRESETS if name.startswith(incomplete)]


def train(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help=f"A TOML file, or one of {', '.join(PRESETS)}.",
            autocompletion=_presets,
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        option(
            "--set",
            "SECTION.ENTRY=VALUE",
            "Change a setting, as in training.steps=100; may be given several times.",
        ),
    ] = None,
    device: Device = "auto",
    out: Out = None,
    json: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Make a few steps, say what all would take, and stop."),
    ] = False,
) -> None:
    """Train a language model on a text, with the monitor on.

    The run folder has what was measured, checkpoints to resume from, and in series/ the models of
    the schedule for joma probe --series. A training resumes where it was stopped when --out is its
    folder, and with the schedule constant also for more steps than before, or fewer.
    On several processes: torchrun --nproc-per-node N -m joma train CONFIG.
    """
    with _quiet_but_for_the_first():
        from joma.train.language import changing, read_config

        if config is None:
            raise JomaError(f"say what to train: a TOML file, or one of {', '.join(PRESETS)}")
        changes = change or []
        settings = read_config(config, changes)
        asked = _Asked(settings, chosen_device(device), out, json)
        flags = [word for one in changes for word in ("--set", one)]
        flags += ["--device", device] if device != "auto" else []
        asked.words.extend([NAME, config, *flags, *(["--json"] if json else [])])
        check_folder(out, NAME)
        _check_length(out, settings)
        check_folder(out, NAME, settings.sections(), changing=changing(settings))
        if dry_run:
            _estimate(asked)
        else:
            _train(asked)


@dataclass(frozen=True)
class _Asked:
    """What the user asked for.

    Attributes:
        config: The training.
        device: Device to train on.
        out: The run folder, if not the default.
        json: Whether to answer in JSON.
        words: The words of the command, but for --out.
        begun: The run folder, once it is there.
    """

    config: "Config"
    device: str
    out: Path | None
    json: bool
    words: list[str] = field(default_factory=list)
    begun: list[Path] = field(default_factory=list)

    def command(self) -> str:
        """Return what to type to resume."""
        folder = self.begun[0] if self.begun else self.out
        line = command_line([*self.words, *([] if folder is None else ["--out", str(folder)])])
        several = os.environ.get("LOCAL_WORLD_SIZE", "1")
        return line if several == "1" else f"torchrun --nproc-per-node {several} -m {line}"


def _check_length(out: Path | None, config: "Config") -> None:
    """Raise JomaError for another number of steps where the run in the folder cannot have it."""
    from joma.runs import Run, is_run
    from joma.train.language import check_length

    if out is not None and is_run(out) and (out / "config.json").is_file():
        check_length(config, Run.open(out))


def _train(asked: _Asked) -> None:
    from joma.runs import Run
    from joma.train.language import changing, joined
    from joma.train.language import train as train_model

    with (
        interruptible(asked.begun, lambda: f"Continue with: {asked.command()}"),
        writing_to(None if asked.begun else asked.out),
        _explaining_failed_writes(asked),
        joined(asked.device) as processes,
    ):

        def begin() -> Run:
            return Run.resume(
                NAME,
                asked.config.sections(),
                out=asked.out,
                device=asked.device,
                changing=changing(asked.config),
            )

        run = processes.first(begin)
        if run is None:  # the first process alone writes and reports
            train_model(asked.config, None, processes=processes)
            return
        asked.begun.append(run.path)
        with run.locked(), closing(run) as outcome:
            with reports(NAME) as report, _warnings_after(report.say):
                trained = train_model(asked.config, run, processes=processes, progress=report)
            outcome.update(finding=_finding(trained), findings=_headlines(trained))
            if trained.stopped is not None:
                outcome.update(status="stopped", stopped=trained.stopped)
    _answer(asked, run, trained)


@contextlib.contextmanager
def _quiet_but_for_the_first() -> Iterator[None]:
    """Let the first of several processes report what is wrong for all; the others just leave."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    try:
        yield
    except KeyboardInterrupt as error:
        raise typer.Exit(exit_code(error)) from None
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and type(error).__name__ != "FailedElsewhereError":
            raise
        raise typer.Exit(EXIT_BAD_INPUT) from None


@contextlib.contextmanager
def _explaining_failed_writes(asked: _Asked) -> Iterator[None]:
    """Raise JomaError for a failed write of a training that has begun; it says what is safe."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if not asked.begun:
            raise
        from joma.runs import Run, is_run

        folder = asked.begun[0]
        if not is_run(folder):
            raise JomaError(
                f"run folder {folder} was removed or replaced while the training was writing to it"
            ) from error
        steps = Run.open(folder).checkpoints.steps
        kept = f"what was learned up to step {steps[0]} is safe" if steps else "nothing is lost yet"
        raise JomaError(
            f"training stopped, {error.filename or folder}: {reason(error)}; {kept}, and once that "
            f"is fixed `{asked.command()}` resumes from there"
        ) from error


class _Deferred(logging.Handler):
    """Prints warnings of the monitor at once, and keeps others, which would disturb the bar."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.name != "joma.monitor":
            self.lines.append(line)
            return
        with contextlib.suppress(OSError):  # nobody may be reading
            self._say(_show.printable(line))


@contextlib.contextmanager
def _warnings_after(say: Callable[[str], None]) -> Iterator[None]:
    """Print warnings after the block, but those of the monitor at once."""
    logger, handler = logging.getLogger("joma"), _Deferred(say)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
    for line in handler.lines:
        _show.say(line, err=True)


def _finding(trained: "Trained") -> str:
    """Return how it ended, in one sentence."""
    if trained.step == trained.begun_at:
        return f"step {trained.step}: nothing is left to train"
    words = [f"step {trained.step}", f"loss {trained.loss:.3f}"]
    if math.isfinite(trained.validation_loss):
        words.append(f"validation loss {trained.validation_loss:.3f}")
    return ", ".join(words)


def _headlines(trained: "Trained") -> list[str]:
    from joma.train.findings import headline

    return [headline(one) for one in trained.judgement.findings]


def _answer(asked: _Asked, run: "Run", trained: "Trained") -> None:
    from joma.train.language import SERIES

    series = run.path / SERIES
    bare = asked.config.data.tokenizer == "bytes"
    probing = command_line(
        ["probe", "--series", str(series), *(["--tokenizer", "bytes"] if bare else [])]
    )
    if asked.json:
        _show.as_json(plain(_record(run, trained, series)))
        return
    resumed = f", resumed from step {trained.begun_at}" if trained.begun_at else ""
    monitor = trained.monitor_seconds
    _show.say(
        f"{_show.sentence(_finding(trained))}{resumed}. {trained.parameters / 1e6:.3g}M "
        f"parameters, {trained.tokens_per_second:,.0f} tokens/s, {trained.seconds:.1f} s"
        f"{f', of them {monitor:.1f} for the monitor' if monitor else ''}."
    )
    for line in trained.lines:
        _show.say(f"  {line}")
    _show.say(f"  {run.path}")
    if trained.stopped is not None:
        _show.say(
            f"Training stopped at step {trained.step} of {asked.config.training.steps}, as "
            f"monitor.stop_on asks: {_show.printable(trained.stopped)}"
        )
        _show.say(f"Its checkpoint is saved. Continue with: {asked.command()}")
    _show.say(f"Probe the series with: {probing}")


def _record(run: "Run", trained: "Trained", series: Path) -> dict[str, Any]:
    names = ("begun_at", "step", "parameters", "loss", "validation_loss")
    return {
        "run": str(run.path),
        "series": sorted(str(path) for path in series.glob("step-*")),
        **{name: getattr(trained, name) for name in names},
        "tokens_per_second": round(trained.tokens_per_second, 1),
        "seconds": round(trained.seconds, 2),
        "monitor_seconds": round(trained.monitor_seconds, 2),
        **trained.judgement.as_json(),
        "stopped": trained.stopped,
        "refused": list(trained.refused),
    }


def _estimate(asked: _Asked) -> None:
    """Print what a training would take; of several processes, on one."""
    if os.environ.get("RANK", "0") != "0":
        return
    from joma.runs import default_folder
    from joma.train.language import estimate

    with reports(NAME) as report:
        report("make a few steps", 0, 1)
        found = estimate(asked.config, asked.device)
    folder = asked.out or default_folder(NAME)
    if asked.json:
        record = {"about_seconds": found.seconds, "memory_bytes": found.memory}
        record |= {"parameters": found.parameters, "tokens": found.tokens}
        record |= {"disk_bytes": found.disk, "exports": found.exports, "device": asked.device}
        _show.as_json({"run": str(folder), **record, "config": asked.config.sections()})
        return
    memory = "unknown" if found.memory is None else f"about {found.memory / 1e9:.2g} GB"
    _show.say(
        f"{found.parameters / 1e6:.3g}M parameters, {found.tokens / 1e6:.3g}M tokens in "
        f"{asked.config.training.steps} steps → {folder}"
    )
    _show.say(
        f"  about {duration(found.seconds)} on {asked.device}, as a few steps went, "
        f"memory {memory}, disk about {found.disk / 1e9:.2g} GB with {found.exports} models"
    )
    for name, section in asked.config.sections().items():
        entries = ", ".join(f"{key} {value}" for key, value in section.items())
        _show.say(f"  [{name}] {entries}")
