"""`joma generate`."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _show
from joma.cli._folders import begun, check_folder, working_in
from joma.cli._generate_request import GenerateRequest, prepared
from joma.cli._generate_show import as_records, put_costs
from joma.cli._options import (
    Device,
    Dtype,
    Json,
    Model,
    Out,
    Seed,
    Tokenizer,
    chosen_device,
    count,
    option,
)
from joma.cli._progress import reports
from joma.errors import JomaError, printable

if TYPE_CHECKING:
    from joma.analysis.generation import Comparison, NamedCache
    from joma.models import Loaded
    from joma.runs import Run

NAME = "generate"
CACHES = (
    "full",
    "window:n=N",
    "streaming:window=N[,sinks=4][,positions=auto]",
    "heavy-hitter:heavy=N,recent=N[,score=sum][,decay=0.99]",
    "random:n=N[,recent=0][,seed=0]",
)
"""Copies of what there is, since the help must not import torch."""

_OPTIONS = ("cache", "budget", "sweep", "prompt", "temperature", "top-p", "tokenizer")
_SCORED, _FEWEST_SCORED = 256, 16


def _not_negative(given: str | float) -> float:
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise typer.BadParameter(f"it must be 0 or a positive number, not {given!r}.")
    return number


def _share(given: str | float) -> float:
    number = _not_negative(given)
    if not 0 < number <= 1:
        raise typer.BadParameter(f"it must be above 0 and at most 1, not {given!r}.")
    return number


def generate(
    model: Annotated[str, Model],
    prompt: Annotated[
        str | None, option("--prompt", "TEXT", "The text to continue; - reads standard input.")
    ] = None,
    prompt_file: Annotated[
        Path | None, option("--prompt-file", "FILE", "A file with the text to continue.")
    ] = None,
    cache: Annotated[
        list[str] | None,
        option(
            "--cache",
            "CACHE",
            "What the cache keeps, such as heavy-hitter:heavy=64,recent=64; help lists them. The "
            "text is made with the first that is given; several are compared.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        option(
            "--budget",
            "KEYS",
            "Keys per head of caches that are given by name alone: a number, or a share of the "
            "text such as 20%. mass:20% and entropy:20% share as many out over the layers by what "
            "attention says of each, auto:20% by the rule that did best on real models: evenly.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        option(
            "--sweep",
            "BUDGETS",
            "Compare several budgets, such as 5,10,20,50%, of every policy or of those named "
            "with --cache; the text is made with the full cache.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, count("--max-new-tokens", "New tokens, at most.")] = 200,
    temperature: Annotated[
        float,
        option(
            "--temperature",
            "T",
            "0 takes the most likely token; more draws at random.",
            parser=_not_negative,
        ),
    ] = 0.0,
    top_p: Annotated[
        float,
        option(
            "--top-p",
            "P",
            "Draw from the fewest tokens of this probability together.",
            parser=_share,
        ),
    ] = 1.0,
    beams: Annotated[int, count("--beams", "Continuations that beam search keeps.")] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    chunk: Annotated[
        int | None, count("--chunk", "Tokens of the prompt read together; otherwise all.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare", help="Measure quality, memory and latency against full."
        ),
    ] = True,
    scored: Annotated[
        int | None,
        count(
            "--scored",
            "Last tokens of the prompt that quality is measured on; 256, or half of the prompt if "
            "less.",
            0,
        ),
    ] = None,
    rounds: Annotated[
        int, count("--rounds", "Rounds of timing, caches taking turns; 0 for none.", 0)
    ] = 5,
    tokenizer: Tokenizer = None,
    revision: Annotated[
        str | None, option("--revision", "REV", "Branch, tag or commit of a hub id.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what the caches would hold, and stop."),
    ] = False,
) -> None:
    """Continue a text with a cache that keeps some of the keys, and say what that costs.

    Text goes to standard output as it is made. The table that follows compares with the full cache
    on the same tokens: negative log likelihood of the prompt's own end and of the full cache's
    greedy continuation, bytes held, and time per token; quality and speed have their errors. Ctrl-C
    ends the generation; what was measured by then is printed and saved.
    """
    if cache == ["help"]:
        for line in CACHES:
            typer.echo(line)
        return
    asked = GenerateRequest(
        model=model,
        prompt=_prompt(prompt, prompt_file),
        caches=tuple(cache or ()),
        budget=budget,
        sweep=sweep,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        beams=beams,
        chat=chat,
        chunk=chunk,
        scored=scored,
        rounds=rounds,
        tokenizer=tokenizer,
        revision=revision,
        dtype=dtype,
        seed=seed,
    )
    if beams > 1 and temperature > 0:
        raise JomaError("--beams must be 1 with --temperature: beam search draws nothing")
    with _naming_options():
        if dry_run:
            from joma.cli._generate_plan import show_plan

            check_folder(out, NAME)
            show_plan(asked, device=chosen_device(device), out=out, as_json=json)
        else:
            _run(asked, device=chosen_device(device), out=out, compare=compare, as_json=json)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        got = "neither" if prompt is None else "both"
        raise JomaError(f"say what to continue with --prompt or --prompt-file, got {got}")
    from joma.data.text import read_text

    if file is not None:
        if not file.is_file():
            raise JomaError(f"--prompt-file must be a text file, got {file}, which is none")
        return read_text(file)
    return read_text("-") if prompt == "-" else str(prompt)


@contextlib.contextmanager
def _naming_options() -> Iterator[None]:
    """Name the option in errors of arguments that are options here."""
    try:
        yield
    except JomaError as error:
        if str(error).split(" ", 1)[0] in _OPTIONS:
            raise JomaError(f"--{error}") from error
        raise


def _run(
    asked: GenerateRequest, *, device: str, out: Path | None, compare: bool, as_json: bool
) -> None:
    check_folder(out, NAME, asked.config, restart=True)
    with working_in(out) as folders:
        with reports(NAME) as report:
            report("load the model", 0, 1)
            loaded, tokens, caches, note = prepared(asked, device)
        if note:
            _show.say(note, err=True)
        with begun(folders, NAME, asked.config, out, device=device) as (run, outcome):
            made, rows = "", []
            first = caches[0] if asked.is_limited else None
            try:
                for piece in _pieces(asked, loaded, tokens, first):
                    made += piece
                    if not as_json:
                        typer.echo(printable(piece, limit=None), nl=False)
                        sys.stdout.flush()
            finally:
                run.write_json("text", {"prompt": asked.prompt, "generated": made})
                if not as_json:
                    typer.echo("")
                    sys.stdout.flush()
            if compare:
                rows = _compared(asked, loaded, tokens, caches, run)
                if not as_json:
                    put_costs(rows, err=not sys.stdout.isatty())
            outcome.update(finding=_finding(rows, made), prompt_tokens=len(tokens))
    if as_json:
        record = {"model": asked.model, "prompt_tokens": len(tokens), "text": made}
        _show.as_json({**record, "caches": as_records(rows), "run": str(run.path)})
        return
    _show.say(f"Run folder: {run.path}", err=True)


def _pieces(
    asked: GenerateRequest, loaded: "Loaded", tokens: list[int], cache: "NamedCache | None"
) -> Iterator[str]:
    """Yield the continuation as text, piece by piece."""
    from joma.analysis.generation import (
        TextStream,
        generate_tokens,
        reading_with,
        search_beams,
        stop_tokens,
    )

    stream, stop = TextStream(loaded, tokens), stop_tokens(loaded)
    policy = None if cache is None else cache.policy
    with reading_with(loaded.model, policy, asked.chunk) as reader:
        how: Any
        if asked.beams > 1:
            how = search_beams(reader, tokens, asked.max_new_tokens, asked.beams, stop)
        else:
            how = generate_tokens(reader, tokens, asked.max_new_tokens, asked.sampling, stop)
        for token in how:
            yield stream.add(token)
    yield stream.rest()


def _compared(
    asked: GenerateRequest,
    loaded: "Loaded",
    tokens: list[int],
    caches: "list[NamedCache]",
    run: "Run",
) -> list[dict[str, Any]]:
    """Return the rows of the table; on Ctrl-C those that are complete are printed and saved."""
    from joma.analysis.generation import Comparison, stop_tokens
    from joma.report.cache_cost import TABLE, columns_of

    least = _FEWEST_SCORED if asked.scored is None else 1
    scored = min(_SCORED if asked.scored is None else asked.scored, len(tokens) // 2)
    comparison = Comparison(
        loaded.model,
        tokens,
        caches,
        scored if scored >= least else 0,
        asked.max_new_tokens,
        stop_tokens(loaded),
        asked.chunk,
        asked.rounds,
    )
    try:
        with reports("compare") as report:
            comparison.run(report)
    except KeyboardInterrupt:
        _save(comparison, run)
        put_costs(comparison.rows(), err=True)
        raise
    rows = comparison.rows()
    run.write_table(TABLE, columns_of(rows))
    return rows


def _save(comparison: "Comparison", run: "Run") -> None:
    from joma.report.cache_cost import TABLE, columns_of

    if rows := comparison.rows():
        run.write_table(TABLE, columns_of(rows))


def _finding(rows: list[dict[str, Any]], made: str) -> str:
    from joma.report.cache_cost import sentence

    limited = [row for row in rows if row["policy"] != "full"]
    return sentence(limited[0]) if limited else f"{len(made)} characters generated."
