"""`joma demo`."""

import contextlib
import os
import time
from functools import partial
from typing import Annotated

import typer

from joma.cli import _show
from joma.cli._experiments import show_outcome
from joma.cli._folders import begun, check_folder, working_in
from joma.cli._options import Json, Out, Seed, count
from joma.cli._progress import progress
from joma.cli._reproduce import reproduce_experiment
from joma.cli._verdicts import all_hold, show_verdicts, summary
from joma.cli._verify import check_claim, chosen, draw
from joma.cli._workers import gather, workers
from joma.errors import JomaError


def demo(
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
    jobs: Annotated[
        int | None, count("--jobs", "Processes; otherwise one per core, at most two.")
    ] = None,
) -> None:
    """Take the tour: check every claim, then make every figure, in one folder.

    Needs no data and takes about a minute. What trains networks is done at its tiny scale, on the
    CPU, and not judged; what needs a package that is not installed is left out. Exits with 1 when a
    claim or a theory figure fails.
    """
    from joma.experiments import EXPERIMENTS

    ids = chosen(None)
    requests = {
        name: experiment.request(seed=seed, scale="tiny" if experiment.scales else "")
        for name, experiment in EXPERIMENTS.items()
    }
    left_out = []
    for name in list(requests):
        try:
            EXPERIMENTS[name].check_needs(requests[name])
        except JomaError as error:  # an optional dependency is not installed
            left_out.append(str(error))
            del requests[name]
    start = time.perf_counter()
    jobs = jobs or min(2, os.cpu_count() or 1)
    with contextlib.ExitStack() as around:
        folders = around.enter_context(working_in(out))
        if out is not None:
            for name in EXPERIMENTS:
                check_folder(out / name, name)
        config = {"seed": seed}
        check_folder(out, "demo", config, restart=True)
        run, outcome = around.enter_context(begun(folders, "demo", config, out))
        submit = around.enter_context(workers(jobs))
        checks = [submit(check_claim, name, seed) for name in ids]
        makes = [
            submit(partial(reproduce_experiment, resume=True), name, run.path / name, request)
            for name, request in requests.items()
        ]
        with progress("verify", len(checks)) as advance:
            verdicts = gather(checks, advance)
        run.write_json("verdicts", verdicts)
        overview = draw(run, verdicts)
        if not json:
            show_verdicts(verdicts, time.perf_counter() - start)
            typer.echo(f"Picture: {overview[0]}\n")
        with progress("reproduce", len(makes)) as advance:
            records = gather(makes, advance)
        # Networks as tiny as here decide nothing: they are shown, not judged.
        judged = [record for record in records if not EXPERIMENTS[record["name"]].scales]
        agreeing = sum(record["verdict"] == "agrees" for record in judged)
        good = all_hold(verdicts) and agreeing == len(judged)
        finding = (
            f"{summary(verdicts)} "
            f"{agreeing} of {len(judged)} theory figures show what was published."
        )
        outcome.update(agrees=good, finding=finding)
    if json:
        _show.as_json({"run": str(run.path), "verdicts": verdicts, "experiments": records})
    else:
        for record in records:
            verdict = record["verdict"] if record in judged else None
            show_outcome({**record, "table": [], "verdict": verdict})
        for reason in left_out:
            _show.say(f"Left out: {reason}")
        typer.echo(f"{finding} {time.perf_counter() - start:.0f} s.")
        typer.echo(f"Pictures: {run.path / '*' / 'figures'} and {overview[0].parent}")
    if not good:
        raise typer.Exit(1)
