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

from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._probe import device_speed, file_sizes
from joma.cli._progress import reports
from joma.cli._run_folder import check_folder, naming_options, working
from joma.errors import JomaError
from joma.errors import printable as escaped

if TYPE_CHECKING:
    from joma.analysis.caches import AskedCaches, NamedCache
    from joma.models import Loaded
    from joma.runs import Run

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
_temperature = cmd.parsed(float, lambda number: 0 <= number < math.inf, "0 or a positive number")


@dataclass(frozen=True, kw_only=True)
class Generate(cmd.ModelCommand):
    """Continue a text with a cache that keeps some of the keys, and say what that costs.

    Text goes to standard output as it is made. The table that follows compares with the full cache
    on the same tokens: negative log likelihood of the prompt's own end and of the full cache's
    greedy continuation, bytes held, and time per token; quality and speed have their errors. Ctrl-C
    ends the generation; what was measured by then is printed and saved.
    """

    summary = "Continue a text with a smaller cache, and say what it costs."
    example = (
        "generate model.gguf --prompt 'Once upon a time' --cache heavy-hitter:heavy=64,recent=64"
    )

    prompt: str | None = cmd.option("TEXT", "The text to continue; - reads standard input.")
    prompt_file: Path | None = cmd.option("FILE", "A file with the text to continue.")
    cache: list[str] | None = cmd.option(
        "CACHE",
        "What the cache keeps, such as heavy-hitter:heavy=64,recent=64; help lists them. The "
        "text is made with the first that is given; several are compared.",
    )
    budget: str | None = cmd.option(
        "KEYS",
        "Keys per head of caches that are given by name alone: a number, or a share of the "
        "text such as 20%. mass:20% and entropy:20% share as many out over the layers by what "
        "attention says of each, auto:20% by the rule that did best on real models: evenly.",
    )
    sweep: str | None = cmd.option(
        "BUDGETS",
        "Compare several budgets, such as 5,10,20,50%, of every policy or of those named "
        "with --cache; the text is made with the full cache.",
    )
    max_new_tokens: int = cmd.count("New tokens, at most.", 200)
    temperature: float = cmd.option(
        "T", "0 takes the most likely token; more draws at random.", 0.0, parser=_temperature
    )
    chat: bool = cmd.flag("Put the prompt into the model's chat template.")
    chunk: int | None = cmd.count("Tokens of the prompt read together; otherwise all.")
    compare: bool = cmd.flag(
        "Measure quality, memory and latency against full.", True, name="--compare/--no-compare"
    )
    scored: int | None = cmd.count(
        "Last tokens of the prompt that quality is measured on; 256, or half of the prompt if "
        "less.",
        least=0,
    )
    rounds: int = cmd.count("Rounds of timing, caches taking turns; 0 for none.", 5, least=0)
    dtype: str = cmd.dtype_option()

    def run(self) -> None:
        """Generate, then compare."""
        if self.cache == ["help"]:
            typer.echo("\n".join(CACHES))
            return
        with naming_options("cache", "budget", "sweep", "prompt", "tokenizer"):
            if not self.text:
                raise JomaError("prompt must hold at least one token, got an empty text")
            self.caches.of_text(10**9)  # raises before anything is loaded
            if self.dry_run:
                check_folder(self.out, "generate")
                self.plan("generate", self._takes())
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
        from joma.analysis.caches import AskedCaches

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
        device = cmd.chosen_device(self.device)
        with working("generate", self.settings, self.out) as begin:
            with reports("generate") as report:
                report("load the model", 0, 1)
                loaded, tokens, caches = self._prepared()
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

    def _prepared(self) -> "tuple[Loaded, list[int], list[NamedCache]]":
        """Return the model, the prompt's tokens, and the caches to compare.

        Raises:
            JomaError: Something that was asked for is impossible.
        """
        from joma.analysis.generation import check_generates, check_length, encode_prompt
        from joma.inference import Full, cache

        loaded = self.load(self.dtype)
        check_generates(loaded.model, loaded.source)
        tokens = encode_prompt(loaded, self.text, chat=self.chat)
        if note := check_length(loaded, len(tokens), self.max_new_tokens):
            _render.say(note, err=True)
        longest = len(tokens) + self.max_new_tokens
        caches = self.caches.of_text(longest, loaded.model, tokens)
        for policy in (Full(), *(it.policy for it in caches)):
            assert policy is not None
            with cache(loaded.model, policy):  # raises where it cannot serve the model
                pass
        return loaded, tokens, caches

    def _write_text(
        self, run: "Run", loaded: "Loaded", tokens: list[int], caches: "list[NamedCache]"
    ) -> str:
        """Generate; what there is when it is interrupted is printed and saved."""
        made = ""
        whole = self.sweep is not None or (self.cache or [])[:1] == ["full"] or not caches
        try:
            for piece in self._pieces(loaded, tokens, None if whole else caches[0]):
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
        from joma.analysis import generation

        stream = generation.TextStream(loaded, tokens)
        policy = None if cache is None else cache.policy
        with generation.reading_with(loaded.model, policy, self.chunk) as reader:
            for token in generation.generate_tokens(
                reader,
                tokens,
                self.max_new_tokens,
                temperature=self.temperature,
                seed=self.seed,
                stop=generation.stop_tokens(loaded),
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

    def _takes(self) -> dict[str, Any]:
        """Return what it takes, known without loading for the model of a folder here alone."""
        import torch

        from joma.analysis.generation import check_generates, check_length, encode_prompt
        from joma.inference import Full, cache_bytes
        from joma.models.loading import check_source, outlined

        check_source(self.model, revision=self.revision, tokenizer=self.tokenizer)
        loaded = outlined(self.model, revision=self.revision, tokenizer=self.tokenizer)
        if loaded is None:
            unknown = dict.fromkeys(("prompt_tokens", "caches", "about_seconds"))
            return {**unknown, "new_tokens": self.max_new_tokens}
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
            "new_tokens": self.max_new_tokens,
            "caches": [
                {"cache": name, "bytes": size, "share": size / sizes["full"]}
                for name, size in sizes.items()
            ],
            "about_seconds": work / device_speed(cmd.chosen_device(self.device)) + 5,
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
    for row in rows[1:] if len(rows) <= 4 else ():
        _render.say(sentence(row), err=err)
    _render.say(
        f"Nats per token, on {rows[0]['text_tokens']} tokens of the prompt's own end and "
        f"{rows[0]['reply_tokens']} of the full cache's reply: more than the full cache's, ± one "
        f"standard error; the full cache's row has its own. {CAVEAT}",
        err=err,
    )


def _cost_table(rows: Sequence[dict[str, Any]], name: Callable[[str], str]) -> Any:
    headings = ("cache", "keys", "cache bytes", "own text, nats", "reply, nats", "same choice",
                "ms/token", "speed (95%)")  # fmt: skip
    table = _render.table(headings, [(name(row["cache"]), *_costs(row)) for row in rows])
    table.columns[0].no_wrap = True
    return table


def _costs(row: dict[str, Any]) -> list[str]:
    size = _render.size_text(row["bytes"])
    if row["policy"] == "full":
        nats = [_number(row[f"{of}_nll"], ".3f") for of in ("text", "reply")]
        return ["–", size, *nats, "", _number(row["ms"], ".1f"), ""]
    speed = _number(row["speed"], ".2f")
    if math.isfinite(row["speed_low"]):
        speed += f" ({row['speed_low']:.2f} to {row['speed_high']:.2f})"
    return [
        _number(row["keys"], "g"),
        f"{size} {row['share']:6.1%}",
        *(_number(row[f"{of}_cost"], "+.3f", row[f"{of}_error"]) for of in ("text", "reply")),
        _number(row["agreement"], ".0%", row["agreement_error"]),
        _number(row["ms"], ".1f"),
        speed,
    ]


def _number(value: float, form: str, error: float = math.nan) -> str:
    """Return a number with its error, a dash where it was not measured."""
    if math.isnan(value):
        return "–"
    shown = f"{round(value, 3) + 0.0:{form}}"  # no minus sign before zero
    return shown if math.isnan(error) else f"{shown} ± {error:{form.strip('+')}}"


def _finding(rows: Sequence[dict[str, Any]], made: str) -> str:
    from joma.report.cache_cost import sentence

    limited = [row for row in rows if row["policy"] != "full"]
    return sentence(limited[0]) if limited else f"{len(made)} characters generated."
