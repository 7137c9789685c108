"""`joma demo`."""

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _show
from joma.cli._demo_show import show_tour
from joma.cli._folders import begun, check_folder, closing, working_in
from joma.cli._options import Json, Out, Seed, count
from joma.cli._progress import weighted_progress
from joma.cli._reproduce import reproduce_experiment
from joma.cli._show import Record
from joma.cli._verdicts import all_hold, summary
from joma.cli._verify import check_claim, chosen, draw
from joma.cli._workers import gather_as_completed, workers
from joma.errors import how_to_install

if TYPE_CHECKING:
    from joma.experiments import Request

TRAINING = "training"
"""Name of the folder of the monitored training."""

_CHANGES = (
    "optimizer.learning_rate=0.03",
    "optimizer.warmup=0",
    "training.steps=240",
    "monitor.every=10",
    "checkpoints.schedule=[]",
)
"""A learning rate that is too high on purpose, so that there is something to find."""

_COSTS = {"claim": 1.0, "figure": 17.0, "training": 75.0}
"""What each kind of work takes in relation to the others: processor time, measured on two cores."""


def demo(
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
    jobs: Annotated[
        int | None, count("--jobs", "Processes; otherwise one per core, at most two.")
    ] = None,
) -> None:
    """Take the tour: train with the monitor on, check every claim, draw the theory's figures.

    Needs no data and takes about a minute on two cores. The training's learning rate is too high on
    purpose: the tour shows what the monitor finds. Experiments that train networks are not part of
    it; `joma reproduce --list` has them. Exits with 1 when a claim or a figure fails.
    """
    ids = chosen(None)
    requests = _theory_requests(seed)
    start = time.perf_counter()
    jobs = jobs or min(2, os.cpu_count() or 1)
    with contextlib.ExitStack() as around:
        folders = around.enter_context(working_in(out))
        if out is not None:
            for name in (*requests, TRAINING):
                check_folder(out / name, "train" if name == TRAINING else name)
        config = {"seed": seed}
        check_folder(out, "demo", config, restart=True)
        run, outcome = around.enter_context(begun(folders, "demo", config, out))
        submit = around.enter_context(workers(jobs))
        trained = submit(train_badly, run.path / TRAINING, seed)
        makes = [
            submit(partial(reproduce_experiment, resume=True), name, run.path / name, request)
            for name, request in requests.items()
        ]
        checks = [submit(check_claim, name, seed) for name in ids]
        costs = [_COSTS["training"], *[_COSTS["figure"]] * len(makes)]
        costs += [_COSTS["claim"]] * len(checks)
        with weighted_progress("demo", sum(costs)) as advance:
            results = gather_as_completed([trained, *makes, *checks], costs, advance)
        training, records, verdicts = results[0], results[1 : len(makes) + 1], results[-len(ids) :]
        run.write_json("verdicts", verdicts)
        draw(run, verdicts)
        agreeing = sum(record["verdict"] == "agrees" for record in records)
        good = all_hold(verdicts) and agreeing == len(records)
        finding = (
            f"{summary(verdicts)} "
            f"{agreeing} of {len(records)} theory figures show what was published."
        )
        outcome.update(agrees=good, finding=finding)
        report = _write_report(run.path, training)
    tour = {
        "run": str(run.path),
        "report": report,
        "training": training,
        "verdicts": verdicts,
        "experiments": records,
        "seconds": round(time.perf_counter() - start, 1),
    }
    if json:
        _show.as_json(tour)
    else:
        show_tour(tour)
    if not good:
        raise typer.Exit(1)


def _theory_requests(seed: int) -> "dict[str, Request]":
    """Return what is asked of each experiment that trains no network: those that are judged."""
    from joma.experiments import EXPERIMENTS

    return {
        name: experiment.request(seed=seed)
        for name, experiment in EXPERIMENTS.items()
        if not experiment.scales
    }


def _write_report(folder: Path, training: Record) -> str | None:
    """Write the page of the training into the tour's folder; return its path."""
    from joma.common.files import write_bytes
    from joma.report.html import page, payload
    from joma.runs import Run

    if "left_out" in training:
        return None
    target = folder / "report.html"
    write_bytes(target, page([payload(Run.open(training["run"]))]).encode())
    return str(target)


def train_badly(folder: Path, seed: int) -> Record:
    """Train a small language model at a learning rate that is too high; return what was found.

    Args:
        folder: Run folder of the training.
        seed: Decides the first weights and the order of the data.
    """
    from joma.runs import Run
    from joma.train.findings import headline
    from joma.train.language import read_config, train

    config = read_config("tiny", [*_CHANGES, f"training.seed={seed}"])
    record: dict[str, Any] = {"run": str(folder), "learning_rate": config.optimizer.learning_rate}
    if importlib.util.find_spec("transformers") is None:  # the model is one of its own
        return {**record, "left_out": f"the training needs transformers: {how_to_install('hf')}"}
    if (folder / "tour.json").is_file():  # of a tour that was stopped later
        return Run.open(folder).read_json("tour")
    run = Run.create("train", config.sections(), out=folder, existing="restart")
    with run.locked(), closing(run) as outcome, silent_monitor():
        trained = train(config, run)
        found = trained.judgement.findings
        outcome.update(
            finding=f"step {trained.step}, loss {trained.loss:.3f}",
            findings=[headline(one) for one in found],
        )
        record |= {
            "steps": trained.step,
            "parameters": trained.parameters,
            "loss": trained.loss,
            "validation_loss": trained.validation_loss,
            "seconds": round(trained.seconds, 1),
            "findings": [{"headline": headline(one), "advice": one.advice} for one in found],
            "not_judged": [one.kind for one in trained.judgement.not_judged],
        }
        run.write_json("tour", record)
    return record


@contextlib.contextmanager
def silent_monitor() -> Iterator[None]:
    """Keep the monitor's warnings off the terminal: the tour shows them at its end."""
    import logging

    logger = logging.getLogger("joma.monitor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
