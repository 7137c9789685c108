"""The error of a user's mistake, as opposed to a defect of this package.

Every other room may import this module; it imports none.
"""

import unicodedata

MESSAGE_LENGTH = 600
"""Characters of a message that are shown; a name or a shape in a file may be far longer."""

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories of characters that act on a terminal, show nothing, or cannot be encoded."""


class JomaError(ValueError):
    """Raised for input, files or settings that cannot be used.

    The message is one sentence that names what was given and what would be right. The command line
    prints it and exits with code 2. Any other exception is a defect of this package.
    """


def how_to_install(extra: str) -> str:
    """Return the command that installs an optional dependency into a clone of the repository.

    The package is on no index, so its extras are installed from the clone.

    Args:
        extra: The name of the extra, such as "hf".

    >>> how_to_install("hf")
    "pip install -c constraints.txt -e '.[hf]', in the clone of joma"
    """
    return f"pip install -c constraints.txt -e '.[{extra}]', in the clone of joma"


def printable(text: str, limit: int | None = MESSAGE_LENGTH) -> str:
    r"""Return text that is safe to print, whatever a file or a user put into it.

    Control characters (a terminal acts on ESC), marks that reorder text, and lone surrogates become
    their Python escapes; newlines and tabs stay. Text longer than the limit loses its middle.

    Args:
        text: The text, for example a tensor's name or an error message.
        limit: Longest text returned, in characters before escaping, or None for no limit.

    >>> printable("\x1b[2Jmodel.weight")
    '\\x1b[2Jmodel.weight'
    >>> printable("x" * 50, limit=20)
    'xxxxxxxxx … xxxxxxxx'
    """
    if limit is not None and len(text) > limit:
        head = limit // 2 - 1
        text = f"{text[:head]} … {text[len(text) - (limit - head - 3) :]}"
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _INVISIBLE:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
