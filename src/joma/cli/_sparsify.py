"""`joma sparsify`: fit predictors of neurons and heads, and show what a file of them holds."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _show
from joma.cli._errors import PlainCommand, command_group
from joma.cli._folders import begun, check_folder, working_in
from joma.cli._options import (
    Device,
    Json,
    Model,
    Out,
    Seed,
    Tokenizer,
    chosen_device,
    count,
    one_of,
    option,
    positive,
)
from joma.cli._progress import Report, reports
from joma.cli._sparsify_show import columns, finding, print_record
from joma.common.json_files import plain
from joma.errors import JomaError

if TYPE_CHECKING:
    from torch import Tensor

    from joma.inference.sparsify import FitSettings, Predictors
    from joma.models import Loaded

NAME = "sparsify"
FILE = "predictors.safetensors"
WINDOW, TOKENS, HELD_OUT = 256, 16384, 4096
"""Tokens of a window, and those read to fit and to judge, unless given."""

_HELD_OUT_SHARE = 0.2
_CHARACTERS = 12
"""Characters of text that are read for one token; most tokens have fewer."""

app = command_group(
    "Leave out neurons that do not matter (Deja Vu).",
    "sparsify fit EleutherAI/pythia-70m --corpus wikitext-2",
)


def _share(given: str | float) -> float:
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 < number < 1:
        raise typer.BadParameter(f"it must be a share above 0 and below 1, not {given!r}.")
    return number


@app.command(
    cls=PlainCommand,
    short_help="Fit predictors of the neurons that matter, and judge them.",
    epilog="Example: joma sparsify fit EleutherAI/pythia-70m --corpus wikitext-2",
)
def fit(
    model: Annotated[str, Model],
    corpus: Annotated[
        str,
        option(
            "--corpus",
            "TEXT",
            "What the predictors are fitted on: embedded or wikitext-2 (their training part), a "
            "folder with train.txt, a file, or - for standard input.",
        ),
    ] = "embedded",
    held_out: Annotated[
        str | None,
        option(
            "--held-out",
            "TEXT",
            "What they are judged on; otherwise the corpus's test part, or the last fifth of a "
            "file.",
        ),
    ] = None,
    mlp_sparsity: Annotated[
        float, option("--mlp-sparsity", "SHARE", "Share of the neurons left out.", parser=_share)
    ] = 0.5,
    heads_sparsity: Annotated[
        float | None,
        option(
            "--heads-sparsity",
            "SHARE",
            "Share of the attention heads left out; none if not given.",
            parser=_share,
        ),
    ] = None,
    rank_ratio: Annotated[
        float,
        option(
            "--rank-ratio",
            "RATIO",
            "Rank of the predictors divided by the width of the model.",
            parser=positive,
        ),
    ] = 0.125,
    tokens: Annotated[int, count("--tokens", "Tokens to fit on, at most.", 64)] = TOKENS,
    held_out_tokens: Annotated[
        int, count("--held-out-tokens", "Tokens to judge on, at most.", 4)
    ] = HELD_OUT,
    window: Annotated[int, count("--window", "Tokens read together.", 2)] = WINDOW,
    epochs: Annotated[int, count("--epochs", "How often a predictor is shown the text.")] = 6,
    revision: Annotated[
        str | None, option("--revision", "REV", "Branch, tag or commit of a hub id.")
    ] = None,
    tokenizer: Tokenizer = None,
    dtype: Annotated[
        str,
        option(
            "--dtype",
            "DTYPE",
            "What the model computes in; the predictors fit no other type.",
            parser=one_of("float32", "float16", "bfloat16"),
        ),
    ] = "float32",
    device: Device = "auto",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Load the model, say what the fit takes, and stop.")
    ] = False,
) -> None:
    """Fit predictors of the MLP neurons (and heads) that matter for a token, a layer ahead.

    They are trained from the model's own activations on one text and judged on another: how many
    of the neurons that mattered they find, and what the perplexity costs, next to the oracle, a
    threshold, a fixed set of neurons and random ones. The run folder holds predictors.safetensors.
    """
    asked = _Asked(
        model,
        revision,
        tokenizer,
        corpus,
        held_out,
        mlp_sparsity,
        heads_sparsity,
        rank_ratio,
        tokens,
        held_out_tokens,
        window,
        epochs,
        dtype,
        seed,
    )
    config = dataclasses.asdict(asked)
    start = time.perf_counter()
    check_folder(out, NAME, config, restart=True)
    settings = _settings(asked)
    with working_in(out) as folders, reports(NAME) as report:
        report("loading the model", 0, 1)
        loaded, fitting, judging = _load(asked, chosen_device(device))
        if dry_run:
            _plan(asked, loaded, fitting, judging, out, json)
            return
        on = next(loaded.model.parameters()).device.type
        with begun(folders, NAME, config, out, device=on) as (run, outcome):
            record = _make(asked, settings, loaded, fitting, judging, run.path / FILE, report)
            run.write_table("layers", columns(record["layers"]))
            run.write_table("perplexity", columns(record["perplexity"]))
            record |= {"run": str(run.path), "seconds": round(time.perf_counter() - start, 2)}
            run.write_json("summary", plain(record))
            outcome.update(finding=record["finding"])
    if json:
        _show.as_json(plain(record))
    else:
        print_record(record)


@dataclass(frozen=True)
class _Asked:
    """The options that decide the numbers."""

    model: str
    revision: str | None
    tokenizer: str | None
    corpus: str
    held_out: str | None
    mlp_sparsity: float
    heads_sparsity: float | None
    rank_ratio: float
    tokens: int
    held_out_tokens: int
    window: int
    epochs: int
    dtype: str
    seed: int


def _settings(asked: _Asked) -> "FitSettings":
    from joma.inference.sparsify import FitSettings

    try:
        return FitSettings(
            mlp_sparsity=asked.mlp_sparsity,
            heads_sparsity=asked.heads_sparsity,
            rank_ratio=asked.rank_ratio,
            epochs=asked.epochs,
            seed=asked.seed,
        )
    except JomaError as error:
        name, _, rest = str(error).partition(" ")
        raise JomaError(f"--{name.replace('_', '-')} {rest}") from error


def _load(asked: _Asked, device: str) -> "tuple[Loaded, Tensor, Tensor]":
    """Return the model, the windows to fit on and those to judge on."""
    import torch

    from joma.data.text import windows
    from joma.inference.sparsify import sparse_layers
    from joma.models import load

    fitting, judging = _texts(asked)
    loaded = load(
        asked.model,
        revision=asked.revision,
        tokenizer=asked.tokenizer,
        device=device,
        dtype=getattr(torch, asked.dtype),
    )
    sparse_layers(loaded.model)  # refuses what cannot be made sparse before anything is read
    if not hasattr(loaded.model, "lm_head") and loaded.model.get_output_embeddings() is None:  # type: ignore[operator]
        raise JomaError(f"{asked.model} has no head that predicts tokens: its loss is not defined")
    special = loaded.special_tokens
    length = asked.window if loaded.context is None else min(asked.window, loaded.context)
    plain = length - special.count
    if plain < 2:
        raise JomaError(f"--window must be at least {special.count + 2}, got {asked.window}")
    found = []
    for text, most, what in (
        (fitting, asked.tokens, "--corpus"),
        (judging, asked.held_out_tokens, "the held-out text"),
    ):
        tokens = loaded.encode(text, special=False)
        if len(tokens) < 2 * plain:
            raise JomaError(
                f"{what} must have at least two windows of {plain} tokens, got {len(tokens)} tokens"
            )
        # Each begins as the model's texts do: Gemma is lost without its <bos>.
        found.append(special.around_each(windows(tokens, plain, max(2, most // length))))
    return loaded, found[0], found[1]


def _texts(asked: _Asked) -> tuple[str, str]:
    """Return the text to fit on and the one to judge on, no part of which is in both."""
    from joma.data.text import read_text

    def some(text: str, tokens: int) -> str:
        return text[: _CHARACTERS * tokens]

    if asked.held_out is not None:
        if asked.held_out == asked.corpus:
            raise JomaError(
                f"--held-out must be another text than --corpus, got {asked.corpus!r} for both"
            )
        fitting, judging = read_text(_part(asked.corpus, "train")), read_text(asked.held_out)
    elif _has_parts(asked.corpus):
        fitting = read_text(f"{asked.corpus}:train")
        judging = read_text(f"{asked.corpus}:test")
    else:
        text = read_text(asked.corpus)
        cut = int((1 - _HELD_OUT_SHARE) * len(text))
        fitting, judging = text[:cut], text[cut:]
    return some(fitting, asked.tokens), some(judging, asked.held_out_tokens)


def _has_parts(corpus: str) -> bool:
    from joma.data.corpora import NAMED

    if corpus == "-" or Path(corpus).is_file():
        return False
    known = corpus == "embedded" or corpus in NAMED or corpus.startswith("hub:")
    return (known and ":" not in corpus.removeprefix("hub:")) or Path(corpus).is_dir()


def _part(corpus: str, part: str) -> str:
    return f"{corpus}:{part}" if _has_parts(corpus) else corpus


def _make(
    asked: _Asked,
    settings: "FitSettings",
    loaded: "Loaded",
    fitting: "Tensor",
    judging: "Tensor",
    path: Path,
    report: Report,
) -> dict[str, Any]:
    """Fit, save and judge; return the record."""
    from joma.inference.sparsify import fit as fit_predictors
    from joma.inference.sparsify import layer_quality, load_predictors, perplexity_cost

    predictors = fit_predictors(
        loaded.model,
        fitting,
        settings,
        source=asked.model,
        corpus=asked.corpus,
        progress=report,
    )
    predictors.save(path)
    device = next(loaded.model.parameters()).device
    predictors = load_predictors(path, device)  # what is judged is what the file holds
    layers = layer_quality(loaded.model, predictors, judging, progress=report)
    costs = perplexity_cost(
        loaded.model,
        predictors,
        judging,
        mlp=asked.mlp_sparsity,
        heads=asked.heads_sparsity,
        seed=asked.seed,
        progress=report,
    )
    record = {
        "model": asked.model,
        "file": str(path),
        **_facts(predictors),
        "window": judging.shape[1],
        "held_out_tokens": judging.numel(),
        "layers": [dataclasses.asdict(one) for one in layers],
        "perplexity": [dataclasses.asdict(one) for one in costs],
    }
    record["finding"] = finding(record)
    return record


def _facts(predictors: "Predictors") -> dict[str, Any]:
    facts = predictors.facts
    kept = ("mlp_sparsity", "heads_sparsity", "rank_ratio", "tokens", "corpus", "dtype", "gated")
    return {
        **{name: getattr(facts, name) for name in kept},
        "rank": facts.rank,
        "predictor_bytes": predictors.nbytes,
    }


def _plan(
    asked: _Asked,
    loaded: "Loaded",
    fitting: "Tensor",
    judging: "Tensor",
    out: Path | None,
    json: bool,
) -> None:
    """Print what the fit takes."""
    from joma.inference.sparsify import rank_of, sparse_layers
    from joma.runs import default_folder

    layers = sparse_layers(loaded.model)
    rank = rank_of(asked.rank_ratio, layers[0].width)
    parameters = sum((rank + 1) * (it.width + it.neurons) for it in layers)
    needed = 2 * fitting.numel() * sum(2 * it.width + it.neurons for it in layers)
    plan = {
        "model": asked.model,
        "run": str(out or default_folder(NAME)),
        "device": next(loaded.model.parameters()).device.type,
        "layers": len(layers),
        "width": layers[0].width,
        "neurons": layers[0].neurons,
        "rank": rank,
        "predictor_parameters": parameters,
        "tokens": fitting.numel(),
        "held_out_tokens": judging.numel(),
        "about_bytes": min(needed, 2**31),
    }
    if json:
        _show.as_json(plan)
        return
    _show.say(f"{NAME}: {asked.model} → {plan['run']}")
    _show.say(
        f"  {len(layers)} layers of width {plan['width']} with {plan['neurons']} neurons; rank "
        f"{rank}, {parameters / 1e6:.2f} million parameters of predictors"
    )
    _show.say(
        f"  fits on {plan['tokens']:,} tokens, judges on {plan['held_out_tokens']:,}, on "
        f"{plan['device']}; holds {plan['about_bytes'] / 2**30:.1f} GiB of observations at a time"
    )


@app.command(
    cls=PlainCommand,
    short_help="Show what a file of predictors holds.",
    epilog=f"Example: joma sparsify show runs/sparsify/{FILE}",
)
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=f"A {FILE}, or its run folder.")],
    json: Json = False,
) -> None:
    """Show of which model predictors are, and how they were fitted."""
    from joma.inference.sparsify import load_predictors

    path = file / FILE if file.is_dir() else file
    predictors = load_predictors(path)
    facts = dataclasses.asdict(predictors.facts)
    record = {"file": str(path), **facts, "rank": predictors.facts.rank}
    record["predictor_bytes"] = predictors.nbytes
    if json:
        _show.as_json(plain(record))
        return
    table = _show.table("", "")
    for name, value in record.items():
        if name == "neurons":
            value = value[0] if len(set(value)) == 1 else ", ".join(map(str, value))
        table.add_row(name.replace("_", " "), _show.cell(value, "g"))
    _show.put(table)
