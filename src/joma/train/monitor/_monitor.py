"""The monitor: a training loop tells it of every step, and it looks now and then."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from joma.errors import JomaError
from joma.models.architectures import Architecture
from joma.probes import AttentionMap
from joma.runs import Run
from joma.train.findings import Finding
from joma.train.monitor._cadence import Cadence
from joma.train.monitor._found import find, series_of
from joma.train.monitor._held import Held, bare, catching, undisturbed
from joma.train.monitor._look import Looks
from joma.train.monitor._metrics import chosen_metrics
from joma.train.monitor._parts import parts_of
from joma.train.monitor._processes import Processes
from joma.train.monitor._reading import Reading
from joma.train.monitor._row import Row

DEAR = 10
"""Looks between two that also see what is dear."""

Logger = Callable[[int, Mapping[str, float]], None]
"""Told of every look: the step, and values by name, "attention_entropy/layer0/head1"."""


class Monitor:
    """Watches a model while it is trained, and says in plain words what it found.

        with joma.Monitor(model, every=100, run="runs/mine") as monitor:
            for batch in loader:
                loss = loss_of(model(batch))
                loss.backward()
                optimizer.step()
                monitor.step(loss)       # before zero_grad, so that gradients can be seen
                optimizer.zero_grad()
        print(monitor.summary())

    The losses of a training are the same to the bit with it and without. Looks are made in
    evaluation mode, on inputs held since the first step; modes, buffers, gradients, random states,
    autocast and what is compiled are put back. Compiled models are looked at uncompiled.

    What a look sees: attention (entropy, effective number of tokens), stable ranks of the MLPs'
    lower layers and of Wqᵀ·Wk (rotations of positions left out), and, at every tenth look,
    effective ranks, overlap of embeddings, rank and energy of gradients and rank of updates. Each
    kind may take half of the `budget` of the training's time: where looks take more, they come
    more rarely, at multiples of `every`. The first look of a kind, which makes things ready, is
    paid back by later ones of both, which wait up to three times as long until it is. What a model
    does not have is left out, and why is logged once, to "joma.monitor".

    With several processes each makes a monitor and calls `step`; the first one writes, and the
    losses recorded are its own. With DDP it measures alone; with FSDP2 (`fully_shard`) all take
    part.

    Args:
        model: what the training loop calls, compiled or parallel or neither.
        every: steps between looks; a step is one of the optimizer, however many batches it took.
        run: a run, or the folder of one to make; otherwise a new folder in `./runs`.
        held: what the model is called with to be looked at: a tensor, tuple or dict, or a list of
            such. Otherwise the first sequences, about 2,048 tokens, of the first forward pass.
        architecture: where the parts of the model are; found by its configuration unless given.
        attention: which modules make queries and keys, for a model that does not tell.
        metrics: which, of `METRICS`; otherwise all that can be.
        ranks: r of the energy of gradients in their top r directions.
        theorem1: layer on which Theorem 1 is measured; none if not given.
        tolerance: of stable ranks, relative.
        seed: of random starts, which are the monitor's own.
        loggers: told of every look.
        budget: share of the training's time that looks may take; None for no limit, so that looks
            are made exactly every `every` steps.
        step: optimizer steps made before, where a training goes on; give `held` then, so that looks
            before and after are at the same.

    Raises:
        ValueError: for options that cannot be.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        run: Run | Path | str | None = None,
        held: Any = None,
        architecture: Architecture | None = None,
        attention: AttentionMap | None = None,
        metrics: Sequence[str] | None = None,
        ranks: Sequence[int] = (8, 32, 128),
        theorem1: int | None = None,
        tolerance: float = 1e-2,
        seed: int = 0,
        loggers: Sequence[Logger] = (),
        budget: float | None = 0.01,
        step: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise JomaError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        every, step = _whole("every", every, 1), _whole("step", step, 0)
        if budget is not None and not 0 < budget <= 1:
            raise JomaError(f"budget must be a share above 0, at most 1, or None, got {budget!r}")
        if not 1e-7 <= tolerance < 1:
            raise JomaError(f"tolerance must lie from 1e-7 below 1, got {tolerance!r}")
        chosen = chosen_metrics(metrics, theorem1)
        self._bare = bare(model)
        self._processes = Processes(self._bare)
        share = None if budget is None else budget / 2
        self._cadences = tuple(
            Cadence(apart, share, due=1 if step == 0 else (step // apart + 1) * apart)
            for apart in (every, DEAR * every)
        )
        self._begun = self._step = step
        self._trained = self._seconds = 0.0
        self._ended = perf_counter()
        self._losses: list[tuple[int, Tensor | float]] = []
        self._rate: float | None = None
        self._moved_at: int | None = None
        self._moving = 0.0
        self._loggers = tuple(loggers)
        self._settings = {
            "every": every,
            "metrics": chosen,
            "ranks": tuple(_whole("ranks", rank, 1) for rank in ranks),
            "theorem1": None if theorem1 is None else _whole("theorem1", theorem1, 0),
            "tolerance": tolerance,
            "seed": _whole("seed", seed, 0),
            "budget": budget,
        }
        self._architecture, self._attention = architecture, attention
        self._looks = self._prepared()
        self._closed = False
        with contextlib.ExitStack() as stack:
            self._run = self._opened(run, stack)
            self._held = None if held is None else Held.of(held)
            self._settled = False
            self._catching = stack.enter_context(contextlib.ExitStack())
            if self._held is None and self._processes.looks:
                self._catching.enter_context(catching(model, self._catch))
            self._stack = stack.pop_all()

    @property
    def run(self) -> Run | None:
        """The run written to; None in processes that do not write."""
        return self._run

    @property
    def seconds(self) -> float:
        """That looks have taken so far."""
        return self._seconds

    def __enter__(self) -> "Monitor":
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self) -> None:
        """Looks at what the model is before it learns, if `held` was given; `with` does it too."""
        if self._held is not None and self._step == 0 and self._processes.looks:
            self._look(dear=False)

    def step(
        self, loss: Tensor | float | None = None, *, learning_rate: float | None = None
    ) -> None:
        """Tells of one step of the optimizer, and looks if a look is due.

        To be called after `optimizer.step()` and before `optimizer.zero_grad()`.

        Args:
            loss: of the step; kept on its device until the next look, so that nothing waits for it.
            learning_rate: of the step.
        """
        if self._closed:
            raise JomaError("the monitor is closed: step must be called before close")
        self._step += 1
        if not self._processes.looks:
            return
        if loss is not None and self._processes.first:
            self._losses.append((self._step, _kept(loss)))
        if learning_rate is not None:
            self._rate = float(learning_rate)
        if self._moved_at is not None and self._step == self._moved_at + 1:
            self._look_at_the_move()
        usual, dear = (self._step >= cadence.due for cadence in self._cadences)
        if usual or dear:
            self._look(dear=dear)

    def look(self) -> None:
        """Looks now, at everything."""
        if self._processes.looks:
            self._look(dear=True)

    def findings(self) -> list[Finding]:
        """What the series recorded so far say; nothing in processes that do not write."""
        if self._run is None:
            return []
        self._record_losses()
        self._run.metrics.flush()
        return find(series_of(self._run.metrics.read()))

    def summary(self) -> str:
        """The findings in plain words, one to a line."""
        if self._run is None:
            return ""
        found = self.findings()
        trained = self._trained if self._closed else self._trained + perf_counter() - self._ended
        share = self._seconds / max(trained, 1e-9)
        lines = [
            f"{self._step} steps watched, looks took {self._seconds:.1f} s, {share:.1%} of the "
            f"training's time; numbers in {self._run.path}"
        ]
        lines += [f"- step {one.step}: {one.sentence}" for one in found]
        if not found:
            lines.append("- nothing out of the ordinary was found")
        lines += [f"- {what} not measured: {why}" for what, why in self._looks.off.items()]
        return "\n".join(lines)

    def close(self) -> None:
        """Writes what is left and the findings; nothing is watched from then on."""
        if self._closed:
            return
        self._closed = True
        self._trained += perf_counter() - self._ended
        try:
            if self._run is not None:
                found = self.findings()
                self._run.metrics.compact()
                self._run.write_json("findings", [one.as_json() for one in found])
        finally:
            self._stack.close()

    def _opened(self, run: Run | Path | str | None, stack: contextlib.ExitStack) -> Run | None:
        if not self._processes.first:
            return None
        if not isinstance(run, Run):
            name = type(self._bare).__name__
            config = {"model": name, **self._settings}
            run = Run.create("monitor", config, out=run, device=str(self._processes.device))
        stack.enter_context(run.locked())
        return run

    def _catch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._held is None and torch.is_grad_enabled():  # a validation before is not training
            self._held = Held.seen(self._bare, args, kwargs, self._processes.device.type)

    def _look(self, *, dear: bool) -> None:
        began = self._synchronised()
        self._trained += began - self._ended
        self._settle()
        rows: list[Row] = []
        with undisturbed(self._bare):
            looks = self._looks
            if self._held is not None:
                rows += looks.forward(self._bare, self._held)
            elif self._step > self._begun:
                looks.turn_off(
                    "attention", f"{type(self._bare).__name__} was not called; give held"
                )
            rows += looks.cheap(self._bare)
            middle = self._synchronised()
            if dear:
                rows += looks.dear(self._bare, stepped=self._step > self._begun)
                self._moved_at = self._step
        self._record(rows)
        ended = self._synchronised()
        seconds = (middle - began, ended - middle + self._moving) if dear else (ended - began,)
        owed = self._seconds + ended - began - (self._settings["budget"] or 0.0) * self._trained
        for cadence, took in zip(self._cadences, seconds, strict=False):
            cadence.looked(self._step, took, self._trained, owed)
        due = self._processes.agree([cadence.due for cadence in self._cadences])
        for cadence, when in zip(self._cadences, due, strict=True):
            cadence.due = when
        self._ended = perf_counter()
        self._seconds += self._ended - began

    def _settle(self) -> None:
        """Ends the watch for inputs once there are some; all processes take those of the first."""
        if self._held is not None and not self._settled:
            self._catching.close()
            self._held = self._held.shared(self._processes.same)
            self._settled = True

    def _look_at_the_move(self) -> None:
        began = self._synchronised()
        with undisturbed(self._bare):
            rows = self._looks.moved(self._bare)
        self._moved_at = None
        self._record(rows, losses=False)
        self._moving = perf_counter() - began
        self._seconds += self._moving
        self._ended += self._moving  # no time of training

    def _prepared(self) -> Looks:
        settings = self._settings
        with undisturbed(self._bare):
            parts = parts_of(self._bare, self._architecture)
        layer = settings["theorem1"]
        if layer is not None and parts.blocks and layer not in parts.blocks:
            raise JomaError(
                f"theorem1 must be a layer of the model, 0 to {max(parts.blocks)}, got {layer}"
            )
        return Looks(
            parts=parts,
            processes=self._processes,
            metrics=settings["metrics"],
            ranks=settings["ranks"],
            theorem1=layer,
            tolerance=settings["tolerance"],
            seed=settings["seed"],
            reading=Reading(self._attention, layer),
        )

    def _record(self, rows: list[Row], *, losses: bool = True) -> None:
        if self._run is None:
            return
        known: dict[str, float] = {}
        if losses:
            loss = self._record_losses()
            if loss is not None:
                known["loss"] = loss
            if self._rate is not None:
                self._run.metrics.append(self._step, "learning_rate", self._rate)
                known["learning_rate"] = self._rate
        for row in rows:
            self._run.metrics.append(
                self._step,
                row.name,
                row.value,
                module=row.module,
                layer=row.layer,
                head=row.head,
                bound=row.bound,
            )
            known[row.key] = row.value
        self._run.metrics.flush()
        for logger in self._loggers:
            logger(self._step, known)

    def _record_losses(self) -> float | None:
        """Logs the losses since the last look; the last of them."""
        if self._run is None or not self._losses:
            return None
        kept, self._losses = self._losses, []
        numbers = [loss for _, loss in kept if isinstance(loss, Tensor)]
        values = iter(torch.stack(numbers).tolist() if numbers else [])
        losses = [next(values) if isinstance(loss, Tensor) else loss for _, loss in kept]
        steps = [step for step, _ in kept]
        self._run.metrics.append_many(steps, "loss", [[loss] for loss in losses])
        return losses[-1]

    def _synchronised(self) -> float:
        """The time when the device has done what it was given."""
        if self._processes.device.type == "cuda":
            torch.cuda.synchronize(self._processes.device)
        return perf_counter()


def _kept(loss: Tensor | float) -> Tensor | float:
    if not isinstance(loss, Tensor):
        return float(loss)
    if loss.numel() != 1:
        raise JomaError(f"loss must be one number, got shape {tuple(loss.shape)}")
    loss = loss.detach()
    loss = loss.to_local() if isinstance(loss, DTensor) else loss
    # A copy: the graph of a compiled step writes the next loss to the same place.
    return loss.reshape(()).float().clone() if loss.dtype != torch.float64 else loss.clone()


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise JomaError(f"{name} must be a whole number from {least} on, got {value!r}")
    return value
