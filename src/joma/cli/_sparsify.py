"""`joma sparsify`: fit predictors of neurons and heads, and show what a file of them holds."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma.cli import _render
from joma.cli._command import (
    Command,
    ModelCommand,
    add_command,
    argument,
    command_group,
    count,
    dtype_option,
    json_flag,
    option,
    positive,
    share,
)
from joma.cli._progress import reports
from joma.cli._run_folder import naming_options, working
from joma.errors import JomaError

if TYPE_CHECKING:
    from torch import Tensor

    from joma.inference.sparsify import FitSettings
    from joma.models import Loaded

FILE = "predictors.safetensors"
_HELD_OUT_SHARE = 0.2
_CHARACTERS = 12
"""Characters of text that are read for one token; most tokens have fewer."""

app = command_group(
    "Leave out neurons that do not matter (Deja Vu).",
    "sparsify fit EleutherAI/pythia-70m --corpus wikitext-2",
)


@dataclass(frozen=True, kw_only=True)
class FitPredictors(ModelCommand):
    """Fit predictors of the MLP neurons (and heads) that matter for a token, a layer ahead.

    They are trained from the model's own activations on one text and judged on another: how many
    of the neurons that mattered they find, and what the perplexity costs, next to the oracle, a
    threshold, a fixed set of neurons and random ones. The run folder holds predictors.safetensors,
    which fit no other --dtype.
    """

    corpus: str = option(
        "TEXT",
        "What the predictors are fitted on: embedded or wikitext-2 (their training part), a "
        "folder with train.txt, a file, or - for standard input.",
        "embedded",
    )
    held_out: str | None = option(
        "TEXT",
        "What they are judged on; otherwise the corpus's test part, or the last fifth of a file.",
    )
    mlp_sparsity: float = option("SHARE", "Share of the neurons left out.", 0.5, parser=share)
    heads_sparsity: float | None = option(
        "SHARE", "Share of the attention heads left out; none if not given.", parser=share
    )
    rank_ratio: float = option(
        "RATIO", "Rank of the predictors divided by the width of the model.", 0.125, parser=positive
    )
    tokens: int = count("Tokens to fit on, at most.", 16384, least=64)
    held_out_tokens: int = count("Tokens to judge on, at most.", 4096, least=4)
    window: int = count("Tokens read together.", 256, least=2)
    epochs: int = count("How often a predictor is shown the text.", 6)
    dtype: str = dtype_option()

    def run(self) -> None:
        """Fit, save and judge."""
        start = time.perf_counter()
        fit_settings = self._fit_settings()
        with working("sparsify", self.settings, self.out) as begin, reports("sparsify") as report:
            report("loading the model", 0, 1)
            loaded, fitting, judging = self._load()
            device = next(loaded.model.parameters()).device.type
            record: dict[str, Any] = {}
            if not self.dry_run:
                with begin(device) as (run, outcome):
                    path = run.path / FILE
                    record = self._make(loaded, fit_settings, fitting, judging, path, report)
                    run.write_table("layers", _columns(record["layers"]))
                    run.write_table("perplexity", _columns(record["perplexity"]))
                    seconds = round(time.perf_counter() - start, 2)
                    record |= {"run": str(run.path), "seconds": seconds}
                    run.write_json("summary", record)
                    outcome.update(finding=record["finding"])
        if self.dry_run:
            self._plan(loaded, fitting, judging)
        elif self.json:
            _render.as_json(record)
        else:
            _print_record(record)

    def _fit_settings(self) -> "FitSettings":
        from joma.inference.sparsify import FitSettings

        names = ("mlp_sparsity", "heads_sparsity", "rank_ratio", "epochs", "seed")
        with naming_options():
            return FitSettings(**{name: getattr(self, name) for name in names})

    def _load(self) -> "tuple[Loaded, Tensor, Tensor]":
        """Return the model, the windows to fit on and those to judge on."""
        from joma.data.text import windows
        from joma.inference.sparsify import sparse_layers

        texts = self._texts()
        loaded = self.load(self.dtype)
        sparse_layers(loaded.model)  # refuses what cannot be made sparse before anything is read
        if not hasattr(loaded.model, "lm_head") and loaded.model.get_output_embeddings() is None:  # type: ignore[operator]
            raise JomaError(
                f"{self.model} has no head that predicts tokens: its loss is not defined"
            )
        special = loaded.special_tokens
        length = self.window if loaded.context is None else min(self.window, loaded.context)
        own = length - special.count
        if own < 2:
            raise JomaError(f"--window must be at least {special.count + 2}, got {self.window}")
        found = []
        for what, (text, most) in texts.items():
            tokens = loaded.encode(text[: _CHARACTERS * most], special=False)
            if len(tokens) < 2 * own:
                raise JomaError(
                    f"{what} must have at least two windows of {own} tokens, got {len(tokens)} "
                    "tokens"
                )
            # Each begins as the model's texts do: Gemma is lost without its <bos>.
            found.append(special.around_each(windows(tokens, own, max(2, most // length))))
        return loaded, found[0], found[1]

    def _texts(self) -> dict[str, tuple[str, int]]:
        """Return the text to fit on and the one to judge on, and how many tokens are read of each.

        No part of the one is in the other.
        """
        from joma.data.text import read_text

        in_parts = _has_parts(self.corpus)
        if self.held_out is not None:
            if self.held_out == self.corpus:
                raise JomaError(
                    f"--held-out must be another text than --corpus, got {self.corpus!r} for both"
                )
            fitting = read_text(f"{self.corpus}:train" if in_parts else self.corpus)
            judging = read_text(self.held_out)
        elif in_parts:
            fitting, judging = (read_text(f"{self.corpus}:{part}") for part in ("train", "test"))
        else:
            text = read_text(self.corpus)
            cut = int((1 - _HELD_OUT_SHARE) * len(text))
            fitting, judging = text[:cut], text[cut:]
        return {
            "--corpus": (fitting, self.tokens),
            "the held-out text": (judging, self.held_out_tokens),
        }

    def _make(
        self,
        loaded: "Loaded",
        fit_settings: "FitSettings",
        fitting: "Tensor",
        judging: "Tensor",
        path: Path,
        report: Any,
    ) -> dict[str, Any]:
        """Fit, save and judge; return the record."""
        from joma.inference import sparsify

        sparsify.fit(
            loaded.model,
            fitting,
            fit_settings,
            source=self.model,
            corpus=self.corpus,
            progress=report,
        ).save(path)
        # What is judged is what the file holds.
        predictors = sparsify.load_predictors(path, next(loaded.model.parameters()).device)
        layers = sparsify.layer_quality(loaded.model, predictors, judging, progress=report)
        costs = sparsify.perplexity_cost(
            loaded.model,
            predictors,
            judging,
            mlp=self.mlp_sparsity,
            heads=self.heads_sparsity,
            seed=self.seed,
            progress=report,
        )
        facts = predictors.facts
        names = ("mlp_sparsity", "heads_sparsity", "rank_ratio", "tokens", "corpus", "dtype",
                 "gated")  # fmt: skip
        record = {
            "model": self.model,
            "file": str(path),
            **{name: getattr(facts, name) for name in names},
            "rank": facts.rank,
            "predictor_bytes": predictors.nbytes,
            "window": judging.shape[1],
            "held_out_tokens": judging.numel(),
            "layers": [asdict(one) for one in layers],
            "perplexity": [asdict(one) for one in costs],
        }
        return {**record, "finding": _finding(record)}

    def _plan(self, loaded: "Loaded", fitting: "Tensor", judging: "Tensor") -> None:
        """Print what the fit takes."""
        from joma.inference.sparsify import rank_of, sparse_layers
        from joma.runs import default_folder

        layers = sparse_layers(loaded.model)
        width, neurons = layers[0].width, layers[0].neurons
        rank = rank_of(self.rank_ratio, width)
        parameters = sum((rank + 1) * (it.width + it.neurons) for it in layers)
        needed = 2 * fitting.numel() * sum(2 * it.width + it.neurons for it in layers)
        record = {
            "model": self.model,
            "run": str(self.out or default_folder("sparsify")),
            "device": next(loaded.model.parameters()).device.type,
            "layers": len(layers),
            "width": width,
            "neurons": neurons,
            "rank": rank,
            "predictor_parameters": parameters,
            "tokens": fitting.numel(),
            "held_out_tokens": judging.numel(),
            "about_bytes": min(needed, 2**31),
        }
        _render.plan(record, json=self.json)


@dataclass(frozen=True, kw_only=True)
class ShowPredictors(Command):
    """Show of which model predictors are, and how they were fitted."""

    file: Path = argument("FILE", f"A {FILE}, or its run folder.")
    json: bool = json_flag()

    def run(self) -> None:
        """Print the facts of the file."""
        from joma.inference.sparsify import load_predictors

        path = self.file / FILE if self.file.is_dir() else self.file
        predictors = load_predictors(path)
        record = {"file": str(path), **asdict(predictors.facts), "rank": predictors.facts.rank}
        record["predictor_bytes"] = predictors.nbytes
        if self.json:
            _render.as_json(record)
            return
        sizes = record["neurons"]
        record["neurons"] = sizes[0] if len(set(sizes)) == 1 else ", ".join(map(str, sizes))
        rows = [(name.replace("_", " "), value) for name, value in record.items()]
        _render.put(_render.table(("", ""), rows, left=2))


add_command(
    app,
    FitPredictors,
    "Fit predictors of the neurons that matter, and judge them.",
    "sparsify fit EleutherAI/pythia-70m --corpus wikitext-2",
    name="fit",
)
add_command(
    app,
    ShowPredictors,
    "Show what a file of predictors holds.",
    f"sparsify show runs/sparsify/{FILE}",
    name="show",
)


def _has_parts(corpus: str) -> bool:
    from joma.data.corpora import NAMED

    if corpus == "-" or Path(corpus).is_file():
        return False
    known = corpus == "embedded" or corpus in NAMED or corpus.startswith("hub:")
    return (known and ":" not in corpus.removeprefix("hub:")) or Path(corpus).is_dir()


def _finding(record: Mapping[str, Any]) -> str:
    """Return in one sentence what the predictors cost, and whether they beat a fixed set."""
    costs = {one["selection"]: one for one in record["perplexity"]}
    dense, own = costs["dense"], costs["predicted"]
    left = f"{record['mlp_sparsity']:.0%} of the neurons"
    if record["heads_sparsity"] is not None:
        left += f" and {record['heads_sparsity']:.0%} of the heads"
    cost, error = own["cost"], own["standard_error"]
    measured = (
        f"({_nats(cost)} ± {error:.3f} nats a token, standard error over {len(own['losses'])} "
        f"windows; the oracle's choice costs {_nats(costs['oracle']['cost'])})"
    )
    if abs(cost) <= 2 * error:
        does = f"changes the loss on held-out text by less than two standard errors {measured}"
    else:
        does = (
            f"{'raises' if cost > 0 else 'lowers'} perplexity on held-out text from "
            f"{dense['perplexity']:.4g} to {own['perplexity']:.4g} {measured}"
        )
    said = f"leaving out {left}, predicted a layer ahead, {does}."
    if "static" not in costs:
        return said
    static = costs["static"]
    gaps = [a - b for a, b in zip(static["losses"], own["losses"], strict=True)]
    better, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    if better > 2 * error:
        return f"{said} A fixed set of neurons costs more, {_nats(static['cost'])}."
    verdict = "more than" if better < -2 * error else "as much, within two standard errors, as"
    return f"{said} That is {verdict} a fixed set of neurons costs, {_nats(static['cost'])}."


def _nats(cost: float) -> str:
    return f"{round(cost, 3) + 0.0:.3f}"  # no minus sign before zero


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns; a column that holds several numbers becomes several."""
    from joma.inference.sparsify import TOP

    found: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            if name == "top_energy":
                for top, energy in zip(TOP, value, strict=True):
                    found.setdefault(f"top_{100 * top:.0f}_energy", []).append(energy)
            elif name != "losses":
                found.setdefault(name, []).append(value)
    return {name: values for name, values in found.items() if None not in values}


def _print_record(record: Mapping[str, Any]) -> None:
    """Print the layers, the perplexities and the finding."""
    chosen = {
        "recall": "recall",
        "recall, fixed set": "static_recall",
        "energy kept": "energy",
        "by the oracle": "oracle_energy",
        "by the fixed set": "static_energy",
    }
    if record["heads_sparsity"] is not None:
        chosen["heads' recall"] = "heads_recall"
    energies = {f"energy in top {top}%": f"top_{top}_energy" for top in (10, 25, 50)}
    shares = _columns(record["layers"])
    for columns in (chosen, {**energies, "neurons for 99%": "for_99", "exactly zero": "zero"}):
        known = [shares.get(name, [None] * len(record["layers"])) for name in columns.values()]
        rows = [
            (str(layer), *(_render.cell(value, ".1%") for value in values))
            for layer, *values in zip(shares["layer"], *known, strict=True)
        ]
        _render.put(_render.table(("layer", *columns), rows, left=0), "")
    rows = []
    for one in record["perplexity"]:
        cost = ("", "")
        if one["selection"] != "dense":
            cost = (f"{round(one['cost'], 4) + 0.0:.4f}", f"{one['standard_error']:.4f}")
        perplexity = f"{one['perplexity']:#.4g}"
        rows.append(
            (one["selection"], f"{one['kept']:.1%}", perplexity, f"{one['loss']:.4f}", *cost)
        )
    headings = ("neurons", "kept", "perplexity", "loss", "cost in nats", "± s.e.")
    _render.put(_render.table(headings, rows), "")
    _render.say(f"{_render.sentence(record['finding'])} {record['seconds']:.0f} s.")
    _render.say(f"  {record['file']}")
