"""What trained experiments share: training in groups, hidden nodes and NCorr's controls."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from joma.common.files import write_bytes
from joma.data import Batch
from joma.experiments._experiment import Request
from joma.probes import held_out, planted, shuffled
from joma.runs import Run
from joma.train import Ensemble, Training, fit_together


class Work(Protocol):
    """The networks of a group, and what is looked at as they learn."""

    ensemble: Ensemble

    def look(self, step: int) -> None:
        """Measures the networks after `step` steps and logs it to the metrics of their run."""
        ...


class Cell(Protocol):
    """Networks that differ in their seeds alone."""

    @property
    def name(self) -> str:
        """What they are called in the group's configuration."""
        ...

    def seeds(self, seed: int, count: int) -> Sequence[int]:
        """The seed of each, from the one that was asked for."""
        ...


class Size(Protocol):
    """How large an experiment is made; a dataclass whose fields all decide its numbers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seeds(self) -> int:
        """How many networks each cell has."""
        ...

    @property
    def looks(self) -> Sequence[int]:
        """The steps at which networks are looked at; they are trained up to the last."""
        ...


@dataclass(frozen=True, eq=False)
class Group:
    """Networks that are trained together.

    Attributes:
        name: of the group.
        cells: its networks, cell by cell in the order of the ensemble's members.
        prepare: makes the networks, given the group's run.
        elsewhere: finds another run in which the very same networks are trained already, given the
            group's; its metrics are then taken over.
        light: its networks are so few that on a GPU they may train alongside others.
    """

    name: str
    cells: Sequence[Cell]
    prepare: Callable[[Run], Work]
    elsewhere: Callable[[Run], Run | None] = lambda own: None
    light: bool = False


def train_groups(run: Run, groups: Sequence[Group], size: Size, request: Request) -> None:
    """Trains groups, each in a run folder of its own, unless they are done already.

    One after the other, but on a GPU light ones at the same time.

    Args:
        run: of the experiment; a group's run is in its folder, `groups/GROUP`.
        groups: their networks.
        size: of the experiment; with the members, all that decides a group's numbers, kept as the
            configuration of its run.
        request: what was asked of the experiment.
    """
    opened = [(group, _open(run, group, size, request)) for group in groups]
    left = [(group, own) for group, own in opened if own is not None]
    light = [one for one in left if one[0].light and request.device == "cuda"]
    for together in [light, *([one] for one in left if one not in light)]:
        _train(together, size, request)


def _open(run: Run, group: Group, size: Size, request: Request) -> Run | None:
    """The group's run, if anything is left to be trained in it."""
    settings = {key: value for key, value in asdict(size).items() if key != "seeds"}
    members = [
        {"cell": cell.name, "seed": seed}
        for cell in group.cells
        for seed in cell.seeds(request.seed, size.seeds)
    ]
    config = {**settings, "looks": size.looks, "members": members, "group": group.name}
    folder = run.path / "groups" / group.name
    own = Run.resume(f"{run.name}-group", config, out=folder, device=request.device)
    if is_done(run, group.name):
        own.checkpoints.clear()  # in case it was killed just before it did
        return None
    other = group.elsewhere(own)
    return None if other is not None and _take_over(own, other) else own


def _train(groups: Sequence[tuple[Group, Run]], size: Size, request: Request) -> None:
    if not groups:
        return
    if request.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    names = ", ".join(group.name for group, _ in groups)
    done = dict.fromkeys((group.name for group, _ in groups), 0)

    def told(name: str) -> Callable[[int, int], None]:
        def tell(step: int, steps: int) -> None:
            done[name] = step
            request.progress(f"train {names}", sum(done.values()), len(done) * steps)

        return tell

    works = [group.prepare(own) for group, own in groups]
    trainings = [
        Training(
            work.ensemble,
            own,
            size.looks[-1],
            measure=work.look,
            measure_at=size.looks,
            progress=told(group.name),
        )
        for (group, own), work in zip(groups, works, strict=True)
    ]
    for (_, own), work, ended in zip(groups, works, fit_together(trainings), strict=True):
        own.write_json(
            "outcome",
            {
                "status": "done",
                "device": request.device,
                "precision": work.ensemble.precision,
                "peak_gib": peak_memory(request.device),
                "together": len(groups),
                **asdict(ended),
            },
        )
        own.checkpoints.clear()  # they serve to go on with, and are large


def _take_over(own: Run, other: Run) -> bool:
    """Copies what another run measured; whether that was all of it."""
    with own.locked():
        try:
            parts = sorted((other.path / "metrics").glob("part-*.parquet"))
            copies = {part.name: part.read_bytes() for part in parts}
            outcome = other.read_json("outcome")
        except (OSError, ValueError):  # it is being made anew just now
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


def is_done(run: Run, group: str) -> bool:
    """Whether a group's training has ended."""
    try:
        return Run.open(run.path / "groups" / group).read_json("outcome")["status"] == "done"
    except (ValueError, KeyError, TypeError):
        return False


def pooled_nodes(
    ensemble: Ensemble, batch: Batch, chunk: int | None = None
) -> tuple[list[Tensor], Tensor]:
    """Hidden activations of each layer, max-pooled over the sequence, and the outputs.

    Args:
        ensemble: the networks.
        batch: what they are given.
        chunk: how many of the batch's sequences to take at a time; all where None.

    Returns:
        For each layer (E, B, hidden), and (E, B, outputs).
    """
    pooled: list[list[Tensor]] = []

    def watch(name: str, layer: int, x: Tensor) -> None:
        if name == "hidden":
            pooled[-1].append(x.amax(2))

    outputs = []
    with ensemble.evaluating() as model:
        for tokens in batch.tokens.split(chunk or batch.tokens.shape[1], dim=1):
            pooled.append([])
            outputs.append(model(tokens, leading=batch.leading, watch=watch))
    return [torch.cat(parts, 1) for parts in zip(*pooled, strict=True)], torch.cat(outputs, 1)


def controls(over: str, latents: Tensor, nodes: Tensor, **options: Any) -> dict[str, Tensor]:
    """NCorr's two controls over classes or samples, by the names they have in the metrics."""
    chosen = held_out(latents, nodes, **options)
    return {
        f"held_out_{over}": chosen.mean,
        f"counted_{over}": chosen.counted.double().mean(-1),
        f"shuffled_{over}": shuffled(latents, nodes, **options).mean,
    }


PLANTED = (0.7, 0.8, 0.9, 0.95, 1.0)
"""Correlations of the nodes that are planted to measure the power of a control."""


def planted_name(correlation: float) -> str:
    """Return the name that the control has in the metrics where nodes were planted."""
    return f"held_out_planted_{correlation:g}"


def power(latents: Tensor, nodes: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return what `held_out` reads where every latent has a node of known correlation.

    Args:
        latents: (..., S, N).
        nodes: Activations of a real network, (..., S, H); a node for each latent is added to them.
        **options: Arguments of `held_out`.
    """
    found = {}
    for correlation in PLANTED:
        more = planted(latents, nodes, correlation, weights=options.get("weights"))
        found[planted_name(correlation)] = held_out(latents, more, **options).mean
    return found


def peak_memory(device: str) -> float | None:
    """The most memory that tensors took on the GPU, in GiB; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
