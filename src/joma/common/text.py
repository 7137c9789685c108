"""Short pieces of text for messages."""

import shutil
import sys
import textwrap

from joma.errors import printable


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class where it has none."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return printable(line or type(error).__name__, limit=200)


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours, such as "90 s", "12 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def wrapped(text: str, width: int | None = None) -> str:
    """Return lines broken between words, the rest of each indented below its start.

    Args:
        text: One line or several.
        width: Columns of a line, 0 for lines as long as they are; None for the columns of the
            terminal, where standard output is one, and otherwise 0.
    """
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if not width:
        return text
    return "\n".join(_wrapped_line(line, max(width, 20)) for line in text.splitlines())


def _wrapped_line(line: str, width: int) -> str:
    start = len(line) - len(line.lstrip(" "))
    # Advice is indented by four already; its lines stay below one another.
    indent = " " * (start if start > 2 else start + 2)
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
