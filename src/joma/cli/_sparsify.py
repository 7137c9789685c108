"""`joma sparsify`: fit predictors of neurons and heads, and show what a file of them holds."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma.cli import _command as cmd
from joma.cli import _render
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


@dataclass(frozen=True, kw_only=True)
class FitPredictors(cmd.ModelCommand):
    """Fit predictors of the MLP neurons (and heads) that matter for a token, a layer ahead.

    They are trained from the model's own activations on one text and judged on another: how many
    of the neurons that mattered they find, and what the perplexity costs, next to the oracle, a
    threshold, a fixed set of neurons and random ones. The run folder holds predictors.safetensors,
    which fit no other --dtype.
    """

    summary = "Fit predictors of the neurons that matter, and judge them."
    example = "sparsify fit EleutherAI/pythia-70m --corpus wikitext-2"

    corpus: str = cmd.option(
        "TEXT",
        "What the predictors are fitted on: embedded or wikitext-2 (their training part), a "
        "folder with train.txt, a file, or - for standard input.",
        "embedded",
    )
    held_out: str | None = cmd.option(
        "TEXT",
        "What they are judged on; otherwise the corpus's test part, or the last fifth of a file.",
    )
    mlp_sparsity: float = cmd.option(
        "SHARE", "Share of the neurons left out.", 0.5, parser=cmd.share
    )
    heads_sparsity: float | None = cmd.option(
        "SHARE", "Share of the attention heads left out; none if not given.", parser=cmd.share
    )
    rank_ratio: float = cmd.option(
        "RATIO",
        "Rank of the predictors divided by the width of the model.",
        0.125,
        parser=cmd.positive,
    )
    tokens: int = cmd.count("Tokens to fit on, at most.", 16384, least=64)
    held_out_tokens: int = cmd.count("Tokens to judge on, at most.", 4096, least=4)
    window: int = cmd.count("Tokens read together.", 256, least=2)
    epochs: int = cmd.count("How often a predictor is shown the text.", 6)
    dtype: str = cmd.dtype_option()

    def run(self) -> None:
        """Fit, save and judge."""
        from joma.inference.sparsify import FitSettings

        start = time.perf_counter()
        names = ("mlp_sparsity", "heads_sparsity", "rank_ratio", "epochs", "seed")
        with naming_options():
            how = FitSettings(**{name: getattr(self, name) for name in names})
        with working("sparsify", self.settings, self.out) as begin, reports("sparsify") as report:
            report("loading the model", 0, 1)
            loaded, fitting, judging = self._load()
            if not self.dry_run:
                with begin(cmd.chosen_device(self.device)) as (run, outcome):
                    record = self._fit(loaded, how, fitting, judging, run.path / FILE, report)
                    run.write_table("layers", _columns(record["layers"]))
                    run.write_table("perplexity", _columns(record["perplexity"]))
                    seconds = round(time.perf_counter() - start, 2)
                    record |= {"run": str(run.path), "seconds": seconds}
                    run.write_json("summary", record)
                    outcome.update(finding=record["finding"])
        if self.dry_run:
            self.plan("sparsify", self._takes(loaded, fitting, judging))
        elif self.json:
            _render.as_json(record)
        else:
            _print_record(record)

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
        if self.held_out == self.corpus:
            raise JomaError(
                f"--held-out must be another text than --corpus, got {self.corpus!r} for both"
            )
        fitting = read_text(f"{self.corpus}:train" if in_parts else self.corpus)
        if self.held_out is not None:
            judging = read_text(self.held_out)
        elif in_parts:
            judging = read_text(f"{self.corpus}:test")
        else:
            cut = int((1 - _HELD_OUT_SHARE) * len(fitting))
            fitting, judging = fitting[:cut], fitting[cut:]
        return {
            "--corpus": (fitting, self.tokens),
            "the held-out text": (judging, self.held_out_tokens),
        }

    def _fit(
        self,
        loaded: "Loaded",
        how: "FitSettings",
        fitting: "Tensor",
        judging: "Tensor",
        path: Path,
        report: Any,
    ) -> dict[str, Any]:
        """Fit, save and judge; return the record."""
        from joma.inference import sparsify

        model, known = loaded.model, {"source": self.model, "corpus": self.corpus}
        sparsify.fit(model, fitting, how, progress=report, **known).save(path)
        # What is judged is what the file holds.
        predictors = sparsify.load_predictors(path, next(model.parameters()).device)
        layers = sparsify.layer_quality(model, predictors, judging, progress=report)
        costs = sparsify.perplexity_cost(
            model,
            predictors,
            judging,
            mlp=self.mlp_sparsity,
            heads=self.heads_sparsity,
            seed=self.seed,
            progress=report,
        )
        fitted = predictors.facts
        names = ("mlp_sparsity", "heads_sparsity", "rank_ratio", "tokens", "corpus", "dtype",
                 "gated", "rank")  # fmt: skip
        record = {
            "model": self.model,
            "file": str(path),
            **{name: getattr(fitted, name) for name in names},
            "predictor_bytes": predictors.nbytes,
            "window": judging.shape[1],
            "held_out_tokens": judging.numel(),
            "layers": [asdict(one) for one in layers],
            "perplexity": [asdict(one) for one in costs],
        }
        return {**record, "finding": _finding(record)}

    def _takes(self, loaded: "Loaded", fitting: "Tensor", judging: "Tensor") -> dict[str, Any]:
        """Return what the fit takes."""
        from joma.inference.sparsify import rank_of, sparse_layers

        layers = sparse_layers(loaded.model)
        width, neurons = layers[0].width, layers[0].neurons
        rank = rank_of(self.rank_ratio, width)
        needed = 2 * fitting.numel() * sum(2 * it.width + it.neurons for it in layers)
        return {
            "layers": len(layers),
            "width": width,
            "neurons": neurons,
            "rank": rank,
            "predictor_parameters": sum((rank + 1) * (it.width + it.neurons) for it in layers),
            "tokens": fitting.numel(),
            "held_out_tokens": judging.numel(),
            "about_bytes": min(needed, 2**31),
        }


@dataclass(frozen=True, kw_only=True)
class ShowPredictors(cmd.Command):
    """Show of which model predictors are, and how they were fitted."""

    summary = "Show what a file of predictors holds."
    example = f"sparsify show runs/sparsify/{FILE}"

    file: Path = cmd.argument("FILE", f"A {FILE}, or its run folder.")
    json: bool = cmd.json_flag()

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


def _has_parts(corpus: str) -> bool:
    from joma.data.corpora import NAMED

    if corpus == "-" or Path(corpus).is_file():
        return False
    known = corpus == "embedded" or corpus in NAMED or corpus.startswith("hub:")
    return (known and ":" not in corpus.removeprefix("hub:")) or Path(corpus).is_dir()


def _finding(record: Mapping[str, Any]) -> str:
    """Return in one sentence what the predictors cost, and whether they beat a fixed set."""
    costs = {one["selection"]: one for one in record["perplexity"]}
    dense, own, oracle = costs["dense"], costs["predicted"], costs["oracle"]
    left = f"{record['mlp_sparsity']:.0%} of the neurons"
    if record["heads_sparsity"] is not None:
        left += f" and {record['heads_sparsity']:.0%} of the heads"
    said = (
        f"leaving out {left}, predicted a layer ahead, changes perplexity on held-out text from "
        f"{dense['perplexity']:.4g} to {own['perplexity']:.4g} ({own['cost']:+.3f} ± "
        f"{own['standard_error']:.3f} nats a token, standard error over {len(own['losses'])} "
        f"windows; the oracle's choice costs {oracle['cost']:+.3f})."
    )
    if "static" not in costs:
        return said
    gaps = [a - b for a, b in zip(costs["static"]["losses"], own["losses"], strict=True)]
    gap, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    does = "no difference beyond two standard errors"
    if abs(gap) > 2 * error:
        does = "more" if gap > 0 else "less"
    return f"{said} A fixed set of neurons costs {costs['static']['cost']:+.3f}, {does}."


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


_RECALLED = {
    "recall": "recall",
    "recall, fixed set": "static_recall",
    "energy kept": "energy",
    "by the oracle": "oracle_energy",
    "by the fixed set": "static_energy",
    "heads' recall": "heads_recall",
}
_SPREAD = {f"energy in top {top}%": f"top_{top}_energy" for top in (10, 25, 50)}
_SPREAD |= {"neurons for 99%": "for_99", "exactly zero": "zero"}


def _print_record(record: Mapping[str, Any]) -> None:
    """Print the layers, the perplexities and the finding."""
    shares = _columns(record["layers"])
    for headings in (_RECALLED, _SPREAD):
        known = {heading: shares[name] for heading, name in headings.items() if name in shares}
        rows = [
            (str(layer), *(f"{value:.1%}" for value in values))
            for layer, *values in zip(shares["layer"], *known.values(), strict=True)
        ]
        _render.put(_render.table(("layer", *known), rows, left=0), "")
    rows = [
        (
            one["selection"],
            f"{one['kept']:.1%}",
            f"{one['perplexity']:#.4g}",
            f"{one['loss']:.4f}",
            f"{one['cost']:.4f}",
            f"{one['standard_error']:.4f}",
        )
        for one in record["perplexity"]
    ]
    headings = ("neurons", "kept", "perplexity", "loss", "cost in nats", "± s.e.")
    _render.put(_render.table(headings, rows), "")
    _render.say(_render.sentence(record["finding"]))
    _render.say(f"  {record['file']}")


app = cmd.command_group(
    "Leave out neurons that do not matter (Deja Vu).",
    "sparsify fit EleutherAI/pythia-70m --corpus wikitext-2",
    {"fit": FitPredictors, "show": ShowPredictors},
)
