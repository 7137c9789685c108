"""`joma generate`."""

import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import _render
from joma.cli._command import (
    ModelCommand,
    chosen_device,
    count,
    dtype_option,
    flag,
    option,
    parsed,
)
from joma.cli._probe import device_speed, file_sizes
from joma.cli._progress import reports
from joma.cli._render import printable
from joma.cli._run_folder import check_folder, naming_options, working
from joma.errors import JomaError
from joma.errors import printable as escaped

if TYPE_CHECKING:
    from joma.analysis.generation import AskedCaches, NamedCache
    from joma.models import Loaded
    from joma.runs import Run

EXAMPLE = "generate model.gguf --prompt 'Once upon a time' --cache heavy-hitter:heavy=64,recent=64"
CACHES = (
    "full",
    "window:n=N",
    "streaming:window=N[,sinks=4][,positions=auto]",
    "heavy-hitter:heavy=N,recent=N[,score=sum][,decay=0.99]",
    "random:n=N[,recent=0][,seed=0]",
)
"""Copies of what there is, since the help must not import torch."""

_SHOWN = 80
"""Characters of a prompt that the configuration of a run shows."""
_SCORED, _FEWEST_SCORED = 256, 16
_temperature = parsed(float, lambda number: 0 <= number < math.inf, "0 or a positive number")


@dataclass(frozen=True, kw_only=True)
class Generate(ModelCommand):
    """Continue a text with a cache that keeps some of the keys, and say what that costs.

    Text goes to standard output as it is made. The table that follows compares with the full cache
    on the same tokens: negative log likelihood of the prompt's own end and of the full cache's
    greedy continuation, bytes held, and time per token; quality and speed have their errors. Ctrl-C
    ends the generation; what was measured by then is printed and saved.
    """

    prompt: str | None = option("TEXT", "The text to continue; - reads standard input.")
    prompt_file: Path | None = option("FILE", "A file with the text to continue.")
    cache: list[str] | None = option(
        "CACHE",
        "What the cache keeps, such as heavy-hitter:heavy=64,recent=64; help lists them. The "
        "text is made with the first that is given; several are compared.",
    )
    budget: str | None = option(
        "KEYS",
        "Keys per head of caches that are given by name alone: a number, or a share of the "
        "text such as 20%. mass:20% and entropy:20% share as many out over the layers by what "
        "attention says of each, auto:20% by the rule that did best on real models: evenly.",
    )
    sweep: str | None = option(
        "BUDGETS",
        "Compare several budgets, such as 5,10,20,50%, of every policy or of those named "
        "with --cache; the text is made with the full cache.",
    )
    max_new_tokens: int = count("New tokens, at most.", 200)
    temperature: float = option(
        "T", "0 takes the most likely token; more draws at random.", 0.0, parser=_temperature
    )
    chat: bool = flag("Put the prompt into the model's chat template.")
    chunk: int | None = count("Tokens of the prompt read together; otherwise all.")
    compare: bool = flag(
        "Measure quality, memory and latency against full.", True, name="--compare/--no-compare"
    )
    scored: int | None = count(
        "Last tokens of the prompt that quality is measured on; 256, or half of the prompt if "
        "less.",
        least=0,
    )
    rounds: int = count("Rounds of timing, caches taking turns; 0 for none.", 5, least=0)
    dtype: str = dtype_option()

    def run(self) -> None:
        """Generate, then compare."""
        if self.cache == ["help"]:
            for line in CACHES:
                typer.echo(line)
            return
        with naming_options("cache", "budget", "sweep", "prompt", "tokenizer"):
            if not self.text:
                raise JomaError("prompt must hold at least one token, got an empty text")
            self.caches.of_text(10**9)  # raises before anything is loaded
            if self.dry_run:
                check_folder(self.out, "generate")
                self._plan()
            else:
                self._generate()

    @cached_property
    def text(self) -> str:
        """The text to continue."""
        if (self.prompt is None) == (self.prompt_file is None):
            got = "neither" if self.prompt is None else "both"
            raise JomaError(f"say what to continue with --prompt or --prompt-file, got {got}")
        from joma.data.text import read_text

        if self.prompt_file is not None:
            if not self.prompt_file.is_file():
                raise JomaError(
                    f"--prompt-file must be a text file, got {self.prompt_file}, which is none"
                )
            return read_text(self.prompt_file)
        return read_text("-") if self.prompt == "-" else str(self.prompt)

    @cached_property
    def caches(self) -> "AskedCaches":
        """The caches that are asked for."""
        from joma.analysis.generation import AskedCaches

        return AskedCaches(tuple(self.cache or ()), self.budget, self.sweep)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the numbers; of the prompt its beginning and a SHA-256, for it may be long.

        The whole prompt is in `text.json` of the run folder.
        """
        kept = dict(super().settings)
        del kept["prompt_file"], kept["compare"]
        digest = hashlib.sha256(self.text.encode(errors="surrogatepass")).hexdigest()
        begins = " ".join(self.text[:_SHOWN].split())
        return {**kept, "cache": self.cache or [], "prompt": begins, "prompt_sha256": digest}

    def _generate(self) -> None:
        device = chosen_device(self.device)
        with working("generate", self.settings, self.out) as begin:
            with reports("generate") as report:
                report("load the model", 0, 1)
                loaded, tokens, caches, note = self._prepared()
            if note:
                _render.say(note, err=True)
            with begin(device) as (run, outcome):
                rows: list[dict[str, Any]] = []
                made = self._write_text(run, loaded, tokens, caches)
                if self.compare:
                    rows = self._compared(run, loaded, tokens, caches)
                    if not self.json:
                        put_costs(rows, err=not sys.stdout.isatty())
                outcome.update(finding=_finding(rows, made), prompt_tokens=len(tokens))
        if self.json:
            record = {"model": self.model, "prompt_tokens": len(tokens), "text": made}
            _render.as_json({**record, "caches": rows, "run": run.path})
        else:
            _render.say(f"Run folder: {run.path}", err=True)

    def _prepared(self) -> "tuple[Loaded, list[int], list[NamedCache], str]":
        """Return the model, the prompt's tokens, the caches to compare, and what to note of them.

        Raises:
            JomaError: Something that was asked for is impossible.
        """
        from joma.analysis.generation import check_generates, check_length, encode_prompt
        from joma.inference import Full, cache

        loaded = self.load(self.dtype)
        check_generates(loaded.model, loaded.source)
        tokens = encode_prompt(loaded, self.text, chat=self.chat)
        notes = [check_length(loaded, len(tokens), self.max_new_tokens)]
        longest = len(tokens) + self.max_new_tokens
        caches = self.caches.of_text(longest, loaded.model, tokens)
        for policy in (Full(), *(it.policy for it in caches)):
            assert policy is not None
            with cache(loaded.model, policy):  # raises where it cannot serve the model
                pass
        idle = [it.name for it in caches if it.keys >= longest]
        if idle:
            notes.append(f"{idle[0]} drops nothing: the text has {longest} tokens at most.")
        return loaded, tokens, caches, " ".join(filter(None, notes))

    def _write_text(
        self, run: "Run", loaded: "Loaded", tokens: list[int], caches: "list[NamedCache]"
    ) -> str:
        """Generate; what there is when it is interrupted is printed and saved."""
        made = ""
        asked = self.sweep is None and (self.cache or [])[:1] != ["full"]
        try:
            for piece in self._pieces(loaded, tokens, caches[0] if asked and caches else None):
                made += piece
                if not self.json:
                    typer.echo(escaped(piece, limit=None), nl=False)
                    sys.stdout.flush()
        finally:
            run.write_json("text", {"prompt": self.text, "generated": made})
            if not self.json:
                typer.echo("")
                sys.stdout.flush()
        return made

    def _pieces(
        self, loaded: "Loaded", tokens: list[int], cache: "NamedCache | None"
    ) -> Iterator[str]:
        """Yield the continuation as text, piece by piece."""
        from joma.analysis.generation import (
            TextStream,
            generate_tokens,
            reading_with,
            stop_tokens,
        )

        stream, policy = TextStream(loaded, tokens), None if cache is None else cache.policy
        with reading_with(loaded.model, policy, self.chunk) as reader:
            for token in generate_tokens(
                reader,
                tokens,
                self.max_new_tokens,
                temperature=self.temperature,
                seed=self.seed,
                stop=stop_tokens(loaded),
            ):
                yield stream.add(token)
        yield stream.rest()

    def _compared(
        self, run: "Run", loaded: "Loaded", tokens: list[int], caches: "list[NamedCache]"
    ) -> list[dict[str, Any]]:
        """Return the rows of the table; on Ctrl-C those that are complete are printed and saved."""
        from joma.analysis.generation import Comparison, stop_tokens
        from joma.report.cache_cost import TABLE, columns_of

        least = _FEWEST_SCORED if self.scored is None else 1
        scored = min(_SCORED if self.scored is None else self.scored, len(tokens) // 2)
        comparison = Comparison(
            loaded.model,
            tokens,
            caches,
            scored if scored >= least else 0,
            self.max_new_tokens,
            stop_tokens(loaded),
            self.chunk,
            self.rounds,
        )
        try:
            with reports("compare") as report:
                comparison.run(report)
        except KeyboardInterrupt:
            put_costs(comparison.rows(), err=True)
            raise
        finally:
            if rows := comparison.rows():
                run.write_table(TABLE, columns_of(rows))
        return rows

    def _plan(self) -> None:
        """Print what would be generated and compared, where it goes, and what it takes.

        The bytes of caches are those of the formula; nothing is loaded, so that they are known for
        a folder here alone.
        """
        from joma.models.loading import check_source, outlined
        from joma.runs import default_folder

        check_source(self.model, revision=self.revision, tokenizer=self.tokenizer)
        loaded = outlined(self.model, revision=self.revision, tokenizer=self.tokenizer)
        record: dict[str, Any] = {
            "model": self.model,
            "run": str(self.out or default_folder("generate")),
            "device": chosen_device(self.device),
            "prompt_tokens": None,
            "new_tokens": self.max_new_tokens,
            "caches": None,
            "about_seconds": None,
        }
        if loaded is not None:
            record |= self._takes(loaded)
        _render.plan(record, json=self.json)

    def _takes(self, loaded: "Loaded") -> dict[str, Any]:
        """Return what is known of a model without numbers."""
        import torch

        from joma.analysis.generation import check_generates, check_length, encode_prompt
        from joma.inference import Full, cache_bytes

        check_generates(loaded.model, loaded.source)
        prompt = len(encode_prompt(loaded, self.text, chat=self.chat))
        check_length(loaded, prompt, self.max_new_tokens)
        length = prompt + self.max_new_tokens
        caches = {"full": Full(), **{it.name: it.policy for it in self.caches.of_text(length)}}
        dtype = getattr(torch, self.dtype)
        sizes = {
            name: cache_bytes(loaded.model, policy, tokens=length, dtype=dtype)  # type: ignore[arg-type]
            for name, policy in caches.items()
        }
        parameters = (file_sizes(self.model) or (0, 0))[0]
        # Each cache reads the prompt twice and in every round; one token at a time is far slower.
        passes = len(caches) * (2 + self.rounds)
        work = 2.0 * parameters * (passes * prompt + 8 * len(caches) * length)
        return {
            "prompt_tokens": prompt,
            "caches": [
                {"cache": name, "bytes": size, "share": size / sizes["full"]}
                for name, size in sizes.items()
            ],
            "about_seconds": work / device_speed(chosen_device(self.device)) + 5,
        }


def put_costs(rows: Sequence[dict[str, Any]], *, err: bool = False) -> None:
    """Print what each cache holds and costs, and what can be said of it.

    Args:
        rows: Rows of the table `cache_cost`.
        err: Whether it goes to standard error.
    """
    from joma.report.cache_cost import CAVEAT, sentence

    if not rows:
        return
    window = _render.console(err=err)
    table = _cost_table(rows, str)
    if window.measure(table, options=window.options.update(width=1000)).maximum > window.width:
        table = _cost_table(rows, lambda name: name.replace(":", ":\n").replace(",", ",\n"))
    _render.put("", table, "", err=err)
    full = rows[0]
    for row in rows[1:] if len(rows) <= 4 else ():
        _render.say(sentence(row), err=err)
    texts = [
        f"{full[f'{of}_tokens']} tokens of {what}"
        for of, what in (("text", "the prompt's own end"), ("reply", "the full cache's reply"))
        if full[f"{of}_tokens"]
    ]
    _render.say(
        f"Nats per token, on {' and '.join(texts) or 'no tokens'}: more than the full cache's, ± "
        f"one standard error; the full cache's row has its own. {CAVEAT}",
        err=err,
    )


def _cost_table(rows: Sequence[dict[str, Any]], name: Callable[[str], str]) -> Any:
    headings = ("cache", "keys", "cache bytes", "own text, nats", "reply, nats", "same choice",
                "ms/token", "speed (95%)")  # fmt: skip
    table = _render.table(headings, [(name(row["cache"]), *_costs(row)) for row in rows])
    table.columns[0].no_wrap = True
    return table


def _costs(row: dict[str, Any]) -> list[str]:
    full = row["policy"] == "full"
    agreement = _measured(row["agreement"], row["agreement_error"], "{:.0%}")
    return [
        _known(row["keys"], "{:g}"),
        _render.size_text(row["bytes"])
        if full
        else f"{_render.size_text(row['bytes'])} {row['share']:6.1%}",
        _nats(row, "text"),
        _nats(row, "reply"),
        "" if full else agreement,
        _known(row["ms"], "{:.1f}"),
        "" if full else _speed(row),
    ]


def _known(value: float, form: str) -> str:
    return printable("–") if math.isnan(value) else form.format(value)


def _nats(row: dict[str, Any], of: str) -> str:
    if row["policy"] == "full":
        return _known(row[f"{of}_nll"], "{:.3f}")
    return _measured(row[f"{of}_cost"], row[f"{of}_error"], "{:+.3f}")


def _measured(value: float, error: float, form: str) -> str:
    if math.isnan(value):
        return printable("–")
    shown = form.format(round(value, 3) + 0.0)  # no minus sign before zero
    if math.isnan(error):
        return shown
    return printable(f"{shown} ± {form.replace('+', '').format(error)}")


def _speed(row: dict[str, Any]) -> str:
    if math.isnan(row["speed_low"]):
        return _known(row["speed"], "{:.2f}")
    return f"{row['speed']:.2f} ({row['speed_low']:.2f} to {row['speed_high']:.2f})"


def _finding(rows: Sequence[dict[str, Any]], made: str) -> str:
    from joma.report.cache_cost import sentence

    limited = [row for row in rows if row["policy"] != "full"]
    return sentence(limited[0]) if limited else f"{len(made)} characters generated."
