"""A command as a dataclass: its fields are its options, its settings, and what a run records."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer
from typer.core import TyperCommand

from joma.cli import _render
from joma.cli._errors import OneSentenceGroup
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.models import Loaded

LARGEST = 2**63 - 1
"""The largest whole number that an option takes: what torch and NumPy hold in 64 bits."""

_UNRECORDED = {"json", "given", "out", "dry_run", "device", "jobs"}
"""Fields that decide where and how a command works, not its numbers."""


def parsed(kind: Callable[[Any], Any], fits: Callable[[Any], bool], wanted: str) -> Any:
    """Return a parser of an option's value whose error says what was given.

    Args:
        kind: Makes a value of a word.
        fits: Returns whether a value may be given.
        wanted: What it must be, as the end of a sentence.
    """

    def parse(given: Any) -> Any:
        try:
            value = kind(given)
            good = fits(value)
        except ValueError:
            good, value = False, None
        if not good:
            raise typer.BadParameter(f"it must be {wanted}, not {given!r}.")
        return value

    return parse


def whole(least: int) -> Any:
    """Return a parser of whole numbers from `least` on."""
    words = f"a whole number from {least} on, below 2**63"
    return parsed(int, lambda number: least <= number <= LARGEST, words)


def one_of(*choices: str) -> Any:
    """Return a parser of one of a few words."""
    return parsed(str, lambda word: word in choices, ", ".join(choices))


positive = parsed(float, lambda number: 0 < number < math.inf, "a positive number")
share = parsed(float, lambda number: 0 < number < 1, "a share above 0 and below 1")


def option(
    metavar: str,
    help: str,
    default: Any = None,
    *,
    parser: Callable[[Any], Any] | None = None,
    completion: Callable[[str], list[str]] | None = None,
    name: str | None = None,
) -> Any:
    """Return a field that is an option.

    Args:
        metavar: What stands for its value in the help.
        help: What it is.
        default: Its value where it is not given.
        parser: Makes the value of a word; typer does by the field's type if None.
        completion: Returns what a shell may complete a word to.
        name: Its name with dashes, if not the field's.
    """
    info = {"metavar": metavar, "help": help, "parser": parser, "autocompletion": completion}
    return dataclasses.field(default=default, metadata={"option": info, "name": name})


def count(help: str, default: int | None = None, *, least: int = 1) -> Any:
    """Return a field that is an option with a whole number."""
    return option("N", help, default, parser=whole(least))


def flag(help: str, default: bool = False, *, name: str | None = None) -> Any:
    """Return a field that is an option without a value."""
    return dataclasses.field(default=default, metadata={"option": {"help": help}, "name": name})


def argument(
    metavar: str,
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    completion: Callable[[str], list[str]] | None = None,
) -> Any:
    """Return a field that is an argument, which must be given unless it has a default."""
    info = {"metavar": metavar, "help": help, "autocompletion": completion}
    return dataclasses.field(default=default, metadata={"argument": info})


def completing(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function by which a shell completes one of a few words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def seed_option() -> Any:
    """Return the field `seed`."""
    return count("Decides every random number.", 0, least=0)


def json_flag() -> Any:
    """Return the field `json`."""
    return flag("Print JSON for scripts.")


def out_option() -> Any:
    """Return the field `out`."""
    return option("DIR", "Run folder to write; otherwise a new ./runs/NAME-DATE-TIME.")


def device_option(
    help: str = "Where it runs: cpu, cuda, or auto, which takes cuda if it is there.",
) -> Any:
    """Return the field `device`."""
    return option("DEVICE", help, "auto", parser=one_of("auto", "cpu", "cuda"))


def dtype_option() -> Any:
    """Return the field `dtype`."""
    types = one_of("float32", "float16", "bfloat16")
    return option("DTYPE", "What the model computes in.", "float32", parser=types)


def text_option() -> Any:
    """Return the field `text`."""
    return option(
        "TEXT",
        "What it reads: embedded (prose that comes with Python), wikitext-2, a file, or - for "
        "standard input.",
        "embedded",
    )


def model_argument(default: Any = dataclasses.MISSING) -> Any:
    """Return the field `model`."""
    words = "A model's folder, hub id, .gguf file or llama2.c checkpoint."
    return argument("MODEL", words, default=default)


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every command has; its docstring is its help, and `run` does the work.

    Attributes:
        summary: What it does, for the list of commands.
        example: A command line without `joma`.
        given: The fields that the user gave.
    """

    summary: ClassVar[str]
    example: ClassVar[str]
    given: frozenset[str] = frozenset()

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the numbers, as a run folder records it."""
        names = (one.name for one in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name not in _UNRECORDED}

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """Return the arguments and options, those of the class itself first."""
        hints, own, found = get_type_hints(cls), inspect.get_annotations(cls), []
        for one in sorted(dataclasses.fields(cls), key=lambda one: one.name not in own):
            if "argument" in one.metadata:
                info = typer.Argument(**one.metadata["argument"])
            elif "option" in one.metadata:
                name = one.metadata["name"] or f"--{one.name.replace('_', '-')}"
                info = typer.Option(name, **one.metadata["option"])
            else:
                continue
            default = inspect.Parameter.empty if one.default is dataclasses.MISSING else one.default
            kind, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[hints[one.name], info]
            found.append(inspect.Parameter(one.name, kind, default=default, annotation=annotation))
        return found

    @classmethod
    def of(cls, **given: Any) -> "Command":
        """Return the command with the values that were parsed."""
        return cls(**given)

    def run(self) -> None:
        """Do the work and print what came of it."""
        raise NotImplementedError

    def note_idle(self, names: Iterable[str], why: str) -> None:
        """Say of those of the options that were given that they change nothing.

        Args:
            names: Fields of the command.
            why: They do not, as the end of a sentence.
        """
        given = [f"--{name.replace('_', '-')}" for name in names if name in self.given]
        if given:
            options = " and ".join(filter(None, (", ".join(given[:-1]), given[-1])))
            verb = "has" if len(given) == 1 else "have"
            typer.echo(f"joma: {options} {verb} no effect {why}", err=True)


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Command):
    """A command that loads a model, measures it and writes a run folder."""

    model: str = model_argument()
    revision: str | None = option("REV", "Branch, tag or commit of a hub id.")
    tokenizer: str | None = option(
        "PATH", "Another tokenizer than the model's; bytes takes every byte as a token."
    )
    device: str = device_option()
    out: Path | None = out_option()
    seed: int = seed_option()
    json: bool = json_flag()
    dry_run: bool = flag("Say what it would take, and stop.")

    def plan(
        self, name: str, takes: Mapping[str, Any], what: Mapping[str, Any] | None = None
    ) -> None:
        """Print what would be measured, where it goes, and what it takes.

        Args:
            name: Name of the run.
            takes: What it takes, as JSON has it.
            what: What would be measured, if it is not the model.
        """
        from joma.runs import default_folder

        run = str(self.out or default_folder(name))
        device = chosen_device(self.device)
        record = {**(what or {"model": self.model}), "run": run, "device": device, **takes}
        _render.plan(record, json=self.json)

    def load(self, dtype: str = "float32") -> "Loaded":
        """Return the model on the chosen device."""
        import torch

        from joma.models import load

        return load(
            self.model,
            revision=self.revision,
            tokenizer=self.tokenizer,
            device=chosen_device(self.device),
            dtype=getattr(torch, dtype),
        )


def chosen_device(asked: str) -> str:
    """Return the device that `--device` means on this machine."""
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and found == "cpu":
        raise JomaError("--device must be cpu or auto where torch sees no GPU, got 'cuda'")
    return found if asked == "auto" else asked


def add_command(app: typer.Typer, kind: type[Command], name: str | None = None) -> None:
    """Add a command to a group, under the name of its class unless another is given."""

    def call(context: typer.Context, **values: Any) -> None:
        sources = {one: context.get_parameter_source(one) for one in values}
        given = {one for one, source in sources.items() if source and source.name == "COMMANDLINE"}
        kind.of(**values, given=frozenset(given)).run()

    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    call.__signature__ = inspect.Signature([context, *kind.parameters()])  # type: ignore[attr-defined]
    app.command(
        name or kind.__name__.lower(),
        cls=_PlainCommand,
        help=inspect.cleandoc(kind.__doc__ or ""),
        short_help=kind.summary,
        epilog=f"Example: joma {kind.example}",
    )(call)


def command_group(help: str, example: str, kinds: Mapping[str, type[Command]]) -> typer.Typer:
    """Return a group of commands by name, such as `joma runs`, that alone prints its help."""

    def print_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    group = typer.Typer(
        cls=OneSentenceGroup,
        callback=print_help,
        help=help,
        epilog=f"Example: joma {example}",
        invoke_without_command=True,
        rich_markup_mode=None,
    )
    for name, kind in kinds.items():
        add_command(group, kind, name)
    return group


class _PlainCommand(TyperCommand):
    """A command whose help names arguments as the user writes them, without Python types."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^\{(.*)\}((?:\.\.\.)?)$", r"\1\2", piece) for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for heading, kind in (("Arguments", "argument"), ("Options", "option")):
            records = [
                param.get_help_record(ctx)
                for param in self.get_params(ctx)
                if param.param_type_name == kind
            ]
            rows = [(re.sub(r" <.*>$", "", record[0]), record[1]) for record in records if record]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
