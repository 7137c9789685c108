"""How anything is printed: text, tables and JSON, on any terminal.

Signs that a terminal does not have are spelled out: "<=" for ≤, "rho" for ρ.
"""

import codecs
import io
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from typing import TYPE_CHECKING, Any, Literal

import typer

from joma import errors

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

Record = dict[str, Any]
"""What is printed of one claim, experiment or run, as JSON has it."""

SPELLED = "joma-spelled"
"""Name of the error handler of a stream that spells out what it cannot encode."""

_ACTING = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that act on a terminal or cannot be encoded, and that JSON need not escape."""

_FILE_WIDTH = 140

_HANGING = 2
"""Spaces before what continues a line that begins without any."""

_SIGNS = {
    "✓": "ok",
    "✗": "NO",
    "≤": "<=",
    "≥": ">=",
    "≪": "<<",
    "≫": ">>",
    "→": "->",
    "∞": "inf",
    "−": "-",
    "–": "-",
    "·": "*",
    "×": "x",
    "±": "+-",
    "′": "'",
    "‖": "||",
    "√": "sqrt",
    "⁄": "/",
}


def as_json(value: Any) -> None:
    """Print `value` as JSON on standard output; what acts on a terminal is escaped."""
    written = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
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
    if limited(sys.stderr if err else sys.stdout):
        text = "\n".join(_wrapped(line) for line in text.split("\n"))
    typer.echo(text, err=err)


def limited(stream: Any) -> bool:
    """Return whether a window limits what is written to a stream; a file has any width."""
    return stream.isatty() or "COLUMNS" in os.environ


def _wrapped(line: str) -> str:
    indent = re.match(r" *(?:- )?", line)
    assert indent is not None
    return textwrap.fill(
        line,
        max(shutil.get_terminal_size().columns, 20),
        subsequent_indent=" " * (len(indent[0]) or _HANGING),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def console(*, err: bool = False) -> "Console":
    """Return standard output or error; wide when it is a file, for nobody's window limits it."""
    from rich.console import Console

    width = None if limited(sys.stderr if err else sys.stdout) else _FILE_WIDTH
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


def table(*columns: str, justify: Literal["left", "right"] = "left") -> "Table":
    """Return an empty table in the house style, whose cells escape what acts on a terminal."""
    from rich import box
    from rich.table import Table

    class Escaped(Table):
        def add_row(self, *cells: Any, **options: Any) -> None:
            shown = (printable(cell) if isinstance(cell, str) else cell for cell in cells)
            super().add_row(*shown, **options)

    empty = Escaped(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        empty.add_column(printable(column), overflow="fold", justify=justify)
    return empty


def mark(holds: bool) -> "Text":
    """Return a green ✓ or a red ✗."""
    from rich.text import Text

    if holds:
        return Text.assemble((printable("✓"), "green"))
    return Text.assemble((printable("✗"), "bold red"))


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


def spell_out_what_streams_lack() -> None:
    """Spell out ✓ and Greek letters on a standard output or error that cannot encode them."""
    codecs.register_error(SPELLED, _handle)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SPELLED)


def printable(text: str) -> str:
    """Return `text` as standard output will show it, so that a table can be laid out for it.

    What a terminal would act on, such as ESC in the name of a module, is escaped.
    """
    text = errors.printable(text, limit=None)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return spelled(text)
    return text


def spelled(text: str) -> str:
    """Return `text` in ASCII; what has no spelling becomes a question mark."""
    pieces: list[str] = []
    for raised, signs in itertools.groupby(text, _raised):
        word = "".join(map(_spell, signs))
        pieces.append(f"^{word}" if raised else word)
    return "".join(pieces)


def _spell(sign: str) -> str:
    if sign.isascii():
        return sign
    if sign in _SIGNS:
        return _SIGNS[sign]
    if unicodedata.combining(sign):
        return ""
    kind, _, letter = unicodedata.name(sign, "").partition(" LETTER ")
    if kind.startswith("GREEK") and letter.isalpha():
        return letter.capitalize() if "CAPITAL" in kind else letter.lower()
    parts = unicodedata.normalize("NFKD", sign)
    return "?" if parts == sign else spelled(parts)


def _raised(sign: str) -> bool:
    return unicodedata.decomposition(sign).startswith("<super>")


def _handle(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return spelled(error.object[error.start : error.end]), error.end
