"""Training networks one by one, each in a run folder of its own, several at a time on a GPU."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joma.experiments._experiment import Request
from joma.experiments._trained import groups_done, member_seeds
from joma.experiments.galore.lora import add_lora
from joma.experiments.galore.networks import (
    ByteText,
    load_text,
    loss_of,
    make_model,
    make_optimizer,
    matrices,
    schedule,
    state_bytes,
    validation_loss,
)
from joma.experiments.galore.setting import (
    CLIP,
    CONTROLS,
    DESCENT_RATE,
    MANY,
    READINGS,
    TUNING_MEMBER,
    GaLoreNetwork,
    GaloreSize,
)
from joma.experiments.galore.study import SubspaceStudy
from joma.runs import Run

_NO_MATTER = (
    "processes",
    "seeds",
    "variant_seeds",
    "rates",
    "climb",
    "ranks",
    "svd_ranks",
    "gaps",
    "moments",
    "moment_gaps",
    "switches",
    "controls",
)
"""Fields of the size that decide which networks there are, and not what becomes of one."""

_OTHER_BATCHES = 10**6
"""More than the steps of any training: batches from there on are never trained on."""

WARM_STEPS = 20
"""Steps before the time of a step is measured, at most as many as are measured."""


@dataclass(frozen=True)
class Task:
    """One network, and all that its process must know.

    Attributes:
        folder: Its run folder.
        network: The network.
        size: Size of the experiment.
        seed: Seed of the experiment.
        device: What to compute on.
    """

    folder: Path
    network: GaLoreNetwork
    size: GaloreSize
    seed: int
    device: str


def train_networks(
    run: Run, networks: Sequence[GaLoreNetwork], size: GaloreSize, request: Request, what: str
) -> None:
    """Train the networks that are not done, each in `groups/NAME` of the run's folder.

    One that was stopped starts over. On a GPU several are trained at the same time, but those whose
    time is measured one after the other.

    Args:
        run: Run of the experiment.
        networks: The networks.
        size: Size of the experiment.
        request: What was asked of the experiment.
        what: What the progress is called.
    """
    ended = groups_done(run, [one.name for one in networks])
    tasks = [
        Task(run.path / "groups" / one.name, one, size, request.seed, request.device)
        for one in networks
        if one.name not in ended
    ]
    several = several_at_once(size, request.device)
    shared = [task for task in tasks if not task.network.timed] if several > 1 else []
    alone = [task for task in tasks if task not in shared]
    done = 0
    with contextlib.ExitStack() as stack:
        if shared:
            load_text(size, "cpu")  # encoded once, before all processes ask for it
            # Each process has its own place in the GPU's queue; one alone leaves it mostly idle.
            pool = multiprocessing.get_context("spawn").Pool(min(several, len(shared)))
            stack.enter_context(pool)
            for _ in pool.imap_unordered(train_network, shared):
                done += 1
                request.progress(f"train {what}", done, len(tasks))
    for task in alone:

        def report(step: int, steps: int, name: str = task.network.name) -> None:
            request.progress(f"train {what}, {name}", step, steps)

        train_network(task, report)
        done += 1
        request.progress(f"train {what}", done, len(tasks))


def several_at_once(size: GaloreSize, device: str) -> int:
    """Return how many networks are trained at the same time on a device."""
    return size.processes if device == "cuda" else 1


OptimizerMaker = Callable[[nn.Module, GaLoreNetwork, str], torch.optim.Optimizer]


def train_network(
    task: Task,
    report: Callable[[int, int], None] = lambda *_: None,
    optimizer: OptimizerMaker = make_optimizer,
) -> None:
    """Train one network and write what became of it to its run folder.

    The metrics have `loss` of every step, `validation_loss` by the number of steps made, and of
    networks in full rank what `SubspaceStudy` measures; `outcome.json` has the rest.

    Args:
        task: The network, and where it goes.
        report: Is called with the number of steps made and of all steps.
        optimizer: Makes the optimizer of the model, the network and the device.
    """
    network, size = task.network, task.size
    settings = {key: value for key, value in asdict(size).items() if key not in _NO_MATTER}
    config = {**settings, "network": asdict(network), "seed": task.seed}
    own = Run.resume("galore-network", config, out=task.folder, device=task.device)
    own.metrics.rewind(-1)
    text = load_text(size, task.device)
    # Networks with the same number have the same seed, whatever their method.
    seed = member_seeds("galore", task.seed, network.member + 1)[network.member]
    model = make_model(size, seed, task.device)
    trainer = _Trainer(own, model, network, size, seed, text, task.device, optimizer)
    if network.timed:
        outcome = trainer.measure_time()
    elif network.reading:
        outcome = trainer.train_recipe()
    else:
        outcome = trainer.train(report)
    own.metrics.flush()
    own.write_json("outcome", {"status": "done", "device": task.device, **outcome})


class _Trainer:
    """A network, its optimizer and its text."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        network: GaLoreNetwork,
        size: GaloreSize,
        seed: int,
        text: ByteText,
        device: str,
        make: OptimizerMaker,
    ) -> None:
        self.run, self.model, self.network, self.size = run, model, network, size
        self.text, self.device, self.seed = text, device, seed
        self.parameters = sum(one.numel() for one in model.parameters())
        self._losses: list[tuple[int, torch.Tensor]] = []
        first = network
        if network.full_rate is not None:
            first = GaLoreNetwork("full", network.full_rate, network.member)
        elif network.method == "lora":
            self._add_lora()
        self._make = _make_control if network.control else make
        self.rate, self.optimizer = first.rate, self._make(model, first, device)

    def train(self, report: Callable[[int, int], None]) -> dict[str, Any]:
        """Train to the end, and return what came of it."""
        size, network = self.size, self.network
        study = None
        if network.method == "full" and network.member != TUNING_MEMBER:
            study = SubspaceStudy(self.run, size, matrices(self.model), self._averaged_gradients)
        seconds, measured = 0.0, set(size.measured_steps)
        for step in range(size.steps):
            if step in measured:
                self._evaluate(step)
                report(step, size.steps)
            if network.switch and step == network.switch:
                self._add_lora()
                self.rate = network.rate
                self.optimizer = self._make(self.model, network, self.device)
            begun = time.perf_counter()
            self._set_rate(step, size.steps, network.switch)
            at = 0 if network.control in CONTROLS[1:] else step
            self._backward(step, self.text.batch(self.seed, at, size.batch))
            if study is not None:
                seconds += time.perf_counter() - begun
                study.before_step(step)
                begun = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds += time.perf_counter() - begun
        final = self._evaluate(size.steps)
        if study is not None:
            study.at_end(size.steps)
        return self._outcome(final, size.steps, seconds=seconds / size.steps)

    def train_recipe(self) -> dict[str, Any]:
        """Train in micro-batches as one reading of the 7B recipe has it."""
        size, reading = self.size, self.network.reading
        moves_at_once = reading == READINGS[2]
        trained = [one for one in self.model.parameters() if one.requires_grad]
        updates, norms = 0, list[float]()
        for step in range(size.recipe_steps):
            self._set_rate(step, size.recipe_steps)
            batch = self.text.batch(self.seed, step, size.recipe_batch or size.batch)
            parts = batch.tensor_split(size.micro_batches)
            for part in parts:
                self._backward(step, part, share=1 / len(parts))
                if moves_at_once:
                    self.optimizer.step()  # in the backward pass the parameters moved already
                    updates += 1
            norm = nn.utils.clip_grad_norm_(trained, CLIP if reading == READINGS[0] else 1e30)
            norms.append(float(norm))
            if not moves_at_once:
                self.optimizer.step()
                self.optimizer.zero_grad()
                updates += 1
        final = self._evaluate(size.recipe_steps)
        over = sum(norm > CLIP for norm in norms) / len(norms)
        return self._outcome(final, size.recipe_steps, updates=updates, clipped=over, norms=norms)

    def measure_time(self) -> dict[str, Any]:
        """Return the mean time of a step and the longest, of as many as a gap has."""
        size = self.size
        warm = min(WARM_STEPS, size.timed_steps)
        times = []
        for step in range(warm + size.timed_steps):
            self._synchronize()
            begun = time.perf_counter()
            self._set_rate(step, warm + size.timed_steps)
            self._backward(step, self.text.batch(self.seed, step, size.batch))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._synchronize()
            times.append(time.perf_counter() - begun)
        measured = times[warm:]
        mean = sum(measured) / len(measured)
        return self._outcome(None, len(times), seconds=mean, slowest=max(measured))

    def _backward(self, step: int, sequences: torch.Tensor, share: float = 1.0) -> None:
        with _fast_products(self.device):
            loss = loss_of(self.model, sequences)
            (loss * share).backward()
        self._losses.append((step, loss.detach()))

    def _evaluate(self, step: int) -> float:
        with _fast_products(self.device):
            loss = validation_loss(self.model, self.text, self.size.batch)
        self.run.metrics.append(step, "validation_loss", loss)
        for at, value in self._losses:
            self.run.metrics.append(at, "loss", float(value))
        self._losses.clear()
        return loss

    def _set_rate(self, step: int, steps: int, switch: int = 0) -> None:
        """Set the learning rate of a step; the one of LoRA rises again after the switch."""
        if self.network.control in CONTROLS[2:]:
            return  # as gradient descent in theory, at one rate
        share = schedule((step + 1) / steps)
        if switch and step >= switch:
            share *= min(1.0, (step + 1 - switch) / max(1.0, 0.02 * steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate.rate * share * group.get("share", 1.0)

    def _averaged_gradients(self, step: int) -> tuple[dict[str, torch.Tensor], int]:
        """Return the mean gradients of matrices over batches that are not trained on, and how many.

        None where they are not wanted.
        """
        inside = matrices(self.model)
        total = {name: torch.zeros_like(one) for name, one in inside.items()}
        times = {"": 1, CONTROLS[0]: MANY}.get(self.network.control, 0)
        count = times * self.size.averaged
        for number in range(count):
            batch = self.text.batch(
                self.seed, _OTHER_BATCHES * (number + 1) + step, self.size.batch
            )
            with _fast_products(self.device), torch.enable_grad():
                found = torch.autograd.grad(loss_of(self.model, batch), list(inside.values()))
            for name, one in zip(inside, found, strict=True):
                total[name] += one / count
        return total if count else {}, count

    def _add_lora(self) -> None:
        model: Any = self.model
        add_lora(model.model.layers, self.network.rank, self.seed)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _outcome(self, final: float | None, steps: int, **more: Any) -> dict[str, Any]:
        projected = getattr(self.optimizer, "projected", [])
        captured = [one.captured for one in projected if one.captured is not None]
        return {
            "network": self.network.name,
            "validation_loss": final,
            "steps": steps,
            "parameters": self.parameters,
            "state_bytes": state_bytes(self.optimizer),
            "captured": sum(captured) / len(captured) if captured else None,
            "refreshes": max((one.refreshes for one in projected), default=0),
            **more,
        }


def _make_control(model: nn.Module, network: GaLoreNetwork, device: str) -> torch.optim.Optimizer:
    """Return the optimizer of a control, and freeze what it does not train."""
    if network.control in CONTROLS[:2]:
        return make_optimizer(model, network, device)
    if network.control == CONTROLS[3]:
        last: Any = model
        last = last.model.layers[-1].mlp.down_proj.weight
        for one in model.parameters():
            one.requires_grad_(one is last)
    trained = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.SGD(trained, lr=DESCENT_RATE)


@contextlib.contextmanager
def _fast_products(device: str) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32, as is usual, within the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
