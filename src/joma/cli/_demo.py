"""`joma demo`."""

import importlib.util
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._progress import gather, reports, workers
from joma.cli._render import Record, mark, paragraph
from joma.cli._reproduce import reproduce_experiment
from joma.cli._run_folder import check_folder, closing, working
from joma.cli._verify import all_hold, check_claim, chosen, draw, summary
from joma.errors import how_to_install

if TYPE_CHECKING:
    from joma.experiments import Request

_TRAINING = "training"
"""Name of the folder of the monitored training."""

_CHANGES = (
    "optimizer.learning_rate=0.03",
    "optimizer.warmup=0",
    "training.steps=240",
    "monitor.every=10",
    "checkpoints.schedule=[]",
)
"""A learning rate that is too high on purpose, so that there is something to find."""

_COSTS = {"claim": 1, "figure": 17, "training": 75}
"""What each kind of work takes in relation to the others: processor time, measured on two cores."""

_SHOWN_FINDINGS = 3
"""Findings of the training that are printed."""


@dataclass(frozen=True, kw_only=True)
class Demo(cmd.Command):
    """Take the tour: train with the monitor on, check every claim, draw the theory's figures.

    Needs no data and takes about a minute on two cores. The training's learning rate is too high on
    purpose: the tour shows what the monitor finds. Experiments that train networks are not part of
    it; `joma reproduce --list` has them. Exits with 1 when a claim or a figure fails.
    """

    summary = "Take the tour: about a minute, no data needed."
    example = "demo --out tour"

    out: Path | None = cmd.out_option()
    seed: int = cmd.seed_option()
    json: bool = cmd.json_flag()
    jobs: int | None = cmd.count("Processes; otherwise one per core, at most two.")

    def run(self) -> None:
        """Take the tour and print it."""
        ids, requests = chosen(None), _theory_requests(self.seed)
        start = time.perf_counter()
        if self.out is not None:
            for name in (*requests, _TRAINING):
                check_folder(self.out / name, "train" if name == _TRAINING else name)
        with working("demo", self.settings, self.out) as begin, begin() as (run, outcome):
            training, records, verdicts = self._do(run.path, requests, ids)
            run.write_json("verdicts", verdicts)
            draw(run, verdicts)
            agreeing = sum(record["verdict"] == "agrees" for record in records)
            good = all_hold(verdicts) and agreeing == len(records)
            finding = (
                f"{summary(verdicts)} {agreeing} of {len(records)} theory figures show what was "
                "published."
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
        if self.json:
            _render.as_json(tour)
        else:
            _show_tour(tour)
        if not good:
            raise typer.Exit(1)

    def _do(
        self, folder: Path, requests: "dict[str, Request]", ids: Sequence[str]
    ) -> tuple[Record, list[Record], list[Record]]:
        """Do the work in several processes; return what came of training, figures and claims."""
        costs = [_COSTS["training"], *[_COSTS["figure"]] * len(requests)]
        costs += [_COSTS["claim"]] * len(ids)
        jobs = self.jobs or min(2, os.cpu_count() or 1)
        with workers(jobs) as submit, reports("demo") as report:
            make = partial(reproduce_experiment, resume=True)
            work = [
                submit(_train_badly, folder / _TRAINING, self.seed),
                *(submit(make, name, folder / name, it) for name, it in requests.items()),
                *(submit(check_claim, name, self.seed) for name in ids),
            ]
            done = 0
            report("", 0, sum(costs))

            def advance(place: int) -> None:
                nonlocal done
                done += costs[place]
                report("", done, sum(costs))

            training, *rest = gather(work, advance)
        return training, rest[: len(requests)], rest[len(requests) :]


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


def _train_badly(folder: Path, seed: int) -> Record:
    """Train a small language model at a learning rate that is too high; return what was found.

    Args:
        folder: Run folder of the training.
        seed: Decides the first weights and the order of the data.
    """
    if importlib.util.find_spec("transformers") is None:  # the model is one of its own
        return {"left_out": f"the training needs transformers: {how_to_install('hf')}"}
    from joma.runs import Run
    from joma.train.findings import headline
    from joma.train.language import read_config, train

    config = read_config("tiny", [*_CHANGES, f"training.seed={seed}"])
    record: dict[str, Any] = {"run": str(folder), "learning_rate": config.optimizer.learning_rate}
    if (folder / "tour.json").is_file():  # of a tour that was stopped later
        return Run.open(folder).read_json("tour")
    run = Run.create("train", config.sections(), out=folder, existing="restart")
    logger = logging.getLogger("joma.monitor")
    with run.locked(), closing(run) as outcome:
        logger.setLevel(logging.ERROR)  # the tour shows at its end what the monitor warns of
        try:
            trained = train(config, run)
        finally:
            logger.setLevel(logging.NOTSET)
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


def _show_tour(tour: Record) -> None:
    """Print what the training, the claims and the figures showed, and where everything is."""
    _heading("A training with the monitor on")
    _show_training(tour["training"])
    _heading("Every claim of the papers against independent numbers")
    _show_claims(tour["verdicts"])
    _heading("The theory's figures, from scratch, next to what was published")
    for record in tour["experiments"]:
        agrees = record["verdict"] == "agrees"
        words = f"{record['name']} {record['verdict']}: {record['title']}"
        paragraph(words if agrees else f"{words}. Here: {record['finding']}", sign=mark(agrees))
    _heading(f"{tour['seconds']:.0f} s. Everything is in {tour['run']}. What you may try next:")
    _render.put("  joma verify             every claim, one by one")
    _render.put("  joma reproduce --list   experiments that train networks, with controls")
    _render.put("  joma probe MODEL        measure a model of your own")
    if tour["report"]:  # whole, whatever the width, so that it can be copied
        typer.echo(_render.printable(f"Report of the training: {tour['report']}"))
        typer.echo(_render.printable(f"The runs in the browser: joma serve {tour['run']}"))


def _heading(words: str) -> None:
    from rich.text import Text

    _render.put("", Text(_render.printable(words), style="bold"))


def _show_training(training: Record) -> None:
    if "left_out" in training:
        paragraph(f"Left out: {training['left_out']}")
        return
    paragraph(
        f"A language model of {training['parameters'] / 1e6:.2g}M parameters, {training['steps']} "
        f"steps on prose that comes with Python, loss {training['loss']:.2f}, "
        f"{training['seconds']:.0f} s. Its learning rate, {training['learning_rate']}, is too high "
        f"on purpose. The monitor found {len(training['findings']) or 'nothing'}:"
    )
    for number, finding in enumerate(training["findings"][:_SHOWN_FINDINGS]):
        paragraph(finding["headline"], sign="!", style="bold yellow")
        if number == 0 and finding["advice"]:
            paragraph(finding["advice"], 4)
    if training["not_judged"]:
        paragraph(f"Not judged, for want of data: {', '.join(training['not_judged'])}.")


def _show_claims(verdicts: Sequence[Record]) -> None:
    paragraph(summary(verdicts), sign=mark(all_hold(verdicts)))
    for record in verdicts:
        if not record["derived"]["holds"]:
            paragraph(f"{record['claim']} does not hold", 4)
    paragraph("docs/errata.md derives what is misprinted.", 4)
