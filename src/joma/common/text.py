"""Short pieces of text for messages."""

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
