"""What a monitor records: losses and rows, to memory, the run folder and loggers.

Any of these may fail; what cannot be written stays in memory.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma.common.sharded import local
from joma.errors import JomaError
from joma.runs import Run, is_run
from joma.train.findings.recorded import History
from joma.train.monitor.faults import Faults


@dataclass(frozen=True)
class Row:
    """One number as the metrics log has it.

    Attributes:
        name: What was measured, "stable_rank".
        value: The number.
        module: Path of the module, or the key of an attention call; None for the whole model.
        layer: Layer index, or None for what is in no layer.
        head: Head index, or None for the mean over heads or what has no heads.
        bound: Bound on the error of the value, or None where there is none.
        kind: Kind of attention, "self" or "decoder cross"; "" for what is not attention.
    """

    name: str
    value: float
    module: str | None = None
    layer: int | None = None
    head: int | None = None
    bound: float | None = None
    kind: str = ""

    @property
    def key(self) -> str:
        """A name for loggers that know one word for a series.

        "stable_rank/layer0/mlp.fc1"; for attention, whose heads are many, the layer stands for the
        module where the model has one attention per layer: "attention_entropy/layer0/head1".
        """
        words = [self.name]
        if self.layer is not None:
            words.append(f"layer{self.layer}")
        if self.kind not in ("", "self"):
            words.append(self.kind.replace(" ", "_"))
        if self.kind and self.module and "#" in self.module:
            words.append("pass" + self.module.rpartition("#")[2])
        if self.head is not None:
            words.append(f"head{self.head}")
        if self.module and not self.name.startswith("attention"):
            words.append(self.module)
        return "/".join(words)


_MANY = 4096


class Losses:
    """Keeps losses that were not recorded yet.

    Args:
        faults: Where losses that are no number are noted.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._kept: list[tuple[int, Tensor | float]] = []

    @property
    def many(self) -> bool:
        """Whether so many wait that they should be taken."""
        return len(self._kept) >= _MANY

    def kept(self, loss: Tensor | float | None) -> Tensor | float | None:
        """Return a copy of a loss, None where there is none or it is not one real number."""
        if loss is None:
            return None
        try:
            return _copied(loss)
        except Exception as error:
            self._faults.note("the loss", error, effect="not recorded")
            return None

    def keep(self, step: int, loss: Tensor | float | None) -> Tensor | float | None:
        """Keep a copy of a step's loss, and return it."""
        copy = self.kept(loss)
        if copy is not None:
            self._kept.append((step, copy))
        return copy

    def take(self) -> tuple[list[int], list[float]]:
        """Return the steps and losses kept, and forget them; waits for their device."""
        kept, self._kept = self._kept, []
        tensors = [loss for _, loss in kept if isinstance(loss, Tensor)]
        if len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1:
            values = iter(torch.stack(tensors).tolist())
        else:
            values = iter([float(tensor) for tensor in tensors])
        losses = [next(values) if isinstance(loss, Tensor) else loss for _, loss in kept]
        return [step for step, _ in kept], losses


def one_number(loss: Tensor | float) -> float:
    """Return a loss as a number; waits for its device.

    Raises:
        JomaError: It is not one real number.
    """
    return float(_copied(loss))


def _copied(loss: Tensor | float) -> Tensor | float:
    if type(loss) is Tensor and loss.ndim == 0 and loss.dtype == torch.float32 and not loss.is_meta:
        return loss.detach().clone()  # the usual case; this runs at every step
    if not isinstance(loss, Tensor):
        if isinstance(loss, str | bytes | complex):
            raise JomaError(f"loss must be one real number, got {loss!r:.40}")
        try:
            return float(loss)
        except OverflowError:
            return math.inf if loss > 0 else -math.inf
    if loss.numel() != 1:
        raise JomaError(f"loss must be one number, got shape {tuple(loss.shape)}")
    if loss.is_complex() or loss.device.type == "meta":
        raise JomaError(f"loss must be one real number, got {loss.dtype} on {loss.device}")
    loss = local(loss.detach())
    # A copy: the graph of a compiled step writes the next loss to the same place.
    return loss.reshape(()).float().clone() if loss.dtype != torch.float64 else loss.clone()


Logger = Callable[[int, Mapping[str, float]], None]
"""Called at every measurement with the step and values by name, "attention_entropy/layer0"."""

WRITING = "writing to the run folder"
MOST_UNWRITTEN = 500_000
"""Numbers that wait while the run folder cannot be written; further ones are not written."""


class Recorder:
    """Writes rows to a run folder and hands them to loggers.

    Where the folder cannot be written, rows stay in memory and every later `flush` tries again. A
    logger that raises is dropped.

    Args:
        run: The run folder; None where it could not be made.
        loggers: Called with each measurement.
        faults: Where failures are noted.

    Attributes:
        history: The series recorded so far, which findings are judged by.
    """

    def __init__(self, run: Run | None, loggers: Sequence[Logger], faults: Faults) -> None:
        self.run = run
        self._loggers = list(loggers)
        self._faults = faults
        self.history = History()
        self._unwritten = 0

    def read_earlier(self) -> None:
        """Add what the run folder has already to the history."""
        self._with_run(
            "the run folder",
            lambda run: self.history.add_columns(run.metrics.read()),
            "not readable",
        )

    def losses(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Record the losses of several steps; nothing is written before `flush`."""
        self.history.add("loss", steps, values)
        room = self._room(len(steps))
        each = [[value] for value in values[:room]]
        if room:
            self._with_run(WRITING, lambda run: run.metrics.append_many(steps[:room], "loss", each))

    def rows(self, step: int, rows: Sequence[Row]) -> None:
        """Record the rows of one measurement; nothing is written before `flush`."""
        for row in rows:
            if row.head is None:
                where = row.module or "", row.kind, row.layer
                self.history.add(row.name, [step], [row.value], *where)
        rows = rows[: self._room(len(rows))]

        def append(run: Run) -> None:
            for row in rows:
                about = dict(vars(row))
                run.metrics.append(step, values=about.pop("value"), **about)

        self._with_run(WRITING, append)

    def flush(self) -> None:
        """Write what was recorded; where that fails it stays in memory."""

        def write(run: Run) -> None:
            run.metrics.flush()
            self._unwritten = 0

        effect = "failed, and numbers stay in memory until it succeeds,"
        self._with_run(WRITING, write, effect)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Call the loggers; one that raises is dropped."""
        for logger in tuple(self._loggers):
            try:
                logger(step, values)
            except Exception as error:  # a dashboard's own trouble
                name = getattr(logger, "__qualname__", type(logger).__name__)
                self._faults.note(f"logger {name}", error, effect="dropped")
                self._loggers.remove(logger)

    def write_findings(self, findings: Mapping[str, Any]) -> bool:
        """Write `findings.json`, whole or not at all; return whether that succeeded.

        Args:
            findings: As `Judgement.as_json` gives them.
        """
        written = self._with_run(
            "findings.json", lambda run: run.write_json("findings", findings), "not written"
        )
        return written is not None

    def close(self) -> None:
        """Write what is left."""
        self.flush()
        self._with_run("merging the metrics log", lambda run: run.metrics.compact())

    def draw(self) -> None:
        """Write `figures/training.png` of what was recorded."""

        def write(run: Run) -> None:
            from joma.report import figures, training  # takes a second, once, at the end

            if self.history.changes:
                drawn = figures.rendered(training.draw(run), "png", dpi=training.DPI)
                run.write_figure(f"{training.NAME}.png", drawn)

        self._with_run("figures/training.png", write, "not drawn")

    def _with_run(
        self, what: str, action: Callable[[Run], Any], effect: str = "failed"
    ) -> Any | None:
        """Do something with the run folder, if there is one; a failure is noted."""
        run = self.run
        if run is None:
            return None
        return self._faults.tried(what, lambda: action(run), effect=effect)

    def _room(self, count: int) -> int:
        """Count rows that wait to be written; return how many of them may, at most `count`."""
        if self.run is None:
            return 0
        room = max(0, min(count, MOST_UNWRITTEN - self._unwritten))
        self._unwritten += room
        if room < count:
            self._faults.note(
                "numbers", f"{MOST_UNWRITTEN} of them wait to be written already", effect="dropped"
            )
        return room


def logged(rows: Sequence[Row]) -> dict[str, float]:
    """Return the values of rows by their logger names, each of which names one row."""
    named: dict[str, float] = {}
    for row in rows:
        named[f"{row.key}/{row.module}" if row.key in named else row.key] = row.value
    return named


_ORIGIN = "origin"
"""Name of the JSON file that says which folder was asked for and contains an earlier run."""


def open_run(
    run: Run | Path | str | None,
    config: Mapping[str, Any],
    *,
    step: int,
    device: str,
    faults: Faults,
    stack: ExitStack,
) -> tuple[Run | None, Path | None]:
    """Make and lock the run folder, or open it where a training is resumed.

    An earlier run is never touched by a new training: the second one in `runs/mine` goes to
    `runs/mine-2`. A training resumed at a step goes to the newest of these, and what was logged
    after that step is dropped, since it comes again.

    Args:
        run: A run, the path of a folder, or None for a new folder in `./runs`.
        config: Everything that decides the numbers.
        step: Optimizer steps made before.
        device: The device of the model.
        faults: Where it is noted if the folder cannot be made or read.
        stack: Unlocks the folder when it is closed.

    Returns:
        The run, None where no folder could be made, and the folder that was asked for where that
        has an earlier run.

    Raises:
        JomaError: The folder holds something else.
    """
    folder = Path(run) if isinstance(run, str | Path) else None
    found = run if isinstance(run, Run) else None
    if folder is not None and step > 0:
        found = _newest(folder, faults)
    if found is not None:
        _lock(found, faults, stack)  # before anything of it is changed
        try:
            if step:
                found.metrics.rewind(step)
            return found, None
        except (OSError, JomaError) as error:
            faults.note("the earlier run", error, effect="not resumed")
            folder = found.path
    try:
        made = Run.create("monitor", config, out=folder, device=device, existing="next")
        instead_of = None if made.path == folder else folder
        if instead_of is not None:
            made.write_json(_ORIGIN, {"instead_of": instead_of.name})
    except OSError as error:
        faults.note("the run folder", error, effect="not written, and numbers stay in memory")
        return None, None
    _lock(made, faults, stack)
    return made, instead_of


def _lock(run: Run, faults: Faults, stack: ExitStack) -> None:
    try:
        stack.enter_context(run.locked())
    except OSError as error:
        faults.note("the run folder", error, effect="not locked")


def _newest(folder: Path, faults: Faults) -> Run | None:
    """Return the run that a resumed training wrote to; None where it is not there or damaged.

    It is the one made last for the folder's name. A folder named `mine-2` that somebody chose is
    another training's.
    """
    pattern = re.compile(re.escape(folder.name) + r"-([1-9][0-9]*)")
    try:
        runs = {1: folder} if is_run(folder) else {}
        for other in folder.parent.iterdir() if folder.parent.is_dir() else ():
            match = pattern.fullmatch(other.name)
            if match and is_run(other) and _origin(other) == folder.name:
                runs[int(match[1])] = other
        if not runs:
            return None
        newest = runs[max(runs)]
        if newest != folder:
            faults.remark(f"resumed in {newest}, which was made instead of {folder}")
        return Run.open(newest)
    except (OSError, JomaError) as error:
        faults.note("the earlier run", error, effect="not resumed")
        return None


def _origin(folder: Path) -> str | None:
    """Return the name of the folder that a run was made instead of."""
    try:
        return json.loads((folder / f"{_ORIGIN}.json").read_text(encoding="utf-8"))["instead_of"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
