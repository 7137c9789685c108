"""`joma probe`."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _series, _show
from joma.cli._folders import begun, check_folder, working_in
from joma.cli._options import (
    Device,
    Dtype,
    Json,
    Model,
    Out,
    Seed,
    Text,
    Tokenizer,
    chosen_device,
    count,
    note_idle,
    option,
)
from joma.cli._probe_request import ProbeRequest, estimate, show_plan
from joma.cli._progress import reports
from joma.errors import JomaError, printable
from joma.probes.metrics import PROBED

if TYPE_CHECKING:
    from joma.analysis.probing import Probed, Probing

NAME = "probe"
METRICS = "; on request ".join(
    ", ".join(name for name, metric in PROBED.items() if metric.by_default == by_default)
    for by_default in (True, False)
)

_OPTIONS = ("window", "windows", "batch", "metrics", "tokenizer", "dtype", "revision", "schedule")
_OF_TEXT = ("tokenizer", "text", "window", "windows", "batch", "dtype")
_OF_SERIES = ("schedule", "jobs")
_ROLES = {
    "query": "query",
    "key": "key",
    "value": "value",
    "output": "output",
    "mlp_lower": "MLP lower",
    "mlp_up": "MLP up",
    "mlp_down": "MLP down",
}


def probe(
    context: typer.Context,
    model: Annotated[str | None, Model] = None,
    series: Annotated[
        list[str] | None,
        option(
            "--series",
            "SERIES",
            "Measure a series of checkpoints instead: a folder of checkpoint folders, several "
            "such folders (give it several times), or HUBID@step0,step1000 (HUBID@pythia for "
            "Pythia's). With MODEL a hub id, its revisions alone.",
        ),
    ] = None,
    revision: Annotated[
        str | None,
        option("--revision", "REV", "Branch, tag or commit of a hub id; of a series, all."),
    ] = None,
    schedule: Annotated[
        str | None,
        option(
            "--schedule",
            "STEPS",
            "Steps a series should have: 0,500,1000 or pythia; otherwise inferred.",
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    text: Text = "embedded",
    window: Annotated[
        int | None,
        count(
            "--window",
            "Tokens read together; 512, or what model or text have if less, if not given.",
        ),
    ] = None,
    windows: Annotated[int, count("--windows", "How many windows, at most.")] = 20,
    batch: Annotated[
        int | None, count("--batch", "Windows read at once; chosen if not given.")
    ] = None,
    metrics: Annotated[
        str | None,
        option("--metrics", "NAMES", f"What to measure, with commas, or all. Otherwise {METRICS}."),
    ] = None,
    map_file: Annotated[
        Path | None,
        option(
            "--map",
            "FILE",
            "A .json or .toml file that says where the weights are, for a model in which they "
            "are not found: see the documentation of probes.",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    low_memory: Annotated[
        bool,
        typer.Option(
            "--low-memory",
            help="Measure the weights alone, one tensor at a time from their files: no model is "
            "built and no text read.",
        ),
    ] = False,
    jobs: Annotated[int, count("--jobs", "Checkpoints of a series at a time.")] = 1,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be measured and what it takes, and stop."),
    ] = False,
) -> None:
    """Measure a model on a text: attention entropy, stable ranks, overlaps, MLP activations.

    With --series, every checkpoint of a training: the series is checked first, bad steps are
    reported and marked in the figure (Fig. 7), and stopped work is resumed when --out is its
    folder. Exits with 1 when something is wrong with a series.
    """
    if low_memory:
        idle = (*_OF_TEXT, "device") if device == "cuda" else _OF_TEXT
        note_idle(context, idle, "with --low-memory, which reads weights alone, on the CPU")
    if not series:
        note_idle(context, _OF_SERIES, "without --series")
    with _naming_options():
        asked = ProbeRequest(
            model=model,
            revision=revision,
            text=text,
            probing=_probing(
                window=window,
                windows=windows,
                batch=batch,
                metrics=metrics,
                tokenizer=tokenizer,
                dtype=dtype,
                low_memory=low_memory,
                seed=seed,
                map_file=map_file,
            ),
            device=chosen_device(device),
            out=out,
            json=json,
        )
        if series:
            _series.measure(asked, series, schedule, jobs, dry_run)
        elif model is None:
            raise JomaError("say what to measure: joma probe MODEL, or joma probe --series SERIES")
        elif dry_run:
            check_folder(out, NAME)
            show_plan(asked, NAME, {"model": model}, estimate(asked, model, revision))
        else:
            _one(asked, model)


def _probing(*, metrics: str | None, map_file: Path | None, **settings: Any) -> "Probing":
    from joma.analysis.probing import Probing
    from joma.models import load_map
    from joma.probes.session import WEIGHT_METRICS

    names = None
    if metrics == "all":
        names = WEIGHT_METRICS if settings["low_memory"] else tuple(PROBED)
    elif metrics is not None:
        names = tuple(name.strip() for name in metrics.split(",") if name.strip())
    architecture = None if map_file is None else load_map(map_file)
    return Probing(metrics=names, architecture=architecture, **settings)


@contextlib.contextmanager
def _naming_options() -> Iterator[None]:
    """Name the option in errors of arguments that are options here."""
    try:
        yield
    except JomaError as error:
        first = str(error).split(" ", 1)[0]
        if first in _OPTIONS:
            raise JomaError(f"--{error}") from error
        raise


def _one(asked: ProbeRequest, model: str) -> None:
    """Measure one model in a run folder of its own."""
    from joma.analysis.probing import measure

    check_folder(asked.out, NAME, asked.config, restart=True)
    start = time.perf_counter()
    with working_in(asked.out) as folders, reports("probe") as report:
        # Before the run folder is there: most mistakes show here.
        probed = measure(
            model,
            asked.read_text(),
            asked.probing,
            revision=asked.revision,
            device=asked.device,
            progress=report,
        )
        report("write and draw", 1, 1)
        with begun(folders, NAME, asked.config, asked.out, device=asked.device) as (run, outcome):
            probed.log(run)
            _draw(run, probed, asked)
            outcome.update(finding=finding(probed), **probed.facts)
    if probed.note:
        _show.say(probed.note, err=True)
    if asked.json:
        _show.as_json([one.as_json() for one in probed.measurements])
        _show.say(f"Run folder: {run.path}", err=True)
        return
    _print(probed, asked, time.perf_counter() - start)
    for path in run.figures or [run.path]:
        _show.say(f"  {path}")


def _draw(run: Any, probed: "Probed", asked: ProbeRequest) -> None:
    from joma.report import figures
    from joma.report.probe import draw_probe

    records = [one.as_json() for one in probed.measurements]
    picture = draw_probe(records, probed.roles)
    if picture is not None:
        title = f"{Path(str(asked.model)).name}: attention and weights, layer by layer"
        caption = f"{_heading(probed, asked)} {_show.sentence(finding(probed))}"
        figures.save(run, NAME, picture, title=title, caption=caption)


def finding(probed: "Probed") -> str:
    """Return what was measured, in one sentence with its main numbers."""
    layers = [
        one for one in probed.measurements if one.metric == "attention_entropy" and one.head is None
    ]
    ranks = [
        one
        for one in probed.measurements
        if one.metric == "stable_rank" and probed.roles.get(one.module) == "mlp_lower"
    ]
    said = []
    for what, found in (
        ("attention entropy in nats", layers),
        ("stable rank of the MLPs' lower layers", ranks),
    ):
        if found:
            low, high = (f(found, key=lambda one: one.value) for f in (min, max))
            said.append(
                f"{what} from {low.value:.3g} (layer {low.layer}) to {high.value:.3g} "
                f"(layer {high.layer})"
            )
    return "; ".join(said) + "." if said else f"{len(probed.measurements)} numbers measured."


def _heading(probed: "Probed", asked: ProbeRequest) -> str:
    facts, words = probed.facts, []
    words.append(str(facts["architecture"]))
    if "parameters" in facts:
        words.append(f"{facts['parameters'] / 1e6:.3g}M parameters")
    if "bytes" in facts:
        words.append(f"{facts['bytes'] / 1e6:.3g} MB of weights")
    if probed.shape is not None:
        number, length = probed.shape
        plural = "" if number == 1 else "s"
        words.append(f"{number} window{plural} of {length} tokens of {asked.text}")
        if (special := facts.get("special_tokens", "none")) != "none":
            words.append(special)
    return ", ".join(words) + "."


def _print(probed: "Probed", asked: ProbeRequest, seconds: float) -> None:
    from rich.text import Text

    heading = printable(_heading(probed, asked))
    title = Text.assemble((printable(str(asked.model)), "bold"), f"  {heading}")
    _show.put(title, "")
    rows = by_layer(probed)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    of_weights = tuple(it.column for it in PROBED.values() if it.needs == "weights")
    ranks = [name for name in columns if name.startswith(of_weights)]
    for shown in ([name for name in columns if name not in ranks], ["layer", *ranks]):
        if len(shown) < 2:
            continue
        table = _show.table(*shown, justify="right")
        for row in rows:
            if any(name in row for name in shown[1:]):  # the attentions of a layer have no weights
                table.add_row(*(row.get(name, "") for name in shown))
        _show.put(table, "")
    for line in _of_model(probed):
        _show.say(line)
    _show.say(f"{_show.sentence(finding(probed))} {seconds:.1f} s.")


def by_layer(probed: "Probed") -> list[dict[str, str]]:
    """Return one row for each layer, or each attention where several share a layer, as shown.

    Where a row has several of a kind, such as experts, from the smallest number to the largest.
    """
    from joma.report.probe import attentions

    labels = attentions([one.as_json() for one in probed.measurements])
    rows: dict[tuple[int, str], dict[str, str]] = {}
    heads: dict[str, list[float]] = {}
    several: dict[tuple[int, str, str], list[float]] = {}
    for one in probed.measurements:
        if one.layer is None:
            continue
        label = labels.get(one.module, str(one.layer)) if one.kind else str(one.layer)
        row = rows.setdefault((one.layer, label), {"layer": label})
        if one.metric == "attention_entropy" and one.head is not None:
            few = heads.setdefault(one.module, [])
            few.append(one.value)
            row["of its heads"] = f"{min(few):.2f} … {max(few):.2f}"
        elif one.head is None:
            column = _column(one.metric, probed.roles.get(one.module))
            values = several.setdefault((one.layer, label, column), [])
            values.append(one.value)
            low, high = f"{min(values):#.4g}", f"{max(values):#.4g}"
            row[column] = low if low == high else f"{low} … {high}"
    return [rows[key] for key in sorted(rows, key=lambda key: key[0])]


def _column(metric: str, role: str | None) -> str:
    column = PROBED[metric].column
    of_weight = PROBED[metric].needs == "weights"
    return f"{column} {_ROLES.get(role or '', role)}" if of_weight else column


def _of_model(probed: "Probed") -> list[str]:
    """Return a line for each module that belongs to no layer."""
    words: dict[str, list[str]] = {}
    for one in probed.measurements:
        if one.layer is None:
            said = f"{one.metric.replace('_', ' ')} {one.value:.4g}"
            words.setdefault(one.module, []).append(said)
    return [f"{module}: {', '.join(found)}" for module, found in words.items()]
