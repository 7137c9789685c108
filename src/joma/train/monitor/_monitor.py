"""The monitor: a training loop calls it after every step, and it measures now and then."""

import contextlib
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from joma.common.checks import whole_number
from joma.common.text import wrapped
from joma.errors import JomaError
from joma.probes import AttentionMap
from joma.runs import Run
from joma.train.findings import Finding, Judgement
from joma.train.findings._finding import judgement_lines
from joma.train.monitor._alerts import Alerts, OnFinding
from joma.train.monitor._budget import Budget
from joma.train.monitor._faults import Faults
from joma.train.monitor._finite import FiniteAlarm
from joma.train.monitor._inputs import Inputs, MeasurementInputs
from joma.train.monitor._measurements import Measurements, can_run
from joma.train.monitor._optimizer import WatchedOptimizers
from joma.train.monitor._options import Options, check_kinds
from joma.train.monitor._record import Logger, Recorder, Row, copied_loss
from joma.train.monitor._restoring import unwrap
from joma.train.monitor._run_folder import TrainingOutcome, open_run
from joma.train.monitor._selection import is_real
from joma.train.processes import MonitoredProcesses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPENSIVE_EVERY = 10
"""Every how many measurements the expensive metrics are measured too."""
_MANY_LOSSES = 4096
"""Losses that are recorded without waiting for a measurement."""


class Monitor:
    """Watches a model while it is trained, and says in plain words what it found.

        with joma.Monitor(model, optimizer, every=100, run="runs/mine") as monitor:
            for batch in loader:
                loss = loss_of(model(batch))
                loss.backward()
                optimizer.step()
                monitor.step(loss)  # before zero_grad, so that gradients can be seen
                optimizer.zero_grad()
        print(monitor.summary())

    The losses of a training are the same to the bit with it and without. Measurements are made in
    evaluation mode, on inputs kept since the first step; modes, buffers, gradients, random states,
    autocast and what is compiled are restored. Compiled models are measured uncompiled.

    Findings are made after every measurement. New ones are logged to "joma.monitor", passed to
    `on_finding`, and kept in the run's `findings.json`.

    The monitor never ends a training. What fails (a full disk, a logger, a module it cannot read)
    is logged once to "joma.monitor", left out from then on, and named in the summary. With
    `stop_on`, `step` returns True where the loop should end.

    A measurement reads attention (entropy, effective number of tokens), MLP activity and stable
    ranks of the weights and of Wqᵀ·Wk (rotations of positions left out). Every tenth one adds
    effective ranks, overlap of embeddings, rank and energy of gradients and rank of updates.
    Measurements come at steps 1, 2, 4, 8 and so on up to `every`, then at its multiples, and more
    rarely where they would take more than the `budget` of the training's time.

    With several processes each makes a monitor and calls `step`; the first one writes, and the
    losses recorded are its own. With DDP it measures alone; with FSDP2 (`fully_shard`) all take
    part.

    Args:
        model: What the training loop calls, compiled or parallel or neither.
        optimizer: The optimizer, or a list of several: learning rate, weight decay and which
            parameters are trained are read from it. Without it what needs them is not judged.
        every: Steps between measurements; a step is one of the optimizer, however many batches it
            took.
        run: A run, or the folder of one to make; otherwise a new folder in `./runs`. Where the
            folder holds an earlier run, `runs/mine`, the new one is `runs/mine-2`.
        inputs: What the model is called with to be measured: a tensor, tuple or dict, or a list of
            such. Otherwise the first sequences, about 2,048 tokens, of the first forward pass.
        attention: Which modules make queries and keys, for a model that does not say it itself.
        metrics: Which of `METRICS` to measure; otherwise all that can be.
        theorem1: Layer on which Theorem 1 is measured; none if not given.
        loggers: Called with every measurement.
        budget: Share of the training's time that the monitor may take, from two minutes on; None
            for no limit.
        step: Optimizer steps made before, where a training is resumed: the newest run of the folder
            is continued, without what was logged after that step. Give `inputs` then, so that
            measurements before and after are on the same inputs.
        stop_on: When `step` returns True: the kind of a finding, "dead_layer"; "nan", "diverged"
            and "collapse", short for "not_finite", "diverged_loss" and "attention_collapse";
            "critical", any critical finding.
        on_finding: Called with every new `Finding` when it is made, and again where its severity
            rises. Where it raises it is dropped, as a logger is.

    Raises:
        JomaError: An option is not possible, or the folder holds something else.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        every: int = 100,
        run: Run | Path | str | None = None,
        inputs: Any = None,
        attention: AttentionMap | None = None,
        metrics: Sequence[str] | None = None,
        theorem1: int | None = None,
        loggers: Sequence[Logger] = (),
        budget: float | None = 0.01,
        step: int = 0,
        stop_on: Collection[str] = (),
        on_finding: OnFinding | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise JomaError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self._optimizers = WatchedOptimizers(optimizer)
        check_kinds(run, attention, loggers, on_finding)
        options = self._options = Options(every, metrics, theorem1, budget, stop_on)
        self._begun = self._step = whole_number("step", step, 0)
        given = None if inputs is None else MeasurementInputs.of(inputs)
        inner = unwrap(model)
        self._model, self._name = weakref.ref(inner), type(inner).__name__
        self._processes = processes = MonitoredProcesses(inner)
        self._measures = processes.measures
        self._faults = faults = Faults(step, processes.first)
        expensive = EXPENSIVE_EVERY * options.every
        self._budget = Budget(options.every, expensive, options.budget, step)
        self._rate: float | None = None
        self._moved_at: int | None = None
        self._alarm = FiniteAlarm(processes, faults)
        self._measurements = Measurements(
            inner, attention, processes, options, faults, self._optimizers
        )
        self._lock = threading.RLock()
        self._closed = False
        with contextlib.ExitStack() as stack:
            self._run, self._instead_of = None, None
            if processes.first:
                numbers = sum(it.numel() for it in inner.parameters() if is_real(it))
                config = {"model": self._name, "parameters": numbers, "optimizer": None}
                with faults.guard("settings of the optimizer"):
                    config["optimizer"] = self._optimizers.settings()
                config |= vars(options)
                device = str(processes.device)
                self._run, self._instead_of = open_run(
                    run, config, step=step, device=device, faults=faults, stack=stack
                )
            own = None if isinstance(run, Run) else self._run
            self._outcome = TrainingOutcome(own, faults)
            stack.callback(self._outcome.abandon)  # before the folder is unlocked
            self._recorder = Recorder(self._run, tuple(loggers), faults)
            self._alerts = Alerts(self._recorder, faults, on_finding, options.stop_on, processes)
            if step or isinstance(run, Run):
                self._recorder.read_earlier()
            if step and self._run is not None:
                self._alerts.resume()
            self._inputs = Inputs(model, inner, given, processes, faults)
            stack.callback(self._inputs.close)
            self._stack = stack.pop_all()
        self._plan_subspaces()
        # A monitor that is forgotten unlocks the folder and leaves the model alone.
        weakref.finalize(self, self._stack.close)

    @property
    def run(self) -> Run | None:
        """The run written to; None in processes that do not write, or where no folder was made."""
        return self._run

    @property
    def seconds(self) -> float:
        """Total seconds spent measuring."""
        return self._budget.seconds

    @property
    def stop_reason(self) -> str | None:
        """Why `step` returned True, in one sentence; None where it did not."""
        return self._alerts.stop_reason

    @property
    def findings(self) -> list[Finding]:
        """What the recorded series say; nothing in processes that do not write."""
        return list(self.judgement.findings)

    @property
    def judgement(self) -> Judgement:
        """The findings, and what could not be judged; empty in processes that do not write."""
        with self._lock:
            if self._processes.first and not self._closed:
                with self._guard():
                    self._record_losses()
                    self._alerts.update()
            return self._alerts.judgement

    def __enter__(self) -> "Monitor":
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error)

    def begin(self) -> None:
        """Measure the model before it learns, if `inputs` was given; `with` does it too."""
        if self._inputs.batches is not None and self._step == 0:
            self._measure_now(expensive=False)

    def measure(self) -> None:
        """Measure everything now."""
        self._measure_now(expensive=True)

    def step(
        self, loss: Tensor | float | None = None, *, learning_rate: float | None = None
    ) -> bool:
        """Record one step of the optimizer, and measure if a measurement is due.

        To be called after `optimizer.step()` and before `optimizer.zero_grad()`.

        Args:
            loss: Loss of the step; kept on its device until the next measurement, so that nothing
                waits for it.
            learning_rate: Learning rate of the step; read from the optimizer unless given.

        Returns:
            Whether the training should stop, as `stop_on` asks; `stop_reason` says why. Several
            processes return True at the same step, one in ten.
        """
        with self._lock:
            if self._closed:
                self._faults.note("step", "the monitor is closed", effect="not recorded")
                return False
            self._step += 1
            self._faults.step = self._step
            with self._guard():
                if self._measures:
                    self._record_step(loss, learning_rate)
                elif self._options.stop_on and loss is not None:
                    self._check_finite(copied_loss(loss))
            stops = False
            if self._options.stop_on:
                with self._guard():
                    if self._alarm.alarmed and self._alerts.stops_on_nan:
                        sentence = self._alarm.sentence()
                        self._alerts.ask_to_stop(sentence or "A loss or weight is not finite.")
                    stops = self._alerts.stops(self._step)
            return stops

    def record_loss(self, step: int, loss: Tensor | float) -> None:
        """Record the loss of a step for a trainer that learns it later than `step` is called.

        Args:
            step: The step it is of.
            loss: The loss.
        """
        with self._lock:
            if self._processes.first and not self._closed:
                self._recorder.keep_loss(step, loss)

    def record_validation(self, loss: Tensor | float, step: int | None = None) -> None:
        """Record a validation loss; over-fitting is judged where there are some.

        Args:
            loss: The loss on data that is not trained on.
            step: The step it is of, the current one unless given.
        """
        with self._lock:
            if self._processes.first and not self._closed:
                with self._faults.guard("the validation loss", effect="not recorded"):
                    at = self._step if step is None else whole_number("step", step, 0)
                    row = Row("validation_loss", float(copied_loss(loss)))
                    self._recorder.write(at, [row])

    def judge_by(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Judge by numbers, too, that the caller writes to the run folder itself.

        Args:
            name: "loss" or "validation_loss".
            steps: Their steps.
            values: One for each step.
        """
        with self._lock:
            if not self._closed:
                self._recorder.history.add(name, steps, values)
                for step, value in zip(steps, values, strict=True) if name == "loss" else ():
                    self._alarm.see_loss(step, value)

    def summary(self, width: int | None = None) -> str:
        """Return the findings in plain words, what was not judged, and what was not measured.

        Args:
            width: Columns at which lines are broken, 0 for lines as long as they are; None for
                those of the terminal, where standard output is one, and otherwise 0.
        """
        if not self._processes.first:
            return ""
        with self._lock:
            judgement, run, budget = self.judgement, self.run, self._budget
            where = "numbers in memory" if run is None else f"numbers in {run.path}"
            if self._instead_of is not None:
                where += f" ({self._instead_of} holds an earlier run)"
            share = budget.seconds / max(budget.trained, 1e-9)
            lines = [
                f"{self._step} steps watched, measurements took {budget.seconds:.1f} s, "
                f"{share:.1%} of the training's time; {where}"
            ]
            with self._guard():
                trouble = self._alarm.sentence()
                if not self._alerts.failed:
                    lines += judgement_lines(judgement, trouble)
                elif trouble is not None:
                    lines.append(f"- critical: {trouble}")
            return wrapped("\n".join([*lines, *self._faults.lines()]), width)

    def plot(self) -> "Figure | None":
        """Return the picture of the run so far: loss, metrics by layer, and findings.

        `figure.savefig("mine.png")` writes it. The same is written to `figures/training.png` of the
        run when the monitor is closed.

        Returns:
            A matplotlib Figure; None in processes that do not write.

        Raises:
            JomaError: No run folder could be made.
        """
        if not self._processes.first:
            return None
        from joma.report.training import draw

        with self._lock:
            if not self._closed and self.judgement is not None:
                self._recorder.flush()
            if self._run is None:
                raise JomaError("plot needs a run folder, and none could be made")
            return draw(self._run)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed training needs to measure as if it had not been stopped.

        Copies of the weights that updates are measured against, when measurements are due, and what
        ranks begin with. All processes call this; the first one's is to be saved.
        """
        with self._lock:
            moved_at = -1 if self._moved_at is None else self._moved_at
            state = {"due": torch.tensor([*self._budget.due, moved_at])}
            with self._guard("saving the state"):
                state |= dict(self._measurements.state())
            return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what `state_dict` gave before the training was stopped at `step`.

        All processes call this; only the first one's state is read.

        Args:
            state: Tensors by name.
        """
        inner = self._model()
        with self._lock, self._guard("the saved state"):
            if not self._measures or inner is None:
                return
            state = self._processes.same_tensors(state)
            if "due" not in state:
                return
            *due, moved_at = state["due"].tolist()
            if not self._budget.limited:
                self._budget.due = [max(step, self._step + 1) for step in due]
            self._moved_at = None if moved_at < 0 else moved_at
            with self._measurements.prepared(inner):
                self._measurements.load(state)
            self._plan_subspaces()

    def close(self) -> None:
        """Write what is left, the findings and the figure; nothing is watched from then on."""
        self._close(None)

    def abandon(self) -> None:
        """Close the monitor of a training that broke off, for trainers that do not say why.

        The run is recorded as failed where an exception ended the program.
        """
        self._close(None, finished=False)

    def _close(self, error: BaseException | None, *, finished: bool = True) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._budget.stop()
            try:
                with self._guard():
                    self._optimizers.record(energy=False, angles=False)
                if self._processes.first:
                    with self._guard():
                        self._record_losses()
                    self._alerts.update(ended=True)
                    self._recorder.close()
                    if finished:
                        self._outcome.end(error, self.stop_reason)
                    self._recorder.draw()
            finally:
                with self._guard("closing"):
                    self._stack.close()

    def _guard(self, what: str = "a measurement") -> contextlib.AbstractContextManager[None]:
        return self._faults.guard(what, effect="failed")

    def _record_step(self, loss: Tensor | float | None, learning_rate: float | None) -> None:
        began = time.perf_counter()
        waiting = self._recorder.waiting
        if loss is not None:
            self._recorder.keep_loss(self._step, loss)
        kept = waiting[-1][1] if waiting and waiting[-1][0] == self._step else None
        if not self._processes.first:
            waiting.clear()
        if learning_rate is not None:
            with self._guard():
                self._rate = float(learning_rate)
        self._check_finite(kept)
        self._budget.charge(began)
        if self._moved_at is not None and self._step == self._moved_at + 1:
            self._measure_move()
        usual, expensive = (self._step >= due for due in self._budget.due)
        if usual or expensive:
            self._measure(expensive=expensive)
        elif len(waiting) >= _MANY_LOSSES:
            self._record_losses()
            self._alerts.update()
            self._recorder.flush()
        self._plan_subspaces()

    def _plan_subspaces(self) -> None:
        """Let the optimizer record what the next measurement reads, if it comes after a step."""
        if self._measurements.has_subspaces and self._measures:
            with self._guard("reading subspaces"):
                self._optimizers.record(energy=min(self._budget.due) <= self._step + 1)

    def _check_finite(self, loss: Tensor | float | None) -> None:
        inner = self._model()
        if inner is not None and self._alarm.check(inner, self._step, loss):
            self._report(inner)

    def _report(self, inner: nn.Module) -> None:
        """Record what is not finite, and since when."""
        if not self._processes.first:
            self._alarm.report(inner)
            return
        self._record_losses()
        self._recorder.write(self._step, self._alarm.report(inner))
        self._alerts.update()

    def _record_losses(self) -> float | None:
        """Record the losses since the last measurement; return the last of them."""
        steps, values = self._recorder.record_losses()
        for step, value in zip(steps, values, strict=True):
            self._alarm.see_loss(step, value)
        return values[-1] if values else None

    def _measure_now(self, *, expensive: bool) -> None:
        with self._lock, self._guard():
            if self._measures and not self._closed:
                self._measure(expensive=expensive)

    def _measure(self, *, expensive: bool) -> None:
        inner = self._model()
        if inner is None:
            return
        began = self._synchronised()
        self._budget.begin(began)
        rows: list[Row] = []
        middle = None
        try:
            self._inputs.settle()
            if self._alarm.share(inner, self._step):
                self._report(inner)
            with self._measurements.prepared(inner):
                with self._guard("reading the optimizer"):
                    self._optimizers.read(inner)
                rows, taken = self._measurements.regular(self._candidates(inner))
                if taken is not None:
                    self._inputs.batches = (taken,)
                self._moved_at = self._step if self._measurements.has_moves else None
                if expensive:
                    middle = self._synchronised()
                    rows += self._measurements.expensive(begun=self._begun, step=self._step)
        finally:
            if self._processes.first:
                self._recorder.write(self._step, self._rate_rows() + rows, self._record_losses())
                self._alerts.after_measurement(time.perf_counter() - began)
            self._budget.pay(self._step, began, middle, self._synchronised())
            if self._processes.together:
                self._budget.due = self._processes.agree(self._budget.due)

    def _candidates(self, inner: nn.Module) -> Sequence[MeasurementInputs]:
        """Return what the model may be called with now."""
        if self._inputs.batches is None and self._step > self._begun:
            why = f"{self._name} was not called; give inputs"
            self._faults.note("attention and MLP activity", why)
        first_call = self._step == self._begun and not can_run(inner)
        return () if first_call else self._inputs.batches or ()

    def _measure_move(self) -> None:
        """Measure what the single step after a measurement has moved."""
        inner, self._moved_at = self._model(), None
        if inner is None:
            return
        began = self._synchronised()
        rows: list[Row] = []
        try:
            with self._measurements.prepared(inner):
                rows = self._measurements.moved()
        finally:
            if self._processes.first:
                self._recorder.write(self._step, rows)
            self._budget.charge(began)

    def _rate_rows(self) -> list[Row]:
        """Return learning rate and weight decay, as far as they are known, after a first step."""
        if self._step == 0:  # schedulers set the rate of a step before it is made
            return []
        rate = self._optimizers.learning_rate if self._rate is None else self._rate
        read = {"learning_rate": rate, "weight_decay": self._optimizers.weight_decay}
        return [Row(name, value) for name, value in read.items() if value is not None]

    def _synchronised(self) -> float:
        """Return the time when the device has done what it was given."""
        if self._processes.device.type == "cuda":
            torch.cuda.synchronize(self._processes.device)
        return time.perf_counter()
