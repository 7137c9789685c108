"""`joma superposition`."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._progress import reports
from joma.cli._run_folder import naming_options, working
from joma.common.json_files import plain
from joma.errors import JomaError

if TYPE_CHECKING:
    from torch import Tensor

    from joma.analysis.node_examples import FoundNode
    from joma.analysis.superposition import SearchResult
    from joma.models import Loaded
    from joma.runs import Run

_WINDOW = 64
_SHOWN = 3
"""Nodes that are printed, and contexts of each of their groups."""
_PER_GROUP = 4


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


@dataclass(frozen=True, kw_only=True)
class Superposition(cmd.ModelCommand):
    """Find MLP nodes that answer to unrelated contexts (Fig. 10), with two controls.

    A node's strongest contexts are grouped by what their query attends to; it scores high where
    two groups are tight and unrelated. Every score comes with those of contexts shuffled among
    nodes and of an untrained model: a model that does not beat them shows nothing, and the result
    says so.
    """

    summary = "Find MLP nodes that answer to unrelated contexts."
    example = "superposition EleutherAI/pythia-70m --text book.txt"

    text: str = cmd.text_option()
    window: int | None = cmd.count(f"Tokens of a window; {_WINDOW} if not given.")
    windows: int = cmd.count("Windows at most, evenly over the text.", 512)
    layers: Any = cmd.option("LAYERS", "Like 0,3-5; all if not given.", parser=_layers)
    nodes: int | None = cmd.count(
        "Nodes of each layer, drawn at random, at least 100; all if not given.", least=100
    )

    def run(self) -> None:
        """Search, or estimate what it takes."""
        start = time.perf_counter()
        record: dict[str, Any] = {}
        with working("superposition", self.settings, self.out) as begin:
            with reports("superposition") as report:
                report("loading the model", 0, 1)
                loaded, windows = self._load()
                if not self.dry_run:
                    with begin(cmd.chosen_device(self.device)) as (run, outcome):
                        record = self._search(loaded, windows, run, outcome, report)
            if self.dry_run:
                self.plan("superposition", self._takes(loaded, windows))
                return
        record["seconds"] = round(time.perf_counter() - start, 2)
        if self.json:
            _render.as_json(record)
        else:
            _print_record(record)

    def _load(self) -> "tuple[Loaded, Tensor]":
        """Return the model and the windows it will read, all checked."""
        from joma.analysis.node_contexts import spread
        from joma.analysis.superposition import check
        from joma.data.text import read_text
        from joma.data.text import windows as cut

        text = read_text(self.text)
        loaded = self.load()
        tokens = loaded.encode(text)
        if self.window is not None and self.window > len(tokens):
            raise JomaError(
                f"--window must be at most {len(tokens)}, as many tokens as the text has, got "
                f"{self.window}"
            )
        most = _WINDOW if loaded.context is None else min(_WINDOW, loaded.context)
        windows = spread(cut(tokens, self.window, most=most), self.windows)
        with naming_options():
            check(loaded, windows, layers=self.layers, nodes=self.nodes)
        return loaded, windows

    def _search(
        self, loaded: "Loaded", windows: "Tensor", run: "Run", outcome: dict[str, Any], report: Any
    ) -> dict[str, Any]:
        """Search, write tables and figures, and return the record of it."""
        from joma.analysis.node_examples import examples
        from joma.analysis.superposition import search

        found = search(
            loaded,
            windows,
            layers=self.layers,
            nodes=self.nodes,
            seed=self.seed,
            progress=report,
        )
        best = examples(found, loaded, windows, _SHOWN, seed=self.seed)
        _keep(run, found, best)
        record = plain(
            {
                "model": self.model,
                "text": self.text,
                "windows": len(windows),
                "window": windows.shape[1],
                "seed": self.seed,
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
        run.write_json("summary", record)
        agrees = found.beats_shuffled and found.beats_untrained
        outcome.update(agrees=agrees, finding=found.finding)
        return record

    def _takes(self, loaded: "Loaded", windows: "Tensor") -> dict[str, Any]:
        """Return what the search takes, estimated by reading one batch."""
        from joma.analysis.superposition import estimate

        seconds, memory = estimate(loaded, windows, layers=self.layers, nodes=self.nodes)
        return {
            "windows": len(windows),
            "window": windows.shape[1],
            "about_seconds": float(f"{seconds:.3g}"),
            "about_bytes": memory,
        }


def _keep(run: "Run", found: "SearchResult", best: "Sequence[FoundNode]") -> None:
    """Write the tables and the figures."""
    from joma.analysis.node_examples import tables
    from joma.report import figures, superposition

    for name, columns in tables(found, best).items():
        if columns and len(next(iter(columns.values()))):
            run.write_table(name, columns)
    figures.save(
        run,
        "scores",
        superposition.draw_scores(found.scores()),
        title="MLP nodes that answer to unrelated contexts",
        caption=f"Here: {found.finding}\nA node scores high where two groups of its strongest "
        "contexts attend to the same inside and to unrelated tokens across.",
    )
    for node in best[:1]:
        figures.save(
            run,
            "contexts",
            superposition.draw_contexts(node.as_json()),
            title=f"What node {node.node} of layer {node.layer} answers to",
            caption=f"{_render.sentence(_verdict(node.as_json()))}\nShaded: what the query, in the "
            "box, attends to, the first token of the window and itself aside. Bold: the fewest "
            "tokens that take half of that, five at most. In front: the node's activation.",
        )


def _print_record(record: Mapping[str, Any]) -> None:
    """Print the layers, the best nodes with their contexts, and the finding."""
    numbers = ("median", "99%", "shuffled 99%", "untrained 99%")
    shares = ("above shuffled", "above untrained")
    rows = [
        (
            str(row["layer"]),
            f"{row['nodes']:,}",
            *(_render.cell(row[name], ".2f") for name in numbers),
            *(_render.cell(row[name], ".1%") for name in shares),
        )
        for row in record["layers"]
    ]
    _render.put(_render.table(("layer", "nodes", *numbers, *shares), rows, left=0), "")
    for node in record["found"]:
        words = f"layer {node['layer']}, node {node['node']}: {_verdict(node)}"
        _render.paragraph(words, 0, style="bold")
        for letter, group in zip("ABCDEFGHIJKLMNOP", node["groups"], strict=False):
            words = f" attends to {', '.join(group['words'])}" if group["words"] else ""
            _render.paragraph(f"{letter}{words}", style="italic")
            for context in group["contexts"][:_PER_GROUP]:
                _render.paragraph(_line(context), 4)
        typer.echo()
    _render.paragraph(_render.sentence(record["finding"]), 0)
    for path in record["figures"]:
        typer.echo(f"  {path}")


def _line(context: Mapping[str, Any]) -> str:
    """Return a context as text, with «tokens attended to» and the [query]."""
    line = f"{context['activation']:.2f}  "
    for place, piece in enumerate(context["pieces"]):
        piece = piece.replace("\t", " ").replace("\n", "↵")
        word = piece.strip()
        start, end = "[]" if place == context["query"] else ("", "")
        if not start and context["attended"][place]:
            start, end = "«»"
        before, _, after = piece.partition(word) if word else (piece, "", "")
        line += f"{before}{start}{word}{end}{after}"
    return line.replace("» «", " ").replace("»«", "")  # neighbours in one pair of marks


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
