"""The frame of experiments that train networks: groups, resuming, reading what was measured.

An experiment says which networks there are (cells, seeds and sizes), how they are made and
measured, and what was published. Here its groups are trained, each in a run folder of its own,
`groups/NAME`, which is skipped when it is done and resumed when it was stopped; and here the
metrics of the groups that are done become arrays and tables.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from joma.common.files import write_bytes
from joma.data import Batch
from joma.errors import JomaError
from joma.experiments._experiment import Request
from joma.models import Transformer, TransformerConfig
from joma.runs import Run
from joma.train import Ensemble, fit

FRESH_STEP = 2**40
"""A step that no training reaches: its samples are new to every network."""


@dataclass(frozen=True)
class NetworkSize:
    """How large the networks are made and how long they are trained.

    A subclass adds what else decides the numbers: all fields are kept in the run folder.

    Attributes:
        seeds: Networks in each cell.
        width: Width of the residual stream.
        hidden: Nodes of each layer.
        learning_rate: Learning rate; small networks need a larger one to learn in fewer steps.
        steps: Training steps.
    """

    seeds: int
    width: int
    hidden: int
    learning_rate: float
    steps: int

    measured_steps: ClassVar[tuple[int, ...]] = (0,)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the same size with the options that were given, which are named as its fields."""
        given = {name.replace("-", "_"): value for name, value in options.items()}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def measure_at(self) -> tuple[int, ...]:
        """The steps after which networks are measured: untrained, …, at the end."""
        return (*(step for step in self.measured_steps if step < self.steps), self.steps)

    @property
    def controlled(self) -> tuple[int, ...]:
        """The measurements that come with all controls."""
        return (0, 1, self.steps)


class NetworkCell:
    """Networks that differ in their seeds alone."""

    @property
    def name(self) -> str:
        """What they are called in the group's configuration."""
        raise NotImplementedError

    def seeds(self, seed: int, count: int) -> tuple[int, ...]:
        """Return their seeds, from the one that was asked for; different ones in every cell."""
        return member_seeds(self.name, seed, count)


def member_seeds(name: str, seed: int, count: int) -> tuple[int, ...]:
    """Return the seeds of the networks called `name`: others for every name, seed and network."""
    return tuple(zlib.crc32(f"{name}/{seed}/{k}".encode()) for k in range(count))


class GroupTraining(Protocol):
    """The networks of a group, and how they are measured as they learn."""

    ensemble: Ensemble

    def measure(self, step: int) -> None:
        """Measure the networks after `step` steps and log it to the metrics of their run."""
        ...


class TransformerGroup:
    """The transformers of one group while they are trained.

    Args:
        run: The group's run.
        size: The size of the experiment.
        config: The networks.
        seeds: The seed of each network.
        optimizer: Makes the optimizer from the parameters and the learning rate.
        sample: Returns the batch of a step.
        request: What was asked of the experiment.
        gpu_precision: Precision of products and activations on a GPU; on a CPU it is float32.
    """

    def __init__(
        self,
        run: Run,
        size: NetworkSize,
        config: TransformerConfig,
        seeds: Sequence[int],
        optimizer: Callable[..., Any],
        sample: Callable[..., Batch],
        request: Request,
        gpu_precision: Any = "bfloat16",
    ) -> None:
        self.run = run
        model = Transformer(config, seeds, device=request.device)
        self.ensemble = Ensemble(
            model,
            optimizer(model.named_parameters(), size.learning_rate),
            sample,
            precision=gpu_precision if request.device == "cuda" else "float32",
        )

    def log(self, step: int, name: str, values: Tensor, **where: Any) -> None:
        """Log a number of each network to the metrics of the run."""
        self.run.metrics.append(step, name, values.detach().cpu().numpy(), **where)


@dataclass(frozen=True, eq=False)
class NetworkGroup:
    """Networks that are trained together.

    Attributes:
        name: The group's name.
        members: Cell and seed of each of its networks, in the order of the ensemble's members.
        prepare: Makes the networks, given the group's run.
    """

    name: str
    members: Sequence[tuple[str, int]]
    prepare: Callable[[Run], GroupTraining]


def train_groups(
    run: Run,
    groups: Iterable[NetworkGroup],
    size: Any,
    measure_at: Sequence[int],
    request: Request,
    others: Sequence[str] = (),
) -> None:
    """Train groups, each in a run folder of its own, unless they are done already.

    Args:
        run: The experiment's run; a group's run is in its folder, `groups/GROUP`.
        groups: The groups.
        size: The size of the experiment, a dataclass; with the members, all that decides a group's
            numbers, kept as the configuration of its run.
        measure_at: The steps after which networks are measured; they are trained up to the last.
        request: What was asked of the experiment.
        others: Experiments with the same groups; what a run of theirs in a folder next to this one
            has done is not done again: its metrics are copied.
    """
    settings = {key: value for key, value in asdict(size).items() if key != "seeds"}
    for group in groups:
        members = [{"cell": cell, "seed": seed} for cell, seed in group.members]
        config = {**settings, "measure_at": measure_at, "members": members, "group": group.name}
        folder = run.path / "groups" / group.name
        own = Run.resume(f"{run.name}-group", config, out=folder, device=request.device)
        if groups_done(run, [group.name]):
            own.checkpoints.clear()  # in case it was killed just before it did
        elif not any(_copy_metrics(own, other) for other in _done_elsewhere(run, own, others)):
            _train(group, own, measure_at, request)


def train_cells(
    run: Run,
    groups: Mapping[str, Sequence[Any]],
    networks: Callable[[Run, Any, Any, Request], GroupTraining],
    size: NetworkSize,
    request: Request,
) -> None:
    """Train the groups of cells that are asked for, each in a run folder of its own.

    Args:
        run: The experiment's run.
        groups: The cells of every group, by name.
        networks: Makes the networks of a group from its run, its cells, the size and the request.
        size: The size of the experiment.
        request: What was asked of the experiment.
    """

    def group(name: str) -> NetworkGroup:
        cells = groups[name]
        members = [(c.name, seed) for c in cells for seed in c.seeds(request.seed, size.seeds)]
        return NetworkGroup(name, members, lambda own: networks(own, cells, size, request))

    train_groups(run, map(group, request.groups or groups), size, size.measure_at, request)


def _train(group: NetworkGroup, own: Run, measure_at: Sequence[int], request: Request) -> None:
    on_gpu = request.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    networks = group.prepare(own)
    ended = fit(
        networks.ensemble,
        own,
        measure_at[-1],
        measure=networks.measure,
        measure_at=measure_at,
        progress=lambda done, total: request.progress(f"train {group.name}", done, total),
    )
    outcome = {
        "status": "done",
        "device": request.device,
        "precision": networks.ensemble.precision,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        **asdict(ended),
    }
    own.write_json("outcome", outcome)
    own.checkpoints.clear()  # they serve to resume, and are large


def _done_elsewhere(run: Run, own: Run, others: Sequence[str]) -> Iterator[Run]:
    """Yield the runs of a group next to this one that are done with the same settings."""
    name = own.config["group"]
    for experiment in others:
        for folder in sorted(run.path.absolute().parent.glob(f"{experiment}*")):
            with contextlib.suppress(ValueError, OSError):
                for group in groups_done(Run.open(folder), [name]).values():
                    if {**group.config, "name": own.config["name"]} == own.config:
                        yield group


def _copy_metrics(own: Run, other: Run) -> bool:
    """Copy what another run measured; return whether that was all of it."""
    with own.locked():
        try:
            parts = sorted((other.path / "metrics").glob("part-*.parquet"))
            copies = {part.name: part.read_bytes() for part in parts}
            outcome = other.read_json("outcome")
        except (OSError, ValueError):  # it is being started over just now
            return False
        if not copies or outcome.get("status") != "done":
            return False
        own.metrics.rewind(-1)
        for name, data in copies.items():
            write_bytes(own.path / "metrics" / name, data)
        own.metrics.compact()  # which counts them
        own.write_json("outcome", {**outcome, "taken_from": str(other.path)})
        own.checkpoints.clear()
    return True


def groups_done(run: Run, groups: Iterable[str]) -> dict[str, Run]:
    """Return the runs of those groups whose training has ended, by name."""
    found = {}
    for name in groups:
        with contextlib.suppress(JomaError, KeyError, TypeError):
            own = Run.open(run.path / "groups" / name)
            if own.read_json("outcome")["status"] == "done":
                found[name] = own
    return found


def read_metric(
    runs: Iterable[Run],
    steps: Sequence[int],
    seeds: int,
    name: str,
    layers: int = 0,
    modules: Sequence[str] = (),
) -> np.ndarray:
    """Return what the metrics of groups hold under a name, NaN where it was not measured.

    Args:
        runs: The groups' runs.
        steps: The steps of the measurements.
        seeds: Networks in each cell.
        name: The metric.
        layers: How many layers there are; 0 for a metric of the whole network.
        modules: The modules it is logged of; none for a metric without.

    Returns:
        (cells, layers, modules, steps, seeds), without the axes of layers and modules where there
        are none.
    """
    parts = []
    for run in runs:
        log = run.metrics.read(name)
        place = [np.searchsorted(steps, log["step"]), log["member"].astype(int)]
        shape = [len(steps), len(run.config["members"])]
        if modules:
            place.insert(0, np.array([modules.index(str(module)) for module in log["module"]], int))
            shape.insert(0, len(modules))
        if layers:
            place.insert(0, log["layer"].astype(int))
            shape.insert(0, layers)
        values = np.full(shape, np.nan)
        values[tuple(place)] = log["value"]
        parts.append(np.moveaxis(values.reshape(*shape[:-1], -1, seeds), -2, 0))
    return np.concatenate(parts)
