"""How anything is printed: sentences, tables, plans and JSON, on any terminal."""

import codecs
import io
import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from joma import errors
from joma.common.json_files import plain
from joma.common.text import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from joma.runs import Run

Record = dict[str, Any]
"""What is printed of one claim, experiment or run, as JSON has it."""

_ACTING = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that act on a terminal or cannot be encoded, and that JSON need not escape."""

_FILE_WIDTH = 140

_SIGNS = {"✓": "ok", "✗": "NO", "≤": "<=", "→": "->", "∞": "inf", "−": "-", "–": "-", "·": "*"}
_SIGNS |= {"×": "x", "±": "+-", "ρ": "rho", "«": ">", "»": "<", "…": "...", "⁻": "^-"}


def as_json(value: Any) -> None:
    """Print a value as JSON on standard output; what acts on a terminal is escaped."""
    written = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    typer.echo(_ACTING.sub(lambda found: f"\\u{ord(found[0]):04x}", written))


def say(text: str, *, err: bool = False) -> None:
    """Print a line, whatever a file or the user put into it: what acts on a terminal is escaped.

    On a terminal a line that is too long continues on the next, indented, and never inside a word;
    a path or command stays in one piece.

    Args:
        text: The line, or several.
        err: Whether it goes to standard error.
    """
    text = errors.printable(text, limit=None)
    if _limited(sys.stderr if err else sys.stdout):
        text = "\n".join(_wrapped(line) for line in text.split("\n"))
    typer.echo(text, err=err)


def plan(record: Mapping[str, Any], *, json: bool) -> None:
    """Print what a command would do, and what that takes as far as it is known.

    Args:
        record: What JSON has; its first entry is what would be measured or made, "run" the folder.
        json: Whether JSON is printed.
    """
    if json:
        as_json(record)
        return
    named, *rest = record.items()
    say(f"{named[1]} → {record['run']}")
    for key, value in rest:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                say(f"  {_label(key)}: {name} {_planned(key, inner)}")
        elif key != "run" and value is not None:
            say(f"  {_label(key)}: {_planned(key, value)}")


def _label(key: str) -> str:
    """Return what a part of a plan is called."""
    words = {"about_seconds": "about", "about_bytes": "memory about"}
    return words.get(key) or key.removesuffix("_bytes").replace("_", " ")


def _planned(key: str, value: Any) -> str:
    """Return a part of a plan in words, with the unit that the name of its key ends in."""
    if isinstance(value, Mapping):
        named = {_label(name): _planned(name, it) for name, it in value.items()}
        return ", ".join(f"{name} {words}" for name, words in named.items())
    if isinstance(value, list | tuple):
        return ", ".join(_planned(key, it) for it in value) or "none"
    if value is None:
        return "by default"
    if key.endswith("seconds"):
        return duration(value)
    if key.endswith("bytes"):
        return size_text(value)
    return f"{value:,}" if type(value) is int else cell(value)


def size_text(size: float) -> str:
    """Return a number of bytes with its unit."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"


def say_files(run: "Run") -> None:
    """Print where the figures of a run are; the run folder if it has none."""
    for path in run.figures or [run.path]:
        typer.echo(printable(f"  {path}"))  # whole, whatever the width, so that it can be copied


def console(*, err: bool = False) -> "Console":
    """Return standard output or error; wide when it is a file, for nobody's window limits it."""
    from rich.console import Console

    width = None if _limited(sys.stderr if err else sys.stdout) else _FILE_WIDTH
    return Console(width=width, highlight=False, markup=False, stderr=err)


def put(*renderables: Any, err: bool = False) -> None:
    """Print what rich can; into a file or a pipe without the spaces that fill lines.

    Args:
        renderables: What is printed, one below the other.
        err: Whether it goes to standard error.
    """
    out = console(err=err)
    if out.is_terminal:
        out.print(*renderables, sep="\n")
        return
    with out.capture() as captured:
        out.print(*renderables, sep="\n")
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()), err=err)


def paragraph(words: "str | Text", indent: int = 2, sign: Any = "", style: str = "") -> None:
    """Print words in lines that fit, indented, with a sign in front if there is one."""
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 1, 0, 0) if sign else 0)
    row.add_column(width=indent + bool(sign), justify="right", no_wrap=True)
    row.add_column()
    text = Text(printable(words), style="" if sign else style) if isinstance(words, str) else words
    row.add_row(Text(printable(sign), style=style) if isinstance(sign, str) else sign, text)
    put(row)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]] = (), left: int = 1) -> "Table":
    """Return a table in the house style, whose cells escape what acts on a terminal.

    Args:
        columns: The headings; without any text there is no line of headings.
        rows: The cells: texts of rich, words, numbers, or None for a dash.
        left: Columns that are aligned to the left; those after them hold numbers.
    """
    from rich import box
    from rich.table import Table

    found = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        show_header=any(columns),
    )
    for place, column in enumerate(columns):
        justify = "left" if place < left else "right"
        found.add_column(printable(column), overflow="fold", justify=justify)
    for row in rows:
        found.add_row(*(one if hasattr(one, "plain") else cell(one) for one in row))
    return found


def mark(holds: bool) -> "Text":
    """Return a green ✓ or a red ✗."""
    from rich.text import Text

    return Text(printable("✓" if holds else "✗"), style="green" if holds else "bold red")


def cell(value: Any, form: str = ".4g") -> str:
    """Return a cell of a table: a dash for None, and floats in a format."""
    if value is None:
        return printable("–")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:{form}}" if isinstance(value, float) else printable(str(value))


def sentence(words: str) -> str:
    """Return words that begin as a sentence does."""
    return words[:1].upper() + words[1:]


def printable(text: str) -> str:
    """Return `text` as standard output will show it, so that a table can be laid out for it.

    What a terminal would act on, such as ESC in the name of a module, is escaped.
    """
    text = errors.printable(text, limit=None)
    encoding = sys.stdout.encoding or "ascii"
    try:
        return text.encode(encoding).decode(encoding)
    except UnicodeEncodeError:
        return "".join(sign if sign.isascii() else _spelled(sign) for sign in text)


def spell_out_what_streams_lack() -> None:
    """Spell out ✓ and ≤ on a standard output or error that cannot encode them."""

    def handle(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(map(_spelled, error.object[error.start : error.end])), error.end

    codecs.register_error("joma-spelled", handle)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="joma-spelled")


def _spelled(sign: str) -> str:
    return _SIGNS.get(sign) or unicodedata.normalize("NFKD", sign)[0].encode(
        "ascii", "replace"
    ).decode("ascii")


def _limited(stream: Any) -> bool:
    """Return whether a window limits what is written to a stream; a file has any width."""
    return stream.isatty() or "COLUMNS" in os.environ


def _wrapped(line: str) -> str:
    indent = re.match(r" *(?:- )?", line)
    assert indent is not None
    return textwrap.fill(
        line,
        max(shutil.get_terminal_size().columns, 20),
        subsequent_indent=" " * (len(indent[0]) or 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
