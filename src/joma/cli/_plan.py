"""What there is to reproduce and what it takes, for `joma reproduce --help` and `--dry-run`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import _show

if TYPE_CHECKING:
    from joma.experiments import Experiment, Request, Scale

# Written down, for the help names what there is and must not import the experiments.

SECONDS = {"fig2": 4, "fig3": 3, "fig4": 4, "fig9": 3, "cooccurrence": 4, "scan-snap": 7}
"""About how many seconds each experiment of one size takes on one core, with its imports."""

MEMORY = "under 1 GB"
"""What each of them needs; the largest takes about 0.2 GB."""

TRAINED: tuple[str, ...] = ("fig6", "fig8", "hierarchy", "table1", "table1-hblt")
"""The experiments that train networks; what they take is written down in their scales."""

NAMES = (*SECONDS, *TRAINED)

SCALES = ("tiny", "small", "full")
DEFAULT_SCALE = "small"

OPTIONS = {
    "learning-rate": "Of hierarchy, table1 and table1-hblt: learning rate; "
    "of table1 published 1e-5 and 1e-4",
    "hidden": "Of table1: hidden nodes of each layer, published 4096 and 400",
    "corpus": "Of fig6: the text, wikitext-2, wikitext-103, embedded (prose that comes with "
    "Python), hub:NAME, or a folder with train.txt and valid.txt; as the scale has it if not given",
    "optimizer": "Of hierarchy: adam, or sgd for plain gradient descent; adam if not given",
}
"""The experiments' own options and what they are."""

REFERENCE = (
    "Of fig6 and fig8: folder with recorded curves, wikitext2_entropy.csv and "
    "wikitext2_val_loss.csv, to draw and compare with"
)


def show(requests: "Mapping[str, Request]", folders: Mapping[str, Path | None], json: bool) -> None:
    """Prints what would be made, where, and what it takes."""
    plans = [_plan(name, request, folders[name]) for name, request in requests.items()]
    if json:
        _show.as_json(plans)
        return
    for plan in plans:
        typer.echo(f"{plan['name']}: {plan['title']} → {plan['run']}")
        for line in _lines(plan):
            typer.echo(f"  {line}")
    known = [plan["about_seconds"] for plan in plans if plan["about_seconds"] is not None]
    if known and len(plans) > 1:
        others = [plan["name"] for plan in plans if plan["about_seconds"] is None]
        without = f", without {', '.join(others)}" if others else ""
        typer.echo(f"Together about {_duration(sum(known))}{without}.")


def warn(requests: "Mapping[str, Request]") -> None:
    """Says on standard error what was made for a GPU and is about to be done on a CPU."""
    from joma.experiments import EXPERIMENTS

    for name, request in requests.items():
        experiment = EXPERIMENTS[name]
        if request.device != "cpu" or not request.scale:
            continue
        if _kind(experiment.scales[request.scale]) == "cpu":
            continue
        words = (
            f"{name} at scale {request.scale} was made for a GPU; on this CPU what is not done may "
            "take days"
        )
        fitting = [scale for scale, it in experiment.scales.items() if _kind(it) == "cpu"]
        if fitting:  # the largest of them
            seconds = experiment.takes(request)[fitting[-1]].seconds * _share(experiment, request)
            words += f"; --scale {fitting[-1]} takes about {_duration(seconds)}"
        typer.echo(words, err=True)


def _kind(scale: "Scale") -> str:
    """The kind of device that a scale was measured on, as a request names it."""
    return "cpu" if "CPU" in scale.device else "cuda"


def _share(experiment: "Experiment", request: "Request") -> float:
    """How much of an experiment is asked for, with its groups as much work each."""
    return len(request.groups) / len(experiment.groups) if request.groups else 1.0


def _plan(name: str, request: "Request", folder: Path | None) -> dict[str, Any]:
    from joma.experiments import EXPERIMENTS
    from joma.runs import default_folder, is_run

    experiment = EXPERIMENTS[name]
    plan = {
        "name": name,
        "title": experiment.title,
        "run": str(folder or default_folder(name)),
        "device": request.device,
    }
    if not request.scale:
        return {**plan, "about_seconds": SECONDS[name], "memory": MEMORY}
    takes, share = experiment.takes(request), _share(experiment, request)
    chosen = takes[request.scale]
    return {
        **plan,
        "about_seconds": chosen.seconds * share if _kind(chosen) == request.device else None,
        "memory": chosen.memory,
        "scale": request.scale,
        "scales": {
            scale: {"about_seconds": it.seconds * share, "on": it.device, "memory": it.memory}
            for scale, it in takes.items()
        },
        "options": dict(request.options),
        "groups": list(request.groups or experiment.groups),
        "all_groups": list(experiment.groups),
        "continues": experiment.resumable and folder is not None and is_run(folder),
    }


def _lines(plan: Mapping[str, Any]) -> list[str]:
    if "scale" not in plan:
        return [f"about {_duration(plan['about_seconds'])}, memory {plan['memory']}"]
    lines = [
        f"{scale}: about {_duration(takes['about_seconds'])} on {takes['on']}, "
        f"memory {takes['memory']}{_remark(plan) if scale == plan['scale'] else ''}"
        for scale, takes in plan["scales"].items()
    ]
    lines.append(f"device: {plan['device']}")
    lines += [
        f"{name}: {'as the scale has it' if value is None else value}"
        for name, value in plan["options"].items()
    ]
    if plan["groups"]:
        of = "" if plan["groups"] == plan["all_groups"] else f" of {', '.join(plan['all_groups'])}"
        lines.append(f"groups: {', '.join(plan['groups'])}{of}")
    return [*lines, "goes on with what is there"] if plan["continues"] else lines


def _remark(plan: Mapping[str, Any]) -> str:
    """What is said of the scale that is asked for."""
    if plan["about_seconds"] is not None:
        return " (this one)"
    if plan["device"] == "cpu":
        return " (this one; on cpu far longer: not measured)"
    return f" (this one; not measured on {plan['device']})"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
