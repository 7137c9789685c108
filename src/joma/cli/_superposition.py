"""`joma superposition`."""

import contextlib
import dataclasses
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _show
from joma.cli._folders import begun, check_folder, working_in
from joma.cli._options import (
    Device,
    Json,
    Model,
    Out,
    Seed,
    Text,
    Tokenizer,
    chosen_device,
    count,
    option,
)
from joma.cli._progress import Report, reports
from joma.common.json_files import plain
from joma.common.text import duration
from joma.errors import JomaError

if TYPE_CHECKING:
    from rich.text import Text as RichText
    from torch import Tensor

    from joma.analysis.superposition import FoundNode, SearchResult
    from joma.models import Loaded
    from joma.runs import Run

NAME = "superposition"
WINDOW = 64
WINDOWS = 512
TITLE = "MLP nodes that answer to unrelated contexts"
_PER_GROUP = 4
"""Contexts of a group that are printed."""


def _layers(given: str) -> tuple[int, ...]:
    """Return layers 0, 3, 4 and 5 for "0,3-5"."""
    chosen: list[int] = []
    for part in given.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise typer.BadParameter(f"it must be numbers like 0,3-5, not {given!r}.")
        first, last = int(match[1]), int(match[2] or match[1])
        chosen += range(first, min(last, first + 10_000) + 1)
    return tuple(chosen)


def superposition(
    model: Annotated[str, Model],
    revision: Annotated[
        str | None, option("--revision", "REV", "Branch, tag or commit of a hub id.")
    ] = None,
    tokenizer: Tokenizer = None,
    text: Text = "embedded",
    window: Annotated[
        int | None, count("--window", f"Tokens of a window; {WINDOW} if not given.")
    ] = None,
    windows: Annotated[int, count("--windows", "Windows at most, evenly over the text.")] = WINDOWS,
    layers: Annotated[
        Any, option("--layers", "LAYERS", "Like 0,3-5; all if not given.", parser=_layers)
    ] = None,
    nodes: Annotated[
        int | None,
        count(
            "--nodes", "Nodes of each layer, drawn at random, at least 100; all if not given.", 100
        ),
    ] = None,
    show: Annotated[int, count("--show", "Nodes to print with their contexts.", 0)] = 3,
    device: Device = "auto",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Load the model, say what the search takes, and stop."),
    ] = False,
) -> None:
    """Find MLP nodes that answer to unrelated contexts (Fig. 10), with two controls.

    A node's strongest contexts are grouped by what their query attends to; it scores high where
    two groups are tight and unrelated. Every score comes with those of contexts shuffled among
    nodes and of an untrained model: a model that does not beat them shows nothing, and the result
    says so.
    """
    asked = _Asked(model, revision, tokenizer, text, window, windows, layers, nodes, seed)
    start = time.perf_counter()
    check_folder(out, NAME, dataclasses.asdict(asked), restart=True)
    with working_in(out) as folders, _enough_memory():
        with reports(NAME) as report:
            report("loading the model", 0, 1)
            loaded, read = _load(asked, chosen_device(device))
            record = {} if dry_run else _make(asked, loaded, read, show, out, folders, report)
        if dry_run:
            _plan(asked, loaded, read, out, json)
            return
    record["seconds"] = round(time.perf_counter() - start, 2)
    if json:
        _show.as_json(record)
    else:
        _print(record)


@dataclass(frozen=True)
class _Asked:
    """The options that decide the numbers."""

    model: str
    revision: str | None
    tokenizer: str | None
    text: str
    window: int | None
    windows: int
    layers: tuple[int, ...] | None
    nodes: int | None
    seed: int


def _load(asked: _Asked, device: str) -> "tuple[Loaded, Tensor]":
    """Return the model and the windows it will read, all checked."""
    from joma.analysis.superposition import check, spread
    from joma.data.text import read_text
    from joma.data.text import windows as cut
    from joma.models import load

    text = read_text(asked.text)
    loaded = load(asked.model, revision=asked.revision, tokenizer=asked.tokenizer, device=device)
    tokens = loaded.encode(text)
    if asked.window is not None and asked.window > len(tokens):
        raise JomaError(
            f"--window must be at most {len(tokens)}, as many tokens as the text has, got "
            f"{asked.window}"
        )
    most = WINDOW if loaded.context is None else min(WINDOW, loaded.context)
    read = spread(cut(tokens, asked.window, most=most), asked.windows)
    try:
        check(loaded, read, layers=asked.layers, nodes=asked.nodes)
    except JomaError as error:
        raise JomaError(f"--{error}") from error  # begins with the name of what was given
    return loaded, read


def _make(
    asked: _Asked,
    loaded: "Loaded",
    read: "Tensor",
    show: int,
    out: Path | None,
    folders: list[Path],
    report: Report,
) -> dict[str, Any]:
    """Search in a run folder, which is added to `folders`, and return the record of it."""
    from joma.analysis.superposition import examples, search

    config, device = dataclasses.asdict(asked), _device_of(loaded)
    with begun(folders, NAME, config, out, device=device) as (run, outcome):
        found = search(
            loaded,
            read,
            layers=asked.layers,
            nodes=asked.nodes,
            seed=asked.seed,
            progress=report,
        )
        best = examples(found, loaded, read, max(show, 1), seed=asked.seed)
        _keep(run, found, best)
        record = _record(asked, found, best[:show], read, run)
        run.write_json("summary", record)
        agrees = found.beats_shuffled and found.beats_untrained
        outcome.update(agrees=agrees, finding=found.finding)
    return record


def _keep(run: "Run", found: "SearchResult", best: "Sequence[FoundNode]") -> None:
    """Write the tables and the figures."""
    from joma.analysis.superposition import tables
    from joma.report import figures
    from joma.report import superposition as pictures

    for name, columns in tables(found, best).items():
        if columns and len(next(iter(columns.values()))):
            run.write_table(name, columns)
    figures.save(
        run,
        "scores",
        pictures.draw_scores(found.scores()),
        title=TITLE,
        caption=f"Here: {found.finding}\nA node scores high where two groups of its strongest "
        "contexts attend to the same inside and to unrelated tokens across.",
    )
    for node in best[:1]:
        figures.save(
            run,
            "contexts",
            pictures.draw_contexts(node.as_json()),
            title=f"What node {node.node} of layer {node.layer} answers to",
            caption=f"{_show.sentence(_verdict(node.as_json()))}\nShaded: what the query, in the "
            "box, attends to, the first token of the window and itself aside. Bold: the fewest "
            "tokens that take half of that, five at most. In front: the node's activation.",
        )


def _record(
    asked: _Asked, found: "SearchResult", best: "Sequence[FoundNode]", read: "Tensor", run: "Run"
) -> dict[str, Any]:
    return plain(
        {
            "model": asked.model,
            "text": asked.text,
            "windows": len(read),
            "window": read.shape[1],
            "seed": asked.seed,
            "nodes": found.nodes,
            "finding": found.finding,
            "above_shuffled": found.share_above_shuffled,
            "above_untrained": found.share_above_untrained,
            "untrained_above_its_shuffled": found.untrained_share,
            "beats_shuffled": found.beats_shuffled,
            "beats_untrained": found.beats_untrained,
            "layers": found.table(),
            "found": [node.as_json() for node in best],
            "run": run.path,
            "figures": run.figures,
            "tables": run.tables,
        }
    )


def _plan(asked: _Asked, loaded: "Loaded", read: "Tensor", out: Path | None, json: bool) -> None:
    """Print what the search takes, estimated by reading one batch."""
    from joma.analysis.superposition import estimate
    from joma.runs import default_folder

    seconds, memory = estimate(loaded, read, layers=asked.layers, nodes=asked.nodes)
    plan = {
        "model": asked.model,
        "run": str(out or default_folder(NAME)),
        "device": _device_of(loaded),
        "windows": len(read),
        "window": read.shape[1],
        "about_seconds": float(f"{seconds:.3g}"),
        "about_bytes": memory,
    }
    if json:
        _show.as_json(plan)
        return
    typer.echo(f"{NAME}: {asked.model} → {plan['run']}")
    typer.echo(
        f"  {len(read)} windows of {read.shape[1]} tokens on {plan['device']}: about "
        f"{duration(seconds)}, memory about {memory / 1e9:.1f} GB"
    )


def _device_of(loaded: "Loaded") -> str:
    return next(loaded.model.parameters()).device.type


@contextlib.contextmanager
def _enough_memory() -> Iterator[None]:
    """Raise JomaError where the GPU has too little memory."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        raise JomaError(
            "the GPU has too little memory free for this model; --device cpu needs none of it"
        ) from error


def _print(record: Mapping[str, Any]) -> None:
    """Print the layers, the best nodes with their contexts, and the finding."""
    from rich.padding import Padding
    from rich.text import Text

    _print_layers(record["layers"])
    terminal = _show.console().is_terminal
    for node in record["found"]:
        _show.put(Text(f"layer {node['layer']}, node {node['node']}", style="bold"))
        _show.put(Padding(Text(_show.printable(_verdict(node))), (0, 0, 0, 2)))
        for number, group in enumerate(node["groups"]):
            words = _show.printable(", ".join(group["words"]))
            heading = f"{chr(ord('A') + number)} attends to {words}" if words else chr(65 + number)
            _show.put(Padding(Text(heading, style="italic"), (0, 0, 0, 2)))
            for context in group["contexts"][:_PER_GROUP]:
                _show.put(Padding(line(context, terminal), (0, 0, 0, 4)))
        typer.echo()
    _show.put(Padding(Text(_show.printable(_show.sentence(record["finding"]))), (0, 0, 0, 0)))
    for path in record["figures"]:
        typer.echo(f"  {path}")


def line(context: Mapping[str, Any], terminal: bool) -> "RichText":
    """Return a context: attended tokens bold and the query underlined, or «these» and [this]."""
    from rich.text import Text

    line = Text(f"{context['activation']:.2f}  ", style="dim")
    roles = [
        "query" if place == context["query"] else "attended" if attended else ""
        for place, attended in enumerate(context["attended"])
    ]
    parts = zip(roles, context["pieces"], strict=True)
    for role, together in itertools.groupby(parts, key=lambda part: part[0]):
        piece = "".join(piece for _, piece in together).replace("\t", " ")
        piece = piece.replace("\n", _sign("↵", " / "))
        shown = _show.printable("".join(sign for sign in piece if sign.isprintable()))
        before, mark, after = _marks(role, terminal)
        word = shown.strip() or shown
        start, _, rest = shown.partition(word) if word else ("", "", "")
        line.append(start).append(f"{before}{word}{after}", style=mark).append(rest)
    return line


def _marks(role: str, terminal: bool) -> tuple[str, str, str]:
    """Return what is written before a word, its style, and what is written after it."""
    if role == "query":
        return ("", "not dim bold underline", "") if terminal else ("[", "", "]")
    if role == "attended":
        marks = _sign("«", ">"), "", _sign("»", "<")
        return ("", "not dim bold", "") if terminal else marks
    return "", "not dim", ""


def _sign(sign: str, otherwise: str) -> str:
    """Return a character, or another text where the output does not have it."""
    return sign if _show.printable(sign) == sign else otherwise


def _verdict(node: Mapping[str, Any]) -> str:
    """Return a sentence with a node's score and how often its controls score as high."""
    shuffled, untrained, own = (
        f"{100 * node[name]:.2g}%" for name in ("p_shuffled", "p_untrained", "p_own")
    )
    return (
        f"score {node['score']:.2f}, {node['inside']:.2f} inside its groups and "
        f"{node['across']:.2f} across; as high score {shuffled} of this layer's "
        f"shuffled contexts, {untrained} of an untrained model's nodes, and "
        f"{own} of random contexts with this node's query tokens."
    )


def _print_layers(rows: Sequence[Mapping[str, Any]]) -> None:
    names = ("layer", "nodes", "median", "99%", "shuffled 99%", "untrained 99%")
    shares = ("above shuffled", "above untrained")
    table = _show.table(*names, *shares, justify="right")
    for row in rows:
        table.add_row(
            str(row["layer"]),
            f"{row['nodes']:,}",
            *(_show.cell(row[name], ".2f") for name in names[2:]),
            *(_show.cell(row[name], ".1%") for name in shares),
        )
    _show.put(table, "")
