"""`joma probe`: one model, or a series of checkpoints."""

import math
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import _command as cmd
from joma.cli import _render, _series
from joma.cli._progress import reports, workers
from joma.cli._render import printable
from joma.cli._run_folder import check_folder, naming_options, working
from joma.errors import JomaError
from joma.probes.metrics import PROBED

if TYPE_CHECKING:
    from joma.analysis.probing import Probed, Probing
    from joma.runs import Run

METRICS = "; on request ".join(
    ", ".join(name for name, metric in PROBED.items() if metric.by_default == by_default)
    for by_default in (True, False)
)

_OF_TEXT = ("tokenizer", "text", "window", "windows", "dtype")
_MEASURING_SHARE = 1.3
"""What measuring takes of plain forward passes, at most."""


@dataclass(frozen=True, kw_only=True)
class Probe(cmd.ModelCommand):
    """Measure a model on a text: attention entropy, stable ranks, overlaps, MLP activations.

    With --series, every checkpoint of a training: the series is checked first, bad steps are
    reported and marked in the figure (Fig. 7), and stopped work is resumed when --out is its
    folder. Exits with 1 when something is wrong with a series.
    """

    summary = "Measure a model, or a series of its checkpoints."
    example = "probe EleutherAI/pythia-70m --revision step1000 --text book.txt"

    model: str = cmd.model_argument("")
    series: list[str] | None = cmd.option(
        "SERIES",
        "Measure a series of checkpoints instead: a folder of checkpoint folders, several "
        "such folders (give it several times), or HUBID@step0,step1000 (HUBID@pythia for "
        "Pythia's).",
    )
    text: str = cmd.text_option()
    window: int | None = cmd.count(
        "Tokens read together; 512, or what model or text have if less, if not given."
    )
    windows: int = cmd.count("How many windows, at most.", 20)
    metrics: str | None = cmd.option(
        "NAMES", f"What to measure, with commas, or all. Otherwise {METRICS}."
    )
    map_file: Path | None = cmd.option(
        "FILE",
        "A .json or .toml file that says where the weights are, for a model in which they "
        "are not found: see the documentation of probes.",
        name="--map",
    )
    dtype: str = cmd.dtype_option()
    low_memory: bool = cmd.flag(
        "Measure the weights alone, one tensor at a time from their files: no model is built "
        "and no text read."
    )
    jobs: int = cmd.count("Checkpoints of a series at a time.", 1)

    def run(self) -> None:
        """Measure a model, or every checkpoint of a series."""
        if self.low_memory:
            idle = (*_OF_TEXT, "device") if self.device == "cuda" else _OF_TEXT
            self.note_idle(idle, "with --low-memory, which reads weights alone, on the CPU")
        if self.series:
            self.note_idle(("revision",), "with --series")
        else:
            self.note_idle(("jobs",), "without --series")
        if not self.model and not self.series:
            raise JomaError("say what to measure: joma probe MODEL, or joma probe --series SERIES")
        if self.model and self.series:
            raise JomaError(
                "--series must stand without MODEL; revisions of a hub id are HUBID@step0,step1000"
            )
        with naming_options("window", "windows", "metrics", "tokenizer", "dtype"):
            if self.series:
                self._measure_series(self.series)
            elif self.dry_run:
                check_folder(self.out, "probe")
                self.plan("probe", self._takes(self.model, self.revision))
            else:
                self._measure_model()

    @cached_property
    def probing(self) -> "Probing":
        """What is measured, and how."""
        from joma.analysis.probing import Probing
        from joma.models import load_map
        from joma.probes.session import WEIGHT_METRICS

        names = None
        if self.metrics == "all":
            names = WEIGHT_METRICS if self.low_memory else tuple(PROBED)
        elif self.metrics is not None:
            names = tuple(name.strip() for name in self.metrics.split(",") if name.strip())
        return Probing(
            metrics=names,
            window=self.window,
            windows=self.windows,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            low_memory=self.low_memory,
            seed=self.seed,
            architecture=None if self.map_file is None else load_map(self.map_file),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the numbers of one model."""
        text = {"text": self.text} if self.probing.reads_text else {}
        return {"model": self.model, "revision": self.revision, **text, **self.probing.config}

    @cached_property
    def beginning(self) -> str:
        """The text, as much of it as is needed; empty where none is."""
        from joma.data.text import read_text

        return self.probing.beginning(read_text(self.text)) if self.probing.reads_text else ""

    def _measure_model(self) -> None:
        """Measure one model in a run folder of its own."""
        from joma.analysis.probing import measure

        device = cmd.chosen_device(self.device)
        with working("probe", self.settings, self.out) as begin, reports("probe") as report:
            # Before the run folder is there: most mistakes show here.
            probed = measure(
                self.model,
                self.beginning,
                self.probing,
                revision=self.revision,
                device=device,
                progress=report,
            )
            report("write and draw", 1, 1)
            records = [one.as_json() for one in probed.measurements]
            heading, finding = _heading(probed, self.text), _finding(probed)
            with begin(device) as (run, outcome):
                probed.log(run)
                self._draw(run, probed, f"{heading} {_render.sentence(finding)}")
                outcome.update(finding=finding, **probed.facts)
        if probed.note:
            _render.say(probed.note, err=True)
        if self.json:
            _render.as_json(records)
            _render.say(f"Run folder: {run.path}", err=True)
            return
        _print_model(self.model, heading, probed)
        _render.say(_render.sentence(finding))
        _render.say_files(run)

    def _draw(self, run: "Run", probed: "Probed", caption: str) -> None:
        from joma.report import figures
        from joma.report.probe import draw_probe

        picture = draw_probe([one.as_json() for one in probed.measurements], probed.roles)
        if picture is not None:
            title = f"{Path(self.model).name}: attention and weights, layer by layer"
            figures.save(run, "probe", picture, title=title, caption=caption)

    def _measure_series(self, names: list[str]) -> None:
        """Measure every checkpoint of a series; resume what is in --out."""
        from joma.analysis import series as work

        series = _series.named(names)
        config = work.config_of(series, self.beginning, self.probing)
        if self.dry_run:
            check_folder(self.out, work.NAME, config)
            self._plan_series(series)
            return
        device = cmd.chosen_device(self.device)
        with (
            working(work.NAME, config, self.out, resume=True) as begin,
            begin(device) as (run, outcome),
        ):
            with reports("probe") as report, workers(self.jobs) as submit:
                ended = work.probe_series(
                    run,
                    series,
                    self.beginning,
                    self.probing,
                    device=device,
                    submit=submit,
                    progress=report,
                )
            found = _series.summary(ended.integrity, len(series.steps))
            outcome.update(finding=" ".join([found, *ended.sentences]), sound=ended.sound)
        for note in ended.notes:
            _render.say(note, err=True)
        if self.json:
            _render.as_json(
                {
                    "series": series.name,
                    "integrity": ended.integrity.as_json(),
                    "done": ended.done,
                    "failed": dict(sorted(ended.failed.items())),
                    "table": ended.table,
                    "sentences": ended.sentences,
                    "run": run.path,
                    "figures": run.figures,
                }
            )
        else:
            said = (it.sentence for it in ended.integrity.findings)
            for words in dict.fromkeys([*said, *ended.failed.values()]):
                _render.say(_render.sentence(words))
            if ended.table:
                rows = [tuple(row.values()) for row in ended.table]
                _render.put("", _render.table(tuple(ended.table[0]), rows, left=0), "")
            for words in (*ended.sentences, f"{found} {len(ended.done)} measured."):
                _render.say(words)
            _render.say_files(run)
        if not ended.sound:
            raise typer.Exit(1)

    def _plan_series(self, series: Any) -> None:
        from joma.analysis import series as work

        finished = [step for step in series.steps if self.out and work.is_done(self.out, step)]
        left = [it for it in series.checkpoints if it.step not in finished]
        takes = self._takes(left[0].source, left[0].revision) if left else {"about_seconds": None}
        if takes["about_seconds"] is not None:
            takes["about_seconds"] *= len(left) / self.jobs
        what = {"series": series.name, "steps": list(series.steps), "done": finished}
        self.plan(work.NAME, takes, {**what, "jobs": self.jobs})

    def _takes(self, source: str, revision: str | None) -> dict[str, Any]:
        """Return about how long one model takes and what memory, from the sizes of its files alone.

        Raises:
            JomaError: The model cannot be measured.
        """
        from joma.analysis.probing import check
        from joma.models.loading import check_source
        from joma.probes.text import WINDOW

        probing = self.probing
        if not self.low_memory:
            check_source(
                source,
                revision=revision,
                tokenizer=self.tokenizer,
                reads_text=probing.reads_text,
            )
        check(source, self.beginning, probing, revision=revision)
        found = {"metrics": list(probing.chosen)}
        sizes = file_sizes(source)
        if sizes is None:
            return {**found, "about_seconds": None, "about_bytes": None, "tokens": None}
        parameters, largest = sizes
        tokens = self.windows * (self.window or WINDOW) if probing.reads_text else 0
        work = 2.0 * parameters * tokens * _MEASURING_SHARE + 500.0 * parameters
        size = 4 if self.dtype == "float32" else 2
        return {
            **found,
            "about_seconds": work / device_speed(cmd.chosen_device(self.device)) + 5,
            "about_bytes": 2 * largest if self.low_memory else 2 * parameters * size,
            "tokens": tokens,
        }


def file_sizes(source: str) -> tuple[int, int] | None:
    """Return about how many parameters there are and the bytes of the largest tensor, if here."""
    from joma.models.weight_files import WeightFiles

    path = Path(source)
    if path.is_dir() or path.suffix == ".safetensors":
        tensors = WeightFiles(source).tensors.values()
        return sum(math.prod(it.shape) for it in tensors), max(it.bytes for it in tensors)
    if path.is_file():
        bits = 5 if path.suffix == ".gguf" else 32
        return path.stat().st_size * 8 // bits, path.stat().st_size
    return None


def device_speed(device: str) -> float:
    """Return operations a second of this device, measured."""
    import torch

    size, best = 1024, math.inf
    matrix = torch.randn(size, size, device=device, generator=torch.Generator(device))
    for _ in range(3):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _finding(probed: "Probed") -> str:
    """Return what was measured, in one sentence with its main numbers."""
    entropies, ranks = [], []
    for one in probed.measurements:
        if one.metric == "attention_entropy" and one.head is None:
            entropies.append(one)
        elif one.metric == "stable_rank" and probed.roles.get(one.module) == "mlp_lower":
            ranks.append(one)
    said = []
    for what, found in (
        ("attention entropy in nats", entropies),
        ("stable rank of the MLPs' lower layers", ranks),
    ):
        if found:
            low, high = (choose(found, key=lambda one: one.value) for choose in (min, max))
            said.append(
                f"{what} from {low.value:.3g} (layer {low.layer}) to {high.value:.3g} "
                f"(layer {high.layer})"
            )
    return ("; ".join(said) or f"{len(probed.measurements)} numbers measured") + "."


def _heading(probed: "Probed", text: str) -> str:
    known = probed.facts
    words = [str(known["architecture"])]
    if "parameters" in known:
        words.append(f"{known['parameters'] / 1e6:.3g}M parameters")
    if "bytes" in known:
        words.append(f"{known['bytes'] / 1e6:.3g} MB of weights")
    if probed.shape is not None:
        number, length = probed.shape
        words.append(f"{number} window{'s' * (number > 1)} of {length} tokens of {text}")
        if (special := known.get("special_tokens", "none")) != "none":
            words.append(special)
    return ", ".join(words) + "."


def _print_model(model: str, heading: str, probed: "Probed") -> None:
    """Print what was measured of each layer, ranks in a table of their own, and of the model."""
    from rich.text import Text

    _render.put(Text.assemble((printable(model), "bold"), f"  {printable(heading)}"), "")
    rows = _by_layer(probed)
    columns = dict.fromkeys(name for row in rows for name in row)
    of_weights = tuple(it.column for it in PROBED.values() if it.needs == "weights")
    ranks = [name for name in columns if name.startswith(of_weights)]
    for shown in ([name for name in columns if name not in ranks], ["layer", *ranks]):
        # The attentions of a layer have no weights.
        own = [row for row in rows if any(name in row for name in shown[1:])]
        if own:
            cells = [[row.get(name, "") for name in shown] for row in own]
            _render.put(_render.table(shown, cells, left=0), "")
    modules: dict[str, list[str]] = {}
    for one in probed.measurements:
        if one.layer is None:
            said = f"{one.metric.replace('_', ' ')} {one.value:.4g}"
            modules.setdefault(one.module, []).append(said)
    for module, words in modules.items():
        _render.say(f"{module}: {', '.join(words)}")


def _by_layer(probed: "Probed") -> list[dict[str, str]]:
    """Return one row for each layer, or each attention where several share a layer, as shown.

    Where a row has several of a kind, such as experts, from the smallest number to the largest.
    """
    from joma.report.probe import attentions

    labels = attentions([one.as_json() for one in probed.measurements])
    values: dict[tuple[int, str], dict[str, list[float]]] = {}
    for one in probed.measurements:
        if one.layer is None:
            continue
        label = labels.get(one.module, str(one.layer)) if one.kind else str(one.layer)
        row = values.setdefault((one.layer, label), {})
        if one.head is None:
            column = PROBED[one.metric].column
            if PROBED[one.metric].needs == "weights":
                role = probed.roles.get(one.module) or ""
                column = f"{column} {role.replace('_', ' ').replace('mlp', 'MLP')}"
            row.setdefault(column, []).append(one.value)
        elif one.metric == "attention_entropy":
            row.setdefault("of its heads", []).append(one.value)
    return [
        {"layer": label, **{name: _range(name, found) for name, found in row.items()}}
        for (_, label), row in sorted(values.items(), key=lambda item: item[0][0])
    ]


def _range(column: str, values: list[float]) -> str:
    form = ".2f" if column == "of its heads" else "#.4g"
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} … {high}"
