"""`joma train`."""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._errors import EXIT_BAD_INPUT, command_line
from joma.cli._progress import reports
from joma.cli._run_folder import check_folder, closing, resumable, resume_command
from joma.common.signals import exit_code
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.runs import Run
    from joma.train.language import Config, Trained

PRESETS = ("tiny", "small", "neox-wikitext2")
"""A copy of their names, since the help must not import what trains them."""


@dataclass(frozen=True, kw_only=True)
class Train(cmd.Command):
    """Train a language model on a text, with the monitor on.

    The run folder has what was measured, checkpoints to resume from, and in series/ the models of
    the schedule for joma probe --series. A training resumes where it was stopped when --out is its
    folder, and with the schedule constant also for more steps than before, or fewer.
    On several processes: torchrun --nproc-per-node N -m joma train CONFIG.
    """

    summary = "Train a language model and watch it learn."
    example = "train tiny --out first --set training.steps=100"

    config: str | None = cmd.argument(
        "CONFIG",
        f"A TOML file, or one of {', '.join(PRESETS)}.",
        default=None,
        completion=cmd.completing(PRESETS),
    )
    change: list[str] | None = cmd.option(
        "SECTION.ENTRY=VALUE",
        "Change a setting, as in training.steps=100; may be given several times.",
        name="--set",
    )
    device: str = cmd.device_option()
    out: Path | None = cmd.out_option()
    json: bool = cmd.json_flag()
    dry_run: bool = cmd.flag("Make a few steps, say what all would take, and stop.")

    def run(self) -> None:
        """Train, or estimate what it takes; the first of several processes reports for all."""
        with _quiet_but_for_the_first():
            from joma.runs import Run, is_run
            from joma.train.language import changing, check_length, read_config

            if self.config is None:
                raise JomaError(f"say what to train: a TOML file, or one of {', '.join(PRESETS)}")
            config = read_config(self.config, self.change or [])
            device = cmd.chosen_device(self.device)
            check_folder(self.out, "train")
            if self.out is not None and is_run(self.out) and (self.out / "config.json").is_file():
                check_length(config, Run.open(self.out))
            check_folder(self.out, "train", config.sections(), changing=changing(config))
            if self.dry_run:
                self._estimate(config, device)
            else:
                self._train(config, device)

    def _train(self, config: "Config", device: str) -> None:
        from joma.runs import Run
        from joma.train.findings import headline
        from joma.train.language import changing, joined, train

        begun: dict[str, Path] = {}

        def resume() -> list[str]:
            return [resume_command(begun.get("training") or self.out)]

        def begin() -> Run:
            sections, may_change = config.sections(), changing(config)
            return Run.resume("train", sections, out=self.out, device=device, changing=may_change)

        with resumable(begun, resume, self.out), joined(device) as processes:
            run = processes.first(begin)
            if run is None:  # the first process alone writes and reports
                train(config, None, processes=processes)
                return
            begun["training"] = run.path
            with run.locked(), closing(run) as outcome:
                with reports("train") as report, _warnings_said(report.say):
                    trained = train(config, run, processes=processes, progress=report)
                headlines = [headline(one) for one in trained.judgement.findings]
                outcome.update(finding=_finding(trained), findings=headlines)
                if trained.stopped is not None:
                    outcome.update(status="stopped", stopped=trained.stopped)
        if self.json:
            _render.as_json(_record(run, trained))
        else:
            self._answer(config, run, trained)

    def _answer(self, config: "Config", run: "Run", trained: "Trained") -> None:
        from joma.train.language import SERIES

        say = _render.say
        resumed = f", resumed from step {trained.begun_at}" if trained.begun_at else ""
        monitor = trained.monitor_seconds
        say(
            f"{_render.sentence(_finding(trained))}{resumed}. {trained.parameters / 1e6:.3g}M "
            f"parameters, {trained.tokens_per_second:,.0f} tokens/s, {trained.seconds:.1f} s"
            f"{f', of them {monitor:.1f} for the monitor' if monitor else ''}."
        )
        for line in (*trained.lines, str(run.path)):
            say(f"  {line}")
        if trained.stopped is not None:
            say(
                f"Training stopped at step {trained.step} of {config.training.steps}, as "
                f"monitor.stop_on asks: {trained.stopped}"
            )
            say(f"Its checkpoint is saved. Continue with: {resume_command(run.path)}")
        probing = ["probe", "--series", str(run.path / SERIES)]
        probing += ["--tokenizer", "bytes"] if config.data.tokenizer == "bytes" else []
        say(f"Probe the series with: {command_line(probing)}")

    def _estimate(self, config: "Config", device: str) -> None:
        """Print what a training would take; of several processes, on one."""
        if os.environ.get("RANK", "0") != "0":
            return
        from joma.runs import default_folder
        from joma.train.language import estimate

        with reports("train") as report:
            report("make a few steps", 0, 1)
            found = estimate(config, device)
        record = {
            "train": self.config,
            "run": str(self.out or default_folder("train")),
            "about_seconds": found.seconds,
            "memory_bytes": found.memory,
            "parameters": found.parameters,
            "tokens": found.tokens,
            "disk_bytes": found.disk,
            "exports": found.exports,
            "device": device,
            "config": config.sections(),
        }
        _render.plan(record, json=self.json)


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


class _Said(logging.Handler):
    """Prints warnings above the bar."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # nobody may be reading
            self._say(_render.printable(record.getMessage()))


@contextlib.contextmanager
def _warnings_said(say: Callable[[str], None]) -> Iterator[None]:
    """Print warnings of the block above the bar."""
    logger, handler = logging.getLogger("joma"), _Said(say)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _finding(trained: "Trained") -> str:
    """Return how it ended, in one sentence."""
    if trained.step == trained.begun_at:
        return f"step {trained.step}: nothing is left to train"
    words = [f"step {trained.step}", f"loss {trained.loss:.3f}"]
    if math.isfinite(trained.validation_loss):
        words.append(f"validation loss {trained.validation_loss:.3f}")
    return ", ".join(words)


def _record(run: "Run", trained: "Trained") -> dict[str, Any]:
    from joma.train.language import SERIES

    names = ("begun_at", "step", "parameters", "loss", "validation_loss")
    return {
        "run": str(run.path),
        "series": sorted(str(path) for path in (run.path / SERIES).glob("step-*")),
        **{name: getattr(trained, name) for name in names},
        "tokens_per_second": round(trained.tokens_per_second, 1),
        "seconds": round(trained.seconds, 2),
        "monitor_seconds": round(trained.monitor_seconds, 2),
        **trained.judgement.as_json(),
        "stopped": trained.stopped,
        "refused": list(trained.refused),
    }
